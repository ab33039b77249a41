"""Averages along both axes of a grid in one pass over it; the sums too, which are the outer sum's gradient.

A program walks down a strip of rows, a row for each warp: a row's sum takes few exchanges between threads, and column
sums stay in registers until the strip's end. Where strips cut columns (or tiles cut rows), each program writes its own
part and a second, tiny kernel adds the parts in a fixed order: no atomics, the same bits every time.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: RET505 (a kernel's compile-time branches must both be branches)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kronattn.ops.triton.blocks import grid_offsets, launch, token_offsets
from kronattn.ops.triton.layout import alignment, flat, rows_and_width
from kronattn.ops.triton.tuning import PoolBlocks, ceil_div, pool_blocks

__all__ = ["pool_forward"]


@triton.jit
def tile_sums(b_x, BR: tl.constexpr, BW: tl.constexpr, BC: tl.constexpr, LANES: tl.constexpr):
    """(BR, BC) sums over the rows of a tile (BW * BR, BC) that :func:`load_tile` has loaded."""
    b_lanes = tl.sum(tl.reshape(b_x, [BW // LANES, BR * LANES, BC]), axis=0)
    return tl.sum(tl.reshape(b_lanes, [BR, LANES, BC]), axis=1)


@triton.jit
def tile_columns(b_x, BR: tl.constexpr, BW: tl.constexpr, BC: tl.constexpr, LANES: tl.constexpr):
    """(BW, BC) sums over the columns of such a tile.

    Halves are added to each other until one row is left: where they belong to different warps, each exchange goes
    through shared memory once, as a whole, while a sum along an axis would take a barrier for every element.
    """
    if BR == 1:
        return tl.reshape(b_x, [BW, BC])
    else:
        b_halves = tl.permute(tl.reshape(b_x, [BW // LANES, 2, BR // 2 * LANES, BC]), (0, 2, 3, 1))
        b_upper, b_lower = tl.split(b_halves)
        return tile_columns(b_upper + b_lower, BR // 2, BW, BC, LANES)


@triton.jit
def load_tile(
    x, first, last, start, b_c, width, stride_p, stride_c,
    C: tl.constexpr, BR: tl.constexpr, BW: tl.constexpr, LANES: tl.constexpr, LAST: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Rows first to last (at most BR) and columns from start on of one sample: (BW * BR, channels).

    Position (i · BR + r) · LANES + l of the tile is row r, column i · LANES + l. Triton hands positions out to
    threads, then warps, then registers; with LANES as many as a warp reads side by side and BR warps, a warp holds
    one row, most of which a thread can add up by itself.
    """
    b_p = tl.arange(0, BW * BR)
    b_r = first + b_p // LANES % BR
    b_w = start + b_p // (BR * LANES) * LANES + b_p % LANES
    b_mask = ((b_r < last) & (b_w < width))[:, None] & (b_c < C)[None, :]
    b_offsets = grid_offsets(b_r * width + b_w, b_c, stride_p, stride_c, LAST, ALIGN)
    return tl.load(x + b_offsets, mask=b_mask, other=0.0)


@triton.jit
def pool_forward_kernel(
    x, tokens, column_parts, row_parts, stride_n, stride_c, stride_p, height, width, splits, rows_per_split,
    column_scale, row_scale,
    C: tl.constexpr, BR: tl.constexpr, BW: tl.constexpr, BC: tl.constexpr, LANES: tl.constexpr, LAST: tl.constexpr,
    ALIGN: tl.constexpr, STAGES: tl.constexpr, WHOLE_COLUMNS: tl.constexpr, WHOLE_ROWS: tl.constexpr,
):  # fmt: skip
    """Walk down a strip of one sample: write each row's sum as it comes, and the columns' sums at the end."""
    n = (tl.program_id(0) // splits).to(tl.int64)
    split = tl.program_id(0) % splits
    tile = tl.program_id(1)
    first = split * rows_per_split
    last = tl.minimum(first + rows_per_split, height)
    b_c = tl.program_id(2) * BC + tl.arange(0, BC)
    tokens += n * (height + width) * C
    x += n * stride_n * ALIGN
    if WHOLE_ROWS:
        rows = tokens + width * C
    else:
        rows = row_parts + (n * tl.num_programs(1) + tile) * height * C
        row_scale = 1.0
    b_row = tl.arange(0, BR)
    b_total = tl.zeros([BW * BR, BC], tl.float32)
    if STAGES == 0:
        b_next = load_tile(x, first, last, tile * BW, b_c, width, stride_p, stride_c, C, BR, BW, LANES, LAST, ALIGN)
    for r in tl.range(first, last, BR, num_stages=STAGES):
        if STAGES == 0:
            # The next rows are on their way to registers while these are added up.
            b_x = b_next.to(tl.float32)
            b_next = load_tile(
                x, r + BR, last, tile * BW, b_c, width, stride_p, stride_c, C, BR, BW, LANES, LAST, ALIGN
            )  # fmt: skip
        else:
            # Several tiles are on their way to shared memory.
            b_x = load_tile(x, r, last, tile * BW, b_c, width, stride_p, stride_c, C, BR, BW, LANES, LAST, ALIGN)
            b_x = b_x.to(tl.float32)
        b_total += b_x
        b_sums = tile_sums(b_x, BR, BW, BC, LANES) * row_scale
        b_store = (r + b_row < last)[:, None] & (b_c < C)[None, :]
        tl.store(rows + token_offsets(r + b_row, b_c, C), b_sums.to(rows.dtype.element_ty), mask=b_store)
    b_columns = tile_columns(b_total, BR, BW, BC, LANES)
    b_w = tile * BW + tl.arange(0, BW)
    b_store = (b_w < width)[:, None] & (b_c < C)[None, :]
    if WHOLE_COLUMNS:
        p_columns = tokens + token_offsets(b_w, b_c, C)
        tl.store(p_columns, (b_columns * column_scale).to(tokens.dtype.element_ty), mask=b_store)
    else:
        p_columns = column_parts + (n * splits + split) * width * C + token_offsets(b_w, b_c, C)
        tl.store(p_columns, b_columns, mask=b_store)


@triton.jit
def add_parts(parts, output, n, b_i, count, size, scale):
    """Elements ``b_i`` of one sample's output: the sum of ``count`` parts of ``size`` elements, scaled."""
    b_mask = (b_i >= 0) & (b_i < size)
    b_sum = tl.zeros_like(b_i).to(tl.float32)
    for part in range(count):
        b_sum += tl.load(parts + (n * count + part) * size + b_i, mask=b_mask, other=0.0)
    tl.store(output + b_i, (b_sum * scale).to(output.dtype.element_ty), mask=b_mask)


@triton.jit
def add_parts_kernel(
    column_parts, row_parts, tokens, height, width, splits, tiles, column_scale, row_scale,
    C: tl.constexpr, WHOLE_COLUMNS: tl.constexpr, WHOLE_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add up one sample's parts: of its columns over ``splits``, of its rows over ``tiles``."""
    n = tl.program_id(0).to(tl.int64)
    b_i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tokens += n * (height + width) * C
    if not WHOLE_COLUMNS:
        add_parts(column_parts, tokens, n, b_i, splits, width * C, column_scale)
    if not WHOLE_ROWS:
        add_parts(
            row_parts, tokens + width * C, n, b_i if WHOLE_COLUMNS else b_i - width * C, tiles, height * C, row_scale
        )


def pool_forward(
    x: Tensor, mean: bool = True, dtype: torch.dtype = torch.float32, *, blocks: PoolBlocks | None = None
) -> Tensor:
    """Averages (or sums) of (N, C, *grid), its grid read as rows × its last axis, over each of these two.

    ``blocks`` are chosen by the sizes unless they are given.

    Returns:
        (N, last + rows, C) in ``dtype``, added up in float32: columns first, then rows.
    """
    height, width = rows_and_width(x.shape[2:])
    x, strides = flat(x)
    batch, channels = x.shape[:2]
    blocks = blocks or pool_blocks(batch, channels, height, width, x.element_size(), strides.channels_last)
    align = alignment(strides)
    tokens = torch.empty((batch, width + height, channels), dtype=dtype, device=x.device)
    column_parts = row_parts = tokens
    if blocks.splits > 1:
        column_parts = torch.empty((batch, blocks.splits, width, channels), dtype=torch.float32, device=x.device)
    if blocks.tiles > 1:
        row_parts = torch.empty((batch, blocks.tiles, height, channels), dtype=torch.float32, device=x.device)
    column_scale, row_scale = (1.0 / height, 1.0 / width) if mean else (1.0, 1.0)
    whole_columns, whole_rows = blocks.splits == 1, blocks.tiles == 1
    launch(
        pool_forward_kernel, (batch * blocks.splits, blocks.tiles, blocks.channel_blocks),
        (x, tokens, column_parts, row_parts),
        (*strides.over(align), height, width, blocks.splits, blocks.rows_per_split, column_scale, row_scale),
        channels, blocks.rows, blocks.width, blocks.channels, blocks.lanes,
        strides.channels_last, align, blocks.stages, whole_columns, whole_rows,
        num_warps=blocks.warps, maxnreg=128,
    )  # fmt: skip
    if not (whole_columns and whole_rows):
        count = (0 if whole_columns else width) + (0 if whole_rows else height)
        launch(
            add_parts_kernel, (batch, ceil_div(count * channels, 512)),
            (column_parts, row_parts, tokens),
            (height, width, blocks.splits, blocks.tiles, column_scale, row_scale),
            channels, whole_columns, whole_rows, 512,
        )  # fmt: skip
    return tokens
