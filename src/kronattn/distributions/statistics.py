"""Tests of a sample against a normal distribution that is claimed for it, with bounds that hold at finite size.

Each test returns a statistic, and beside it stands the bound that a sample of the claimed distribution exceeds
with probability ``alpha``. All of them look at the *whitened* sample, z = L⁻¹(x − mean) with L Lᵀ the claimed
covariance: under the claim, its entries are independent standard normals, whatever the claim was.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = [
    "bartlett_scores",
    "chi2_quantile",
    "covariance_statistic",
    "mean_statistic",
    "shape_bound",
    "shape_statistic",
    "whiten",
]


def whiten(sample: Tensor, mean: Tensor, covariance: Tensor) -> Tensor:
    """Return L⁻¹(x − mean) for each x of ``sample`` (n, d), given ``mean`` (d,) and ``covariance`` (d, d): (n, d).

    >>> import torch
    >>> whiten(torch.tensor([[3.0], [5.0]]), torch.tensor([1.0]), torch.tensor([[4.0]]))
    tensor([[1.],
            [2.]])
    """
    root = torch.linalg.cholesky(covariance)
    return torch.linalg.solve_triangular(root, (sample - mean).mT, upper=False).mT


def mean_statistic(whitened: Tensor) -> float:
    """Return n |average of z|² of a whitened sample (n, d): χ² with d degrees of freedom under the claim.

    >>> import torch
    >>> mean_statistic(torch.tensor([[1.0, 0.0], [3.0, 0.0]]))
    8.0
    """
    return float(whitened.shape[0] * whitened.mean(0).square().sum())


def bartlett_scores(whitened: Tensor) -> Tensor:
    """Return the d(d + 1)/2 scores of a whitened sample's covariance, independent standard normals if it is I.

    With n − 1 degrees of freedom, the scatter matrix of ``whitened`` (n, d) about its average is Wishart, and
    Bartlett's decomposition says that its Cholesky root has independent entries: standard normal below the
    diagonal, and the root of χ² with n − 1 − j degrees of freedom on it, brought to a standard normal by Wilson
    and Hilferty's cube root. No other approximation is made, and none gets worse as d grows.

    >>> import torch
    >>> bartlett_scores(torch.randn(5000, 4)).shape
    torch.Size([10])
    """
    count, size = whitened.shape
    centred = whitened - whitened.mean(0)
    root = torch.linalg.cholesky(centred.mT @ centred)
    below = root[tuple(torch.tril_indices(size, size, -1))]
    freedom = count - 1 - torch.arange(size, dtype=root.dtype)
    spread = 2 / (9 * freedom)
    return torch.cat([below, ((root.diagonal().square() / freedom) ** (1 / 3) - 1 + spread) / spread.sqrt()])


def covariance_statistic(whitened: Tensor) -> float:
    """Return the sum of squared :func:`bartlett_scores`: χ² with d(d + 1)/2 degrees of freedom under the claim.

    >>> import torch
    >>> sample = torch.randn(5000, 3, generator=torch.Generator().manual_seed(0))
    >>> covariance_statistic(sample) < chi2_quantile(6, 1e-4) < covariance_statistic(1.2 * sample)
    True
    """
    return float(bartlett_scores(whitened).square().sum())


def shape_statistic(whitened: Tensor) -> float:
    """Return the largest gap between the distribution function of |z|² over ``whitened`` (n, d) and that of χ²_d.

    >>> import torch
    >>> sample = torch.randn(5000, 3, generator=torch.Generator().manual_seed(0))
    >>> shape_statistic(sample) < shape_bound(5000, 1e-4) < shape_statistic(sample.sign())
    True
    """
    count, size = whitened.shape
    distances = whitened.double().square().sum(1).sort().values
    claimed = torch.special.gammainc(distances.new_tensor(size / 2), distances / 2)
    steps = torch.arange(count + 1, dtype=distances.dtype) / count
    return float(torch.maximum((steps[1:] - claimed).max(), (claimed - steps[:-1]).max()))


def shape_bound(count: int, alpha: float) -> float:
    """Return what :func:`shape_statistic` exceeds with probability at most ``alpha`` (Dvoretzky, Kiefer, Massart).

    >>> round(shape_bound(20_000, 0.001), 4)
    0.0138
    """
    return math.sqrt(math.log(2 / alpha) / (2 * count))


def chi2_quantile(freedom: int, alpha: float) -> float:
    """Return what χ² with ``freedom`` degrees of freedom exceeds with probability ``alpha``.

    >>> round(chi2_quantile(1, 0.05), 4), round(chi2_quantile(630, 1e-4), 2)
    (3.8415, 770.64)
    """

    def exceeds(bound: float) -> float:
        half = torch.tensor([freedom / 2, bound / 2], dtype=torch.float64)
        return float(torch.special.gammaincc(half[0], half[1]))

    low, high = 0.0, float(freedom)
    while exceeds(high) > alpha:
        low, high = high, 2 * high
    for _ in range(80):  # more halvings than a float64 has bits
        middle = (low + high) / 2
        low, high = (middle, high) if exceeds(middle) > alpha else (low, middle)
    return high
