"""Regular attention over a whole grid, with and without pooled keys: what Kronecker attention is compared with."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from kronattn.ops import reference, stages
from kronattn.ops.autocast import without_autocast
from kronattn.ops.checks import check_grid_tensor, check_positive_int, check_triple
from kronattn.ops.fx import leaf_function
from kronattn.ops.plan import make_plan

__all__ = ["attention", "pool_grid"]


@leaf_function
def attention(
    query: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    *,
    num_heads: int = 1,
    scale: float | Tensor = 1.0,
    pool: int | None = None,
    backend: str = "auto",
) -> Tensor:
    """Regular (non-local) attention, the paper's Eq. 1: O = V·Softmax(KᵀQ), every position a query and a key.

    Args:
        query: (N, C, *grid), 1 to 4 axes.
        key: (N, C, *other_grid); ``query`` by default.
        value: (N, P, *other_grid); ``key`` by default.
        num_heads: divides C and P; the channels are split among the heads.
        scale: of the coefficients before the softmax: a number, or a tensor of one element or one for each
            head. The paper's is 1.
        pool: max-pool keys and values by this factor along every axis first (Attn+Pool). A last window that
            sticks out counts: 7 becomes 4.
        backend: "auto", "torch", "triton", "native" or "reference".

    Returns:
        (N, P, *grid), in query's dtype.

    Example:
        >>> x = torch.randn(2, 8, 14, 14)
        >>> attention(x).shape, attention(x, pool=2, num_heads=4, scale=0.5).shape
        (torch.Size([2, 8, 14, 14]), torch.Size([2, 8, 14, 14]))
    """
    query, key, value = check_triple(query, key, value, num_heads, scale)
    if pool is not None:
        pooled = pool_grid(key, pool)
        value = pooled if value is key else pool_grid(value, pool)
        key = pooled
    # PyTorch's own kernels are ahead of ours for that many keys.
    backend = "torch" if backend == "auto" else backend
    plan = make_plan(query, key, value, num_heads=num_heads, has_parameters=isinstance(scale, Tensor), backend=backend)
    if plan.spread == "reference":
        with without_autocast(query):
            return reference.attention(query, key, value, num_heads=num_heads, scale=scale)
    keys = key.flatten(2).transpose(1, 2)
    values = keys if value is key else value.flatten(2).transpose(1, 2)
    return stages.spread(query, stages.scaled(keys, scale, num_heads), values, plan, num_heads=num_heads)


@leaf_function
def pool_grid(x: Tensor, factor: int) -> Tensor:
    """Max-pool every axis by ``factor``; the last, incomplete window counts (ceil).

    Args:
        x: (N, C, *grid), 1 to 4 axes.
        factor: the window and stride along every axis.

    Returns:
        (N, C, *grid) with each size divided by ``factor`` and rounded up.

    Example:
        >>> pool_grid(torch.arange(5.0).reshape(1, 1, 5), 2)
        tensor([[[1., 3., 4.]]])
    """
    check_grid_tensor(x, "x")
    check_positive_int("pool", factor)
    if x.dim() == 6:
        # Four axes: the maximum over a box is the maximum over three axes of the maxima along the fourth.
        batch, channels, _, *rest = x.shape
        along_first = F.max_pool1d(x.flatten(3).flatten(0, 1).transpose(1, 2), factor, stride=factor, ceil_mode=True)
        pooled = along_first.shape[-1]
        slices = along_first.transpose(1, 2).reshape(batch, channels * pooled, *rest)
        return pool_grid(slices, factor).unflatten(1, (channels, pooled))
    pools = {3: F.max_pool1d, 4: F.max_pool2d, 5: F.max_pool3d}
    return pools[x.dim()](x, factor, stride=factor, ceil_mode=True)
