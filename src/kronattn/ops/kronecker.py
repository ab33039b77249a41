"""Kronecker attention: global attention over a grid through the averages along its axes."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kronattn.ops import reference, stages
from kronattn.ops.autocast import without_autocast
from kronattn.ops.checks import check_options, check_product_grid, check_triple
from kronattn.ops.fx import leaf_function
from kronattn.ops.masks import apply_masks, cleared
from kronattn.ops.plan import make_plan

__all__ = ["kronecker_attention"]


@leaf_function
def kronecker_attention(
    query: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    *,
    mode: str = "kv",
    num_heads: int = 1,
    scale: float | Tensor = 1.0,
    mean: str = "each",
    softmax: str = "joint",
    combine: str = "sum",
    mask: Tensor | None = None,
    key_mask: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Kronecker attention (KAO_KV and KAO_QKV) over a grid of 1 to 4 axes.

    Keys and values are the averages of the grid over all axes but one: h + w of them for an image rather than
    h·w. In mode "kv" every position is a query. In mode "qkv" the queries are averages too, and the output at a
    position is the sum of what its row and its column received.

    Args:
        query: (N, C, *grid), 1 to 4 axes.
        key: (N, C, *other_grid); ``query`` by default. Its grid may differ from query's, also in its axes.
        value: (N, P, *other_grid); ``key`` by default.
        mode: "kv" or "qkv".
        num_heads: divides C and P; the channels are split among the heads.
        scale: of the coefficients before the softmax: a number, or a tensor of one element or one for each
            head. The paper's is 1.
        mean: how often mode "qkv" counts the mean of the values: "each" axis counts it, as in the paper's equation, or
            it is counted "once", as Theorem 1 asks for. Mode "kv" counts it once in any case, and so does a product.
        softmax: over all keys, "joint", or for the keys of each axis by themselves, "per_axis", with equal parts of the
            weight for each axis.
        combine: what a position of mode "qkv" receives of its row and its column: their "sum", or their "product",
            scaled so that a constant grid comes out as it is.
        mask: (N, *grid), boolean, true where query has data. Averages are over what is there, empty rows and columns
            take no part, and the output is zero where nothing is. See :func:`kronattn.pad_batch`.
        key_mask: (N, *other_grid), the same for key and value, where they have a grid of their own.
        backend: "auto" picks the fastest that is known to support the input; "torch", "triton" (fused GPU kernels),
            "native" (the package kronattn-cpu) or "reference" by name.

    Returns:
        (N, P, *grid), in query's dtype and, where the backend can, its memory format.

    Example:
        >>> x = torch.randn(2, 8, 14, 20)
        >>> kronecker_attention(x).shape
        torch.Size([2, 8, 14, 20])
        >>> video, text = torch.randn(2, 8, 4, 14, 14), torch.randn(2, 8, 30)
        >>> kronecker_attention(video, text, mode="qkv", num_heads=4, scale=0.7).shape
        torch.Size([2, 8, 4, 14, 14])
    """
    check_options(mode, mean, softmax, combine)
    query, key, value = check_triple(query, key, value, num_heads, scale)
    if combine == "product":
        check_product_grid(query.shape[2:])
    per_axis = softmax == "per_axis"
    plan = make_plan(
        query,
        key,
        value,
        mode=mode,
        num_heads=num_heads,
        per_key=per_axis,
        masks=(mask, key_mask),
        has_parameters=isinstance(scale, Tensor),
        backend=backend,
    )
    query, key, value, (_, shares, key_shares) = apply_masks(query, key, value, mask, key_mask)
    key_is_query, value_is_key = key is query, value is key
    if plan.spread == "reference":
        options: dict[str, Any] = {"mode": mode, "num_heads": num_heads, "scale": scale, "mean": mean}
        options |= {"softmax": softmax, "combine": combine, "mask": mask}
        options["key_mask"] = mask if key_is_query else key_mask
        with without_autocast(query):
            return reference.kronecker_attention(query, key, value, **options)
    key_tokens, key = stages.pool(key, plan, key_shares)
    query = key if key_is_query else query
    values = key_tokens if value_is_key else stages.pool(value, plan, key_shares)[0]
    keys = stages.scaled(key_tokens, scale, num_heads)
    bias = stages.masked_bias(None, key_shares, num_heads)
    queries = query
    if mode == "qkv":
        queries = (key_tokens if key_is_query else stages.pool(query, plan, shares)[0]).transpose(1, 2)
    axes = key.shape[2:] if per_axis else None
    y = stages.spread(queries, keys, values, plan, num_heads=num_heads, key_bias=bias, axes=axes)
    if mode == "qkv":
        y = stages.combine_tokens(y.transpose(1, 2), query, plan, mean=mean, combine=combine, shares=shares)
    return cleared(y, mask)
