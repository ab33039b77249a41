"""When a kernel can run, when it is worth it, and how it is cut into blocks: every such rule is here.

Block sizes follow from the sizes alone (nothing is tuned at call time). Measured on an NVIDIA H200, torch 2.11,
triton 3.6. This file does not import Triton.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

__all__ = [
    "attend_backward_plan",
    "attend_plan",
    "attends_tokens_at_once",
    "averages_plan",
    "built_plan",
    "class_block",
    "dot_precision",
    "itself_plan",
    "layer_fits",
    "layer_plan",
    "most_built_keys",
    "most_layer_keys",
    "multiplies_tokens_exactly",
    "norm_plan",
    "norm_refused",
    "outer_plan",
    "pixels_plan",
    "refuses",
    "rows_plan",
    "sample_backward_plan",
    "sample_plan",
    "token_attention_plan",
    "worth_it",
]

Function = TypeVar("Function", bound=Callable[..., Any])

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Channels of one head: a tile of sixteen positions still fits on the chip.
_WIDEST_HEAD = 512
# Bytes of shared memory that "auto" wants for a block of threads; an A100 has 163 KB, an H200 227.
_ROOM = 160 * 1024
# Offsets within a sample are 32-bit integers.
_LARGEST_SAMPLE = 2**31


def _constant(function: Function) -> Function:
    """What torch.compiler.assume_constant_result does, without importing the compiler to say so."""
    function.__dict__["_dynamo_marked_constant"] = True
    return function


def refuses(query: Tensor, key: Tensor, value: Tensor, num_heads: int = 1) -> str | None:
    """Why the kernels cannot take this input, in words; None where they can."""
    if not query.is_cuda and not interpreted():
        return f"it needs a CUDA tensor, and query is on {query.device}"
    if query.dtype not in _DTYPES:
        return f"it computes in float32, bfloat16 and float16, not in {str(query.dtype).removeprefix('torch.')}"
    batch, channels = query.shape[:2]
    widest = (channels if value is query else max(channels, value.shape[1])) // num_heads
    if widest > _WIDEST_HEAD:
        return f"a head may have up to {_WIDEST_HEAD} channels, not {widest}"
    if batch == 0:
        return "the batch is empty"
    for name, x in (("query", query),) if value is query else (("query", query), ("key", key), ("value", value)):
        if x.numel() // batch >= _LARGEST_SAMPLE:
            return f"a sample of {name} must have fewer than 2**31 elements, not {x.numel() // batch}"
    if torch.compiler.is_compiling():
        return _captured_reason()
    if torch._C._get_tracing_state() is not None:
        return "traced programs must run without Triton"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "torch.func's transforms do not see through it"
    return _broken()


@_constant
def _captured_reason() -> str | None:
    """Why a program that is being captured must not hold kernels: it is exported, or Triton does not work.

    Asked outside of what is captured: PyTorch 2.11's compiler takes every capture for an export, and finding out
    whether Triton works changes what the next call sees.
    """
    return "exported programs must run without Triton" if torch.compiler.is_exporting() else _broken()


def _broken() -> str | None:
    if _unavailable:
        return _unavailable[0]
    return None if interpreted() else unavailable()


def worth_it(operator: str, query: Tensor, key: Tensor, value: Tensor, num_heads: int = 1) -> bool:
    """Whether "auto" should pick the kernels: where the benchmark shows them ahead of the torch backend.

    Measured in bfloat16 on channels-last images, from (8, 8, 56²) to (4, 64, 512²): 2.4 to 15 times as fast as the
    torch backend, forward and with backward, on the device and as a user sees it (``results/operators-h200.json``),
    and 2 to 7 times as fast as that backend compiled (``results/operators-h200-peers.json``). As layers of compiled
    networks they are ahead too (``results/networks-h200-compiled.json``). Contiguous maps gain less
    (``results/README.md``). What has not been measured stays with the torch backend: float32, other
    numbers of axes, wider heads. Regular attention has better kernels in PyTorch.

    Args:
        operator: "attention", "kv" or "qkv".
    """
    return (
        operator != "attention"
        and query.is_cuda
        and query.dim() == 4
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[1] <= 256 * num_heads
        and _has_room()
    )


_room: list[bool] = []


@_constant
def _has_room() -> bool:
    """Whether a block of threads has the shared memory that the blocks were chosen for: data-centre GPUs have."""
    if not _room:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        _room.append(getattr(properties, "shared_memory_per_block_optin", 0) >= _ROOM)
    return _room[0]


def interpreted() -> bool:
    """Whether Triton runs kernels in Python, on CPU tensors: for tests."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


_unavailable: list[str | None] = []


@_constant
def unavailable() -> str | None:
    """Why Triton does not work on this machine, found out once; None where it does."""
    if not _unavailable:
        _unavailable.append(_find_out())
        if _unavailable[0] is not None:
            warnings.warn(f"{_unavailable[0]}; the torch backend serves instead", RuntimeWarning, stacklevel=2)
    return _unavailable[0]


def _find_out() -> str | None:
    try:
        if torch.cuda.get_device_capability() < (8, 0):
            return "it needs a GPU of compute capability 8.0 or newer"
        from kronattn.ops.triton.probe import probe

        probe()
    except Exception as error:  # whatever is wrong with a Triton installation, the torch backend works
        lines = str(error).splitlines() or [""]
        return f"Triton does not work here: {type(error).__name__}: {lines[0]}"
    return None


# Programs that give every multiprocessor of a large GPU one, and that keep each busy with a few.
_FEWEST_PROGRAMS = 128
_ENOUGH_PROGRAMS = 528
# Keys that stay on the chip at once; also the block that longer lists are walked through in.
_MOST_KEYS = 128
# Samples (times heads) of more than 16 rows below which one program for each leaves most of the chip idle.
_FEWEST_SAMPLES = 64
# Bytes of a tensor whose kernels take no longer than their launches.
_SMALL = 2**20
# Bytes of the largest matrix of which a program holds several: tokens by tokens, or tokens by channels.
_LARGEST_TOKEN_TILE = 2**15
# Keys of a sample that one program holds.
_SAMPLE_BYTES = 8192
# Coefficients of one query, built, that one program holds: several tiles of that size, in registers.
_MOST_BUILT_KEYS = 4096


def dot_precision(dtype: torch.dtype) -> str:
    """How the tensor cores multiply: float32 as three products of tf32, which loses nothing that shows."""
    return "tf32x3" if dtype == torch.float32 else "ieee"


class AveragesPlan(NamedTuple):
    """Strips of rows, tiles of columns and blocks of channels of the averages."""

    block_rows: int
    block_width: int
    block_channels: int
    tiles: int
    channel_blocks: int
    splits: int
    rows_per_split: int
    lanes: int
    warps: int
    registers: int | None = None
    stages: int = 0


@lru_cache(maxsize=1024)
def averages_plan(
    batch: int, channels: int, height: int, width: int, itemsize: int, channels_last: bool
) -> AveragesPlan:
    """A warp for each row of a tile, up to 64 elements a thread, and programs enough to fill the chip."""
    if channels_last:
        block_width = min(_power_of_two(width), 64)
        block_channels = _channel_block(channels, 64 if block_width <= 16 else 32, 8)
    else:
        block_width = min(_power_of_two(width), 128)
        block_channels = _channel_block(channels, 16, 1)
    warps = 8 if block_width * block_channels >= 2048 else 4
    block_rows = warps
    while block_rows * block_width * block_channels < 32 * 32 * warps and block_rows < height:
        block_rows *= 2
    tiles, channel_blocks = _ceil(width, block_width), _ceil(channels, block_channels)
    splits = max(1, min(_FEWEST_PROGRAMS // (batch * tiles * channel_blocks), height // block_rows))
    if batch * channels * height * width * itemsize <= _SMALL:
        # A second launch, to add up parts, would take longer than the work that it saves.
        splits = 1
    rows_per_split = _ceil(_ceil(height, splits), block_rows) * block_rows
    splits = _ceil(height, rows_per_split)
    lanes = _lanes(block_width, block_channels, itemsize, channels_last)
    return AveragesPlan(
        block_rows,
        block_width,
        block_channels,
        tiles,
        channel_blocks,
        splits,
        rows_per_split,
        lanes,
        warps,
        128,
        3 if warps == 8 and channels_last and itemsize == 2 else 0,
    )


class OuterPlan(NamedTuple):
    """Tiles that the outer sum is written in."""

    block_rows: int
    block_width: int
    block_channels: int
    warps: int


@lru_cache(maxsize=1024)
def outer_plan(batch: int, channels: int, height: int, width: int, channels_last: bool) -> OuterPlan:
    """A tile of 16,384 elements."""
    block_channels = _channel_block(channels, 64 if channels_last else 8, 1)
    block_width = min(_power_of_two(width), 128 if channels_last else 256)
    block_rows = max(1, min(16384 // (block_width * block_channels), _power_of_two(height)))
    return OuterPlan(block_rows, block_width, block_channels, 8)


class TokenAttentionPlan(NamedTuple):
    """Rows and columns whose attention one program computes before it writes their outer sum."""

    block_rows: int
    block_width: int
    block_keys: int
    block_channels: int
    block_value_channels: int
    warps: int


@lru_cache(maxsize=1024)
def token_attention_plan(
    programs: int, head: int, value_head: int, height: int, width: int, key_count: int
) -> TokenAttentionPlan:
    """Sixteen rows, the fewest that tensor cores take, and as many columns as registers hold."""
    block_channels, block_value_channels = _dot_block(head), _dot_block(value_head)
    block_width = min(_dot_block(width), 64, max(16, 4096 // block_value_channels))
    return TokenAttentionPlan(16, block_width, _dot_block(key_count), block_channels, block_value_channels, 4)


class ItselfPlan(NamedTuple):
    """Blocks of the tokens' gradient: all of them at once."""

    block_keys: int
    block_channels: int
    warps: int


@lru_cache(maxsize=1024)
def itself_plan(head: int, count: int) -> ItselfPlan:
    """One program holds a sample's tokens, so more of them need more threads."""
    block_keys, block_channels = _dot_block(count), _dot_block(head)
    return ItselfPlan(block_keys, block_channels, 8 if block_keys * max(block_keys, block_channels) > 4096 else 4)


@lru_cache(maxsize=1024)
def attends_tokens_at_once(head: int, value_head: int, key_count: int) -> bool:
    """Whether the programs that write the outer sum can afford to compute their tokens' attention themselves."""
    return key_count <= _MOST_KEYS and _dot_block(key_count) * max(_dot_block(head), _dot_block(value_head)) <= 16384


class AttendPlan(NamedTuple):
    """Positions at a time, keys at a time, and ranges of positions that programs walk through."""

    block_positions: int
    block_keys: int
    block_channels: int
    block_value_channels: int
    splits: int
    per_split: int
    warps: int
    stages: int
    registers: int | None = None


@lru_cache(maxsize=1024)
def attend_plan(programs: int, head: int, value_head: int, positions: int, key_count: int, itemsize: int) -> AttendPlan:
    """The forward: sixty-four positions for each group of four warps."""
    block_channels, block_value_channels = _dot_block(head), _dot_block(value_head)
    widest = max(block_channels, block_value_channels) * itemsize // 2
    block_keys = _dot_block(key_count)
    if block_keys > _MOST_KEYS or block_keys * widest > 16384:
        # Blocks that are walked through are smaller: they hold the running sums besides.
        block_keys = max(16, min(block_keys, _MOST_KEYS // 2, 8192 // widest))
    block_positions = min(_dot_block(positions), 64, max(16, 8192 // widest))
    enough = _ENOUGH_PROGRAMS if key_count <= block_keys else positions * programs
    splits, per_split = _ranges(programs, positions, block_positions, enough)
    return AttendPlan(
        block_positions,
        block_keys,
        block_channels,
        block_value_channels,
        splits,
        per_split,
        4,
        3 if widest <= 128 else 2,
    )


@lru_cache(maxsize=1024)
def attend_backward_plan(
    programs: int, head: int, value_head: int, positions: int, key_count: int, itemsize: int
) -> AttendPlan:
    """The backward: the same, with smaller blocks where channels are many, since it holds more of them at once."""
    block_channels, block_value_channels = _dot_block(head), _dot_block(value_head)
    widest = max(block_channels, block_value_channels) * itemsize // 2
    block_keys = _dot_block(key_count)
    # All keys at once in float32 take twice the shared memory: 128 of 64 channels do not fit.
    if block_keys > _MOST_KEYS or block_keys * widest > 32768 // itemsize:
        block_keys = max(16, min(block_keys, _MOST_KEYS // 2, 8192 // widest))
    block_positions = min(_dot_block(positions), 64, max(16, 4096 // widest))
    one_block = key_count <= block_keys
    splits, per_split = _ranges(
        programs, positions, block_positions, _ENOUGH_PROGRAMS if one_block else _ENOUGH_PROGRAMS // 2
    )
    warps = 8 if block_keys * widest > 8192 else 4
    stages = 3 if widest <= 64 and not one_block else 1
    return AttendPlan(
        block_positions, block_keys, block_channels, block_value_channels, splits, per_split, warps, stages
    )


@lru_cache(maxsize=1024)
def layer_plan(
    programs: int, head: int, value_head: int, positions: int, key_count: int, itemsize: int, mode: str
) -> AttendPlan:
    """A layer's statistics and backward: the backward's blocks for "kv", a sample's tokens at once for "qkv"."""
    plan = attend_backward_plan(programs, head, value_head, positions, key_count, itemsize)
    if mode == "kv":
        return plan
    warps = itself_plan(max(head, value_head), key_count).warps
    return plan._replace(block_positions=plan.block_keys, splits=1, per_split=positions, warps=warps)


@lru_cache(maxsize=1024)
def layer_fits(head: int, value_head: int, key_count: int, itemsize: int, mode: str) -> bool:
    """Whether a layer's kernels can hold all keys at once, as their statistics and their backward do."""
    block_keys = layer_plan(1, head, value_head, key_count, key_count, itemsize, "kv").block_keys
    if key_count > block_keys or not attends_tokens_at_once(head, value_head, key_count):
        return False
    return mode == "kv" or _token_tile(head, value_head, key_count) * itemsize <= _LARGEST_TOKEN_TILE


@_constant
def most_layer_keys(head: int, value_head: int, itemsize: int, mode: str) -> int:
    """The most keys for which :func:`layer_fits`: one number to compare with, for sizes that are symbols."""
    return _most_layer_keys(head, value_head, itemsize, mode)


@lru_cache(maxsize=1024)
def _most_layer_keys(head: int, value_head: int, itemsize: int, mode: str) -> int:
    blocks = [block for block in (16, 32, 64, 128, 256) if layer_fits(head, value_head, block, itemsize, mode)]
    return max(blocks, default=0)


@lru_cache(maxsize=1024)
def multiplies_tokens_exactly(head: int, value_head: int, key_count: int) -> bool:
    """Whether the gradient of averaged queries can be afforded in float32, whatever the input is.

    What an average receives is a sum over a whole row, and where the softmax saturates little of it is left: half
    precision would show.
    """
    return _token_tile(head, value_head, key_count) * 4 <= _LARGEST_TOKEN_TILE


def _token_tile(head: int, value_head: int, key_count: int) -> int:
    return _dot_block(key_count) * max(_dot_block(key_count), _dot_block(head), _dot_block(value_head))


class SamplePlan(NamedTuple):
    """Blocks of the kernels that do a whole sample in one program: rows read and written at a time, and so on."""

    block_width: int
    block_rows: int
    block_rows_out: int
    block_positions: int
    block_channels: int
    lanes: int
    warps: int
    registers: int | None = None
    stages: int = 0


@lru_cache(maxsize=1024)
def sample_plan(
    programs: int, head: int, height: int, width: int, itemsize: int, mode: str, channels_last: bool
) -> SamplePlan | None:
    """One program for each sample and head; None where the map is too large, or the samples too few."""
    block_channels = _dot_block(head)
    block_width = max(8, _power_of_two(max(height, width)))
    if block_width > 32 or 2 * block_width * block_channels * itemsize > _SAMPLE_BYTES:
        return None
    if block_width > 16 and programs < _FEWEST_SAMPLES:
        return None
    block_rows_out = max(4, min(8192 // (block_width * block_channels), block_width))
    lanes = _lanes(block_width, block_channels, itemsize, channels_last)
    # 128 registers a thread let four programs share a multiprocessor: 512 samples in one go.
    registers = None if itemsize == 4 or (mode == "kv" and block_channels == 128) else 128
    positions = 64 if block_channels <= 128 else 32
    stages = 3 if block_channels <= 64 and itemsize == 2 else 0
    return SamplePlan(block_width, 4, block_rows_out, positions, block_channels, lanes, 4, registers, stages)


@lru_cache(maxsize=1024)
def sample_backward_plan(
    programs: int, head: int, height: int, width: int, itemsize: int, mode: str, channels_last: bool
) -> SamplePlan | None:
    """The same for the backward, which holds more at once."""
    plan = sample_plan(programs, head, height, width, itemsize, mode, channels_last)
    if plan is None:
        return None
    registers = 128 if itemsize == 2 and (mode == "qkv" or plan.block_channels <= 32) else None
    return plan._replace(registers=registers, stages=3 if itemsize == 2 else 0)


class RowsPlan(NamedTuple):
    """Rows and channels at a time."""

    block_rows: int
    block_channels: int
    warps: int


@lru_cache(maxsize=1024)
def rows_plan(batch: int, channels: int) -> RowsPlan:
    """A program for each sample and block of channels walks through all rows: narrow blocks where samples are few."""
    block_channels = min(_power_of_two(channels), 64 if batch * channels >= 64 * _FEWEST_PROGRAMS else 32)
    return RowsPlan(32, block_channels, 4)


@lru_cache(maxsize=1024)
def pixels_plan(channels: int) -> RowsPlan:
    """A program for each tile of 2,048 elements."""
    block_channels = min(_power_of_two(channels), 64)
    return RowsPlan(2048 // block_channels, block_channels, 4)


class BuiltPlan(NamedTuple):
    """Coefficients that were built: queries at a time with all their keys, and ranges that programs walk through."""

    block_rows: int
    block_keys: int
    block_parts: int
    programs: int
    per_program: int
    warps: int


@lru_cache(maxsize=1024)
def built_plan(rows: int, room: int) -> BuiltPlan:
    """Tiles of 4,096 coefficients; no more programs than can quickly add up what each other noted."""
    block_keys = _power_of_two(room)
    block_rows = max(1, min(4096 // block_keys, _power_of_two(rows)))
    tiles = _ceil(rows, block_rows)
    per_program = _ceil(tiles, min(tiles, _ENOUGH_PROGRAMS)) * block_rows
    programs = _ceil(rows, per_program)
    return BuiltPlan(block_rows, block_keys, _power_of_two(programs), programs, per_program, 8)


def class_block(classes: int) -> int:
    """How many classes those kernels copy at a time."""
    return max(8, min(_power_of_two(max(1, classes)), 64))


def most_built_keys() -> int:
    """Keys of a query that a program still holds at once."""
    return _MOST_BUILT_KEYS - 1


class NormPlan(NamedTuple):
    """Rows at a time, channels at a time, and how many programs share the rows of a block of channels."""

    block_rows: int
    block_channels: int
    blocks: int
    programs: int
    per_program: int
    warps: int


@lru_cache(maxsize=1024)
def norm_plan(rows: int, channels: int, writes: bool) -> NormPlan:
    """Batch norm over rows of channels: programs that add up are few and long, those that write are many."""
    if channels < 64:
        block_channels = max(16, _power_of_two(channels))
    else:
        # Lanes without a channel cost less than rows in many short pieces.
        block_channels = min((128, 64), key=lambda block: _ceil(channels, block) * block)
    block_rows = 8192 // block_channels
    blocks = _ceil(channels, block_channels)
    tiles = _ceil(rows, block_rows)
    programs = min(tiles, max(1, (8 * _FEWEST_PROGRAMS if writes else _ENOUGH_PROGRAMS) // blocks))
    per_program = _ceil(tiles, programs) * block_rows
    return NormPlan(block_rows, block_channels, blocks, _ceil(rows, per_program), per_program, 8)


def norm_refused(x: Tensor) -> bool:
    """Whether batch norm and its activation are better left to PyTorch: all but half precision on a GPU, eagerly."""
    return (
        not x.is_cuda
        or type(x) is not Tensor
        or x.dim() != 4
        or x.dtype not in (torch.bfloat16, torch.float16)
        or torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
        or _get_current_dispatch_mode() is not None
        or not 0 < x.numel() < _LARGEST_SAMPLE
        or _broken() is not None
    )


def _lanes(block_width: int, block_channels: int, itemsize: int, channels_last: bool) -> int:
    """How many positions a warp's threads read side by side when each reads 16 bytes of channels."""
    if not channels_last:
        return block_width
    return max(1, min(block_width, 32 * (16 // itemsize) // block_channels))


def _ranges(programs: int, positions: int, block: int, enough: int) -> tuple[int, int]:
    """How many ranges to cut the positions into so that there are enough programs, and a range's length."""
    blocks = _ceil(positions, block)
    splits = max(1, min(blocks, _ceil(enough, programs)))
    per_split = _ceil(blocks, splits) * block
    return _ceil(positions, per_split), per_split


def _channel_block(channels: int, most: int, fewest: int) -> int:
    """The widest block of ``fewest`` to ``most`` that divides the channels, or else the one that covers them best."""
    for block in (most, most // 2):
        if block >= fewest and channels % block == 0:
            return block
    return max(fewest, min(most, _power_of_two(channels)))


def _dot_block(size: int) -> int:
    """The smallest power of two that covers ``size`` and that tensor cores take."""
    return max(16, _power_of_two(size))


def _ceil(size: int, divisor: int) -> int:
    return -(-size // divisor)


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()
