"""How the kernels are cut into blocks. Sizes follow from the shapes alone: nothing is tuned at call time.

Chosen on an NVIDIA H200, torch 2.11, triton 3.6, by the shapes of ``results/operators-h200.json``. This file does not
import Triton.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

__all__ = [
    "AttendBlocks",
    "ColumnBlocks",
    "PoolBlocks",
    "RowBlocks",
    "attend_blocks",
    "ceil_div",
    "column_blocks",
    "dot_precision",
    "outer_blocks",
    "pool_blocks",
    "power_of_two",
    "row_blocks",
]

# Programs that give every multiprocessor of a large GPU one, and that keep each busy with a few.
_FEWEST_PROGRAMS = 128
_ENOUGH_PROGRAMS = 528
# Keys that stay on the chip at once; longer lists are walked through in blocks of half of it.
_MOST_KEYS = 128
# Bytes of a tensor whose kernels take no longer than their launches.
_SMALL = 2**20
# Elements from which on programs that add up have enough tiles each to load some ahead.
_LONG = 2**20


def dot_precision(dtype: torch.dtype) -> str:
    """How the tensor cores multiply: float32 as three products of tf32, which loses nothing that shows."""
    return "tf32x3" if dtype == torch.float32 else "ieee"


class PoolBlocks(NamedTuple):
    """Strips of rows, tiles of columns and blocks of channels that averages are taken in."""

    rows: int
    width: int
    channels: int
    tiles: int
    channel_blocks: int
    splits: int
    rows_per_split: int
    lanes: int
    warps: int
    stages: int


@lru_cache(maxsize=1024)
def pool_blocks(batch: int, channels: int, height: int, width: int, itemsize: int, channels_last: bool) -> PoolBlocks:
    """A warp for each row of a tile, up to 64 elements a thread, and programs enough to fill the chip."""
    if channels_last:
        block_width = min(power_of_two(width), 64)
        block_channels = _channel_block(channels, 64 if block_width <= 16 else 32, 8)
    else:
        block_width = min(power_of_two(width), 128)
        block_channels = _channel_block(channels, 16, 1)
    warps = 8 if block_width * block_channels >= 2048 else 4
    block_rows = warps
    while block_rows * block_width * block_channels < 32 * 32 * warps and block_rows < height:
        block_rows *= 2
    tiles, channel_blocks = ceil_div(width, block_width), ceil_div(channels, block_channels)
    splits = max(1, min(_FEWEST_PROGRAMS // (batch * tiles * channel_blocks), height // block_rows))
    if batch * channels * height * width * itemsize <= _SMALL:
        # A second launch, to add up parts, would take longer than the work that it saves.
        splits = 1
    rows_per_split = ceil_div(ceil_div(height, splits), block_rows) * block_rows
    # A warp's threads read so many positions side by side when each reads 16 bytes of channels.
    lanes = max(1, min(block_width, 32 * (16 // itemsize) // block_channels)) if channels_last else block_width
    stages = 3 if warps == 8 and channels_last and itemsize == 2 else 0
    blocks = block_rows, block_width, block_channels, tiles, channel_blocks
    return PoolBlocks(*blocks, ceil_div(height, rows_per_split), rows_per_split, lanes, warps, stages)


@lru_cache(maxsize=1024)
def outer_blocks(channels: int, height: int, width: int, channels_last: bool) -> tuple[int, int, int]:
    """Rows, columns and channels of the tiles that the outer sum is written in, 16,384 elements each."""
    block_channels = _channel_block(channels, 64 if channels_last else 8, 1)
    block_width = min(power_of_two(width), 128 if channels_last else 256)
    block_rows = max(1, min(16384 // (block_width * block_channels), power_of_two(height)))
    return block_rows, block_width, block_channels


class AttendBlocks(NamedTuple):
    """Positions at a time, keys at a time, and ranges of positions that programs walk through."""

    positions: int
    keys: int
    channels: int
    value_channels: int
    splits: int
    per_split: int
    warps: int
    stages: int


def attend_blocks(
    programs: int, head: int, value_head: int, positions: int, key_count: int, itemsize: int, backward: bool
) -> AttendBlocks:
    """Up to sixty-four positions at a time; in the backward, and for moments, fewer where channels are many, since more
    of them are held at once."""
    channels, value_channels = _dot_block(head), _dot_block(value_head)
    widest = max(channels, value_channels) * itemsize // 2
    keys = _dot_block(key_count)
    # All keys at once in float32 take twice the shared memory in the backward: 128 of 64 channels do not fit.
    if keys > _MOST_KEYS or keys * widest > (32768 // itemsize if backward else 16384):
        # Blocks that are walked through are smaller: they hold the running sums besides.
        keys = max(16, min(keys, _MOST_KEYS // 2, 8192 // widest))
    block = min(_dot_block(positions), 64, max(16, (4096 if backward else 8192) // widest))
    one_block, enough = key_count <= keys, _ENOUGH_PROGRAMS
    if backward:
        enough = enough if one_block else enough // 2
        warps = 8 if keys * widest > 8192 else 4
        stages = 3 if widest <= 64 and not one_block else 1
    else:
        enough = enough if one_block else positions * programs
        warps, stages = 4, 3 if widest <= 128 else 2
    splits, per_split = _ranges(programs, positions, block, enough)
    return AttendBlocks(block, keys, channels, value_channels, splits, per_split, warps, stages)


class RowBlocks(NamedTuple):
    """Rows at a time, channels at a time, and how many programs share the rows of a block of channels."""

    rows: int
    channels: int
    channel_blocks: int
    programs: int
    per_program: int
    warps: int
    stages: int


@lru_cache(maxsize=1024)
def row_blocks(rows: int, channels: int, writes: bool) -> RowBlocks:
    """Batch norm over rows of channels: programs that add up are few and long, those that write are many."""
    if channels < 64:
        block_channels = max(16, power_of_two(channels))
    else:
        # Lanes without a channel cost less than rows in many short pieces.
        block_channels = min((128, 64), key=lambda block: ceil_div(channels, block) * block)
    tile, stages = (8192, 3) if writes or rows * channels < _LONG else (4096, 4)
    block_rows = tile // block_channels
    blocks = ceil_div(channels, block_channels)
    tiles = ceil_div(rows, block_rows)
    programs = min(tiles, max(1, (8 * _FEWEST_PROGRAMS if writes else _ENOUGH_PROGRAMS // 2) // blocks))
    per_program = ceil_div(tiles, programs) * block_rows
    return RowBlocks(block_rows, block_channels, blocks, ceil_div(rows, per_program), per_program, 8, stages)


class ColumnBlocks(NamedTuple):
    """Columns of maps at a time, channels at a time, ranges of rows to walk down, and programs for all these items."""

    columns: int
    channels: int
    channel_blocks: int
    splits: int
    per_split: int
    items: int
    programs: int
    warps: int


@lru_cache(maxsize=1024)
def column_blocks(columns: int, rows: int, channels: int) -> ColumnBlocks:
    """The backward of depth-wise convolutions: two elements a thread, which holds nine weights and nine sums of each of
    its channels. Rows are cut where programs would not fill the chip; elsewhere programs take several items, since each
    leaves sums that have to be added up."""
    warps, enough = 4, 2 * _ENOUGH_PROGRAMS
    block_channels = max(8, min(32, power_of_two(channels)))
    block_columns = 64 * warps // block_channels
    column_count, channel_count = ceil_div(columns, block_columns), ceil_div(channels, block_channels)
    per_split = ceil_div(rows, max(1, min(enough // (column_count * channel_count), rows // 8)))
    splits = ceil_div(rows, per_split)
    items = column_count * splits
    programs = min(items, max(1, enough // channel_count))
    return ColumnBlocks(block_columns, block_channels, channel_count, splits, per_split, items, programs, warps)


def _ranges(programs: int, positions: int, block: int, enough: int) -> tuple[int, int]:
    """How many ranges to cut the positions into so that there are enough programs, and a range's length."""
    blocks = ceil_div(positions, block)
    splits = max(1, min(blocks, ceil_div(enough, programs)))
    per_split = ceil_div(blocks, splits) * block
    return ceil_div(positions, per_split), per_split


def _channel_block(channels: int, most: int, fewest: int) -> int:
    """The widest block of ``fewest`` to ``most`` that divides the channels, or else the one that covers them best."""
    for block in (most, most // 2):
        if block >= fewest and channels % block == 0:
            return block
    return max(fewest, min(most, power_of_two(channels)))


def _dot_block(size: int) -> int:
    """The smallest power of two that covers ``size`` and that tensor cores take."""
    return max(16, power_of_two(size))


def ceil_div(size: int, divisor: int) -> int:
    """How many pieces of ``divisor`` cover ``size``; Triton's own is a function for kernels, and takes its time."""
    return -(-size // divisor)


def power_of_two(size: int) -> int:
    """The smallest that is not below ``size``; Triton's own takes its time, too."""
    return 1 << (size - 1).bit_length()
