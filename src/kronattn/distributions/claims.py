"""What Section 3 of the paper says, formula by formula, in float64: the statements that are to be checked.

Nothing here uses :class:`~kronattn.distributions.KroneckerSumNormal`: the formulas are written as printed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

__all__ = ["Claims", "Normal", "Setting", "paper_claims", "random_setting"]

# The checks compare dense hw×hw covariances; at 32×32 those are 8 MiB each and the checks take a minute.
MAX_ENTRIES = 1024
_SEEDS = 2**63


@dataclass(frozen=True)
class Setting:
    """One choice of the model's parameters, float64: μ (h,), υ (w,), Ω (h, h) and Ψ (w, w).

    The factors are general; from the row and column averages on, the paper assumes them diagonal, and so
    do the checks: :meth:`diagonal` keeps only their diagonals.

    >>> random_setting(2, 3).diagonal().omega.count_nonzero().item()
    2
    """

    mu: Tensor
    upsilon: Tensor
    omega: Tensor
    psi: Tensor

    @property
    def height(self) -> int:
        """The number of rows, h."""
        return self.mu.shape[0]

    @property
    def width(self) -> int:
        """The number of columns, w."""
        return self.upsilon.shape[0]

    def diagonal(self) -> Setting:
        """Return the same setting with diagonal factors."""
        return Setting(self.mu, self.upsilon, self.omega.diagonal().diag(), self.psi.diagonal().diag())

    def square(self) -> Setting:
        """Return the leading square part, as many rows as columns: some statements are about h = w."""
        side = min(self.height, self.width)
        return Setting(self.mu[:side], self.upsilon[:side], self.omega[:side, :side], self.psi[:side, :side])

    def normalised(self) -> Setting:
        """Return the same setting with μ shifted so that the means of μ and υ sum to zero."""
        return replace(self, mu=self.mu - self.mu.mean() - self.upsilon.mean())


@dataclass(frozen=True)
class Normal:
    """A multivariate normal distribution as the paper claims it: mean (d,), covariance (d, d)."""

    mean: Tensor
    covariance: Tensor

    @property
    def size(self) -> int:
        """The number of entries of the random vector, d."""
        return self.mean.shape[0]


@dataclass(frozen=True)
class Claims:
    """The paper's statements about one setting; matrices are vectors row by row, vec(Xᵀ).

    >>> paper_claims(random_setting(2, 3)).tilde.size
    6
    """

    model: Normal  # Eqs. 2 and 3: X
    rows: tuple[Normal, ...]  # Section 3.2: each row of X
    columns: tuple[Normal, ...]  # Section 3.2: each column of X
    row_average: Normal  # Eq. 4, diagonal factors from here on
    column_average: Normal  # Eq. 5
    stacked_rows: Normal  # Eq. 8: [r1, ..., rh]^T
    stacked_columns: Normal  # Eq. 9: [c1, ..., cw]
    tilde: Normal  # Eqs. 6 and 10: X~
    square_trace: float  # Eq. 11: the trace of the covariance of X, for h = w
    square_trace_ratio: float  # Eq. 7: that of X~ over that of X, for h = w
    trace_ratio: float  # the same for the h and w of the setting, which the paper leaves out
    normalised_mean: Tensor  # Eq. 13: the mean of X~ where the means of mu and upsilon sum to zero, (hw,)


def random_setting(height: int, width: int, *, seed: int = 0) -> Setting:
    """Draw means and positive-definite factors for h×w matrices, in float64, the same for the same seed.

    >>> setting = random_setting(5, 7)
    >>> setting.omega.shape, setting.psi.dtype
    (torch.Size([5, 5]), torch.float64)
    """
    for name, value in (("height", height), ("width", width)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if height * width > MAX_ENTRIES:
        raise ValueError(
            f"height times width must be at most {MAX_ENTRIES}, because the checks build the dense covariance, "
            f"got {height} times {width}"
        )
    generator = seeded(seed)

    def factor(size: int) -> Tensor:
        root = torch.randn(size, size, generator=generator, dtype=torch.float64)
        scale = torch.rand(size, generator=generator, dtype=torch.float64) + 0.5
        covariance = root @ root.mT / size + 0.2 * torch.eye(size, dtype=torch.float64)
        return scale[:, None] * (covariance + covariance.mT) / 2 * scale

    mu, upsilon = (torch.randn(size, generator=generator, dtype=torch.float64) + 0.5 for size in (height, width))
    return Setting(mu, upsilon, factor(height), factor(width))


def seeded(seed: int) -> torch.Generator:
    """Return a generator for ``seed``, or refuse a seed that torch cannot take."""
    if not 0 <= seed < _SEEDS:
        raise ValueError(f"seed must be from 0 to {_SEEDS - 1}, got {seed}")
    return torch.Generator().manual_seed(seed)


def paper_claims(setting: Setting) -> Claims:
    """Evaluate the paper's formulas at one setting.

    >>> paper_claims(random_setting(4, 4)).square_trace_ratio  # 2 / h
    0.5
    """
    mu, upsilon, height, width = setting.mu, setting.upsilon, setting.height, setting.width
    identity_h, identity_w = torch.eye(height, dtype=mu.dtype), torch.eye(width, dtype=mu.dtype)
    omega, psi = setting.omega, setting.psi
    rows = tuple(Normal(mu[i] + upsilon, omega[i, i] * identity_w + psi) for i in range(height))
    columns = tuple(Normal(upsilon[j] + mu, psi[j, j] * identity_h + omega) for j in range(width))

    omega, psi = setting.diagonal().omega, setting.diagonal().psi
    row_average = Normal(mu.mean() + upsilon, (omega.diagonal().mean() * identity_w + psi) / height)
    column_average = Normal(upsilon.mean() + mu, (psi.diagonal().mean() * identity_h + omega) / width)
    shift, square = mu.mean() + upsilon.mean(), setting.square()
    return Claims(
        model=Normal(outer_sum_mean(mu, upsilon), kronecker_sum(setting.omega, setting.psi)),
        rows=rows,
        columns=columns,
        row_average=row_average,
        column_average=column_average,
        stacked_rows=Normal(
            outer_sum_mean(mu.mean().expand(height), upsilon), torch.kron(identity_h, row_average.covariance)
        ),
        stacked_columns=Normal(
            outer_sum_mean(mu, upsilon.mean().expand(width)), torch.kron(column_average.covariance, identity_w)
        ),
        tilde=Normal(
            outer_sum_mean(mu, upsilon) + shift,
            kronecker_sum(column_average.covariance, row_average.covariance),
        ),
        square_trace=float(square.height * (square.omega.trace() + square.psi.trace())),
        square_trace_ratio=2 / square.height,
        # The paper stops at h = w; the same lines of its proof give this for all h and w.
        trace_ratio=1 / height + 1 / width,
        normalised_mean=outer_sum_mean(mu - shift, upsilon),
    )


def outer_sum_mean(mu: Tensor, upsilon: Tensor) -> Tensor:
    """Eq. 3, μ 1ᵀ + 1 υᵀ, row by row: (hw,)."""
    ones_h, ones_w = torch.ones_like(mu), torch.ones_like(upsilon)
    return (torch.outer(mu, ones_w) + torch.outer(ones_h, upsilon)).flatten()


def kronecker_sum(omega: Tensor, psi: Tensor) -> Tensor:
    """The dense Ω ⊗ I + I ⊗ Ψ, (hw, hw)."""
    identity_h, identity_w = (torch.eye(factor.shape[0], dtype=factor.dtype) for factor in (omega, psi))
    return torch.kron(omega, identity_w) + torch.kron(identity_h, psi)
