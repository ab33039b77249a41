"""Kronecker attention: global attention over a grid through the averages along its axes."""

from __future__ import annotations

from torch import Tensor

from kronattn.ops import reference, stages
from kronattn.ops.checks import check_mean, check_mode, check_triple
from kronattn.ops.fx import leaf_function
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
            it is counted "once", as Theorem 1 asks for. Mode "kv" counts it once in any case.
        backend: "auto" picks the fastest that is known to support the input; "torch", "triton" (fused GPU kernels) or
            "reference" by name.

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
    check_mode(mode)
    check_mean(mean)
    query, key, value = check_triple(query, key, value, num_heads, scale)
    plan = make_plan(query, key, value, mode=mode, num_heads=num_heads, backend=backend)
    if plan.spread == "reference":
        return reference.kronecker_attention(query, key, value, mode=mode, num_heads=num_heads, scale=scale, mean=mean)
    key_is_query, value_is_key = key is query, value is key
    key_tokens, key = stages.pool(key, plan)
    query = key if key_is_query else query
    values = key_tokens if value_is_key else stages.pool(value, plan)[0]
    keys = stages.scaled(key_tokens, scale, num_heads)
    if mode == "kv":
        return stages.spread(query, keys, values, plan, num_heads=num_heads)
    queries = key_tokens if key_is_query else stages.pool(query, plan)[0]
    tokens = stages.attend_tokens(queries, keys, values, plan, num_heads=num_heads)
    tokens = stages.count_mean_once(tokens, query, plan) if mean == "once" else tokens
    return stages.spread_tokens(tokens, query, plan)
