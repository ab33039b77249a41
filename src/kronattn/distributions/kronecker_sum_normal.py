"""The model of a feature map in Section 3.2 of the paper: a matrix normal with Kronecker-sum covariance."""

from __future__ import annotations

import math
import operator
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import Distribution, MultivariateNormal, constraints, register_kl

from kronattn.distributions import _arguments, _kronecker_sum
from kronattn.distributions._kronecker_sum import Spectrum

__all__ = ["KroneckerSumNormal"]


class KroneckerSumNormal(Distribution):
    r"""Normal distribution of an h×w matrix X with outer-sum mean and Kronecker-sum covariance (Eqs. 2 and 3).

    .. math::
        X_{ij} = \mu_i + \upsilon_j + \text{noise}, \qquad
        \mathrm{Cov}(X_{ij}, X_{kl}) = \Omega_{ik} [j = l] + [i = k] \Psi_{jl}

    so that vec(Xᵀ), the rows of X one after another, has covariance Ω ⊕ Ψ = Ω ⊗ I + I ⊗ Ψ. That hw×hw matrix
    is never built except by :meth:`covariance`: sampling adds two independent noises with the factors' Cholesky
    roots, and the density works in the factors' eigenvectors. Both cost O(h³ + w³ + h²w + hw²) and have finite
    gradients for all positive-definite factors, also where eigenvalues repeat.

    Args:
        row_mean: μ, (*batch, h), float32 or float64.
        column_mean: υ, (*batch, w).
        row_covariance: Ω, (*batch, h, h), symmetric positive definite, diagonal or not.
        column_covariance: Ψ, (*batch, w, w), the same.
        validate_args: whether to check values (not only shapes and dtypes); as everywhere in
            ``torch.distributions``, on by default.

    The batch shapes of the four broadcast with each other; the event shape is (h, w).

    >>> import torch
    >>> model = KroneckerSumNormal(torch.zeros(2), torch.tensor([0.0, 1.0, 2.0]), torch.eye(2), torch.eye(3))
    >>> model.event_shape, model.sample((5,)).shape
    (torch.Size([2, 3]), torch.Size([5, 2, 3]))
    >>> model.mean
    tensor([[0., 1., 2.],
            [0., 1., 2.]])
    >>> model.log_prob(model.mean).item() == model.log_prob(model.mode).item()
    True
    """

    arg_constraints: ClassVar[dict[str, constraints.Constraint]] = {
        "row_mean": constraints.real_vector,
        "column_mean": constraints.real_vector,
        "row_covariance": constraints.positive_definite,
        "column_covariance": constraints.positive_definite,
    }
    support = constraints.independent(constraints.real, 2)
    has_rsample = True

    row_mean: Tensor
    column_mean: Tensor
    row_covariance: Tensor
    column_covariance: Tensor

    def __init__(
        self,
        row_mean: Tensor,
        column_mean: Tensor,
        row_covariance: Tensor,
        column_covariance: Tensor,
        validate_args: bool | None = None,
    ) -> None:
        given = {
            "row_mean": row_mean,
            "column_mean": column_mean,
            "row_covariance": row_covariance,
            "column_covariance": column_covariance,
        }
        _arguments.check_types(given)
        _arguments.check_vector("row_mean", row_mean)
        _arguments.check_vector("column_mean", column_mean)
        height, width = row_mean.shape[-1], column_mean.shape[-1]
        _arguments.check_square("row_covariance", row_covariance, height, "row_mean")
        _arguments.check_square("column_covariance", column_covariance, width, "column_mean")
        batch_shape = _arguments.broadcast_batch(
            {name: x.shape[: -1 if name.endswith("_mean") else -2] for name, x in given.items()}
        )
        validate = Distribution._validate_args if validate_args is None else validate_args
        if validate:
            for name, tensor in given.items():
                _arguments.check_finite(name, tensor)
            _arguments.check_positive_definite("row_covariance", row_covariance)
            _arguments.check_positive_definite("column_covariance", column_covariance)
        # The factors are decomposed as they were given: a batch of means may share one covariance.
        self._factors = (row_covariance, column_covariance)
        self._spectrum: Spectrum | None = None
        self._set(row_mean, column_mean, batch_shape)
        # The arguments have been checked above, with messages of one line; torch need not check them again.
        super().__init__(batch_shape, torch.Size((height, width)), validate_args=False)
        self._validate_args = validate

    def _set(self, row_mean: Tensor, column_mean: Tensor, batch_shape: torch.Size) -> None:
        self.row_mean = row_mean.expand(*batch_shape, -1)
        self.column_mean = column_mean.expand(*batch_shape, -1)
        self.row_covariance = self._factors[0].expand(*batch_shape, -1, -1)
        self.column_covariance = self._factors[1].expand(*batch_shape, -1, -1)

    def expand(self, batch_shape: Any, _instance: Any = None) -> KroneckerSumNormal:
        """Return the same distribution with its batch broadcast to ``batch_shape``; nothing is copied.

        >>> KroneckerSumNormal(torch.zeros(2), torch.zeros(3), torch.eye(2), torch.eye(3)).expand((4,)).batch_shape
        torch.Size([4])
        """
        new = self._get_checked_instance(KroneckerSumNormal, _instance)
        batch_shape = torch.Size(batch_shape)
        new._factors, new._spectrum = self._factors, self._spectrum
        new._set(self.row_mean, self.column_mean, batch_shape)
        super(KroneckerSumNormal, new).__init__(batch_shape, self.event_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new

    @property
    def mean(self) -> Tensor:
        """The mean matrix M, the outer sum of μ and υ (Eq. 3): (*batch, h, w)."""
        return self.row_mean.unsqueeze(-1) + self.column_mean.unsqueeze(-2)

    @property
    def mode(self) -> Tensor:
        """The mean: (*batch, h, w)."""
        return self.mean

    @property
    def variance(self) -> Tensor:
        """The variance of each entry, Ωᵢᵢ + Ψⱼⱼ: (*batch, h, w)."""
        return _diagonal(self.row_covariance).unsqueeze(-1) + _diagonal(self.column_covariance).unsqueeze(-2)

    def covariance(self) -> Tensor:
        """Return the dense Ω ⊕ Ψ of vec(Xᵀ), (*batch, hw, hw): h²w² numbers, for small matrices only.

        >>> model = KroneckerSumNormal(torch.zeros(1), torch.zeros(2), torch.ones(1, 1), torch.eye(2))
        >>> model.covariance()
        tensor([[2., 0.],
                [0., 2.]])
        """
        height, width = self.event_shape
        columns_equal, rows_equal = _identity_like(self.column_covariance), _identity_like(self.row_covariance)
        dense = torch.einsum("...ik,...jl->...ijkl", self.row_covariance, columns_equal) + torch.einsum(
            "...ik,...jl->...ijkl", rows_equal, self.column_covariance
        )
        return dense.reshape(*self.batch_shape, height * width, height * width)

    def rsample(self, sample_shape: Any = torch.Size()) -> Tensor:  # noqa: B008
        """Draw (*sample_shape, *batch, h, w), differentiably in all four arguments.

        >>> mean = torch.zeros(2, requires_grad=True)
        >>> x = KroneckerSumNormal(mean, torch.zeros(3), torch.eye(2), torch.eye(3)).rsample((8,))
        >>> x.sum().backward()
        >>> mean.grad
        tensor([24., 24.])
        """
        shape = self._extended_shape(torch.Size(sample_shape))
        # Ω ⊗ I and I ⊗ Ψ are covariances themselves: the sum of two independent noises has their sum.
        row_root, column_root = (torch.linalg.cholesky(factor) for factor in self._factors)
        row_noise, column_noise = (
            torch.randn(shape, dtype=self.row_mean.dtype, device=self.row_mean.device) for _ in range(2)
        )
        return self.mean + row_root @ row_noise + column_noise @ column_root.mT

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-density of ``value`` (*sample, *batch, h, w): (*sample, *batch).

        >>> model = KroneckerSumNormal(torch.zeros(1), torch.zeros(1), torch.eye(1), torch.eye(1))
        >>> normal = torch.distributions.Normal(0.0, 2**0.5)
        >>> torch.allclose(model.log_prob(torch.ones(1, 1)), normal.log_prob(torch.tensor(1.0)))
        True
        """
        if self._validate_args:
            self._check_value(value)
        centred = value - self.mean
        parts = self._decomposed()
        squared = (centred * _kronecker_sum.solve(*self._factors, centred, parts)).sum((-2, -1))
        size = self.event_shape.numel()
        return -(squared + self._log_determinant() + size * math.log(2 * math.pi)) / 2

    def entropy(self) -> Tensor:
        """Return the differential entropy, (*batch), in nats.

        >>> model = KroneckerSumNormal(torch.zeros(1), torch.zeros(1), torch.eye(1), torch.eye(1))
        >>> torch.allclose(model.entropy(), torch.distributions.Normal(0.0, 2**0.5).entropy())
        True
        """
        size = self.event_shape.numel()
        entropy = (size * (1 + math.log(2 * math.pi)) + self._log_determinant()) / 2
        return entropy.expand(self.batch_shape)

    def row_marginal(self, index: int) -> MultivariateNormal:
        """Return the distribution of row i: mean μᵢ + υ, covariance Ωᵢᵢ I + Ψ, event shape (w,).

        >>> model = KroneckerSumNormal(torch.tensor([0.0, 5.0]), torch.zeros(3), torch.eye(2), torch.eye(3))
        >>> model.row_marginal(1).mean
        tensor([5., 5., 5.])
        """
        return self._marginal(*self._rows_first(), _index("row", index, self.event_shape[0]))

    def column_marginal(self, index: int) -> MultivariateNormal:
        """Return the distribution of column j: mean υⱼ + μ, covariance Ψⱼⱼ I + Ω, event shape (h,).

        >>> model = KroneckerSumNormal(torch.tensor([0.0, 5.0]), torch.zeros(3), torch.eye(2), torch.eye(3))
        >>> model.column_marginal(1).mean
        tensor([0., 5.])
        """
        return self._marginal(*self._columns_first(), _index("column", index, self.event_shape[1]))

    def row_average(self) -> MultivariateNormal:
        """Return the distribution of the average of the h rows (Eq. 4), event shape (w,).

        Its covariance is (1ᵀΩ1 / h²) I + Ψ / h. The paper's (Ω̄ + Ψ) / h, with Ω̄ the mean of Ω's diagonal, is
        that for diagonal Ω, as the paper assumes there; this one is exact for every Ω.

        >>> model = KroneckerSumNormal(torch.zeros(2), torch.zeros(3), torch.eye(2), torch.eye(3))
        >>> model.row_average().variance
        tensor([1., 1., 1.])
        """
        return self._multivariate(*_average(*self._rows_first()))

    def column_average(self) -> MultivariateNormal:
        """Return the distribution of the average of the w columns (Eq. 5), event shape (h,).

        Its covariance is (1ᵀΨ1 / w²) I + Ω / w: the paper's (Ψ̄ + Ω) / w for diagonal Ψ, exact for every Ψ.

        >>> model = KroneckerSumNormal(torch.zeros(2), torch.zeros(4), torch.eye(2), torch.eye(4))
        >>> model.column_average().variance
        tensor([0.5000, 0.5000])
        """
        return self._multivariate(*_average(*self._columns_first()))

    def tilde(self) -> KroneckerSumNormal:
        """Return the distribution of X̃ in Theorem 1 (Eq. 6): what rebuilds a feature map from its averages.

        X̃ = [r₁, …, r_h]ᵀ + [c₁, …, c_w], where the rᵢ are independent copies of the row average and the cⱼ of
        the column average. It is again a matrix normal with Kronecker-sum covariance: Cov(c) ⊕ Cov(r). The
        theorem is stated for diagonal factors; with the exact covariances of :meth:`row_average` and
        :meth:`column_average` the same proof holds for all positive-definite ones, and that is what this
        returns. (The trace identity of Eq. 7 does need diagonal factors.)

        >>> model = KroneckerSumNormal(torch.zeros(4), torch.zeros(4), torch.eye(4), torch.eye(4))
        >>> (model.tilde().variance.sum() / model.variance.sum()).item()  # 2 / h
        0.5
        """
        (mu, omega), (upsilon, psi) = _average(*self._columns_first()), _average(*self._rows_first())
        return KroneckerSumNormal(mu, upsilon, omega, psi, validate_args=self._validate_args)

    def _multivariate(self, mean: Tensor, covariance: Tensor) -> MultivariateNormal:
        # Sums of factors that were checked need no second check, but their values are to be checked as here.
        normal = MultivariateNormal(mean, covariance, validate_args=False)
        normal._validate_args = self._validate_args
        return normal

    # Rows and columns are alike: what holds for the ones holds for the others with both factors exchanged.

    def _rows_first(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.row_mean, self.row_covariance, self.column_mean, self.column_covariance

    def _columns_first(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.column_mean, self.column_covariance, self.row_mean, self.row_covariance

    def _marginal(self, mu: Tensor, omega: Tensor, upsilon: Tensor, psi: Tensor, i: int) -> MultivariateNormal:
        return self._multivariate(mu[..., i, None] + upsilon, _add_to_diagonal(psi, omega[..., i, i]))

    def _decomposed(self) -> Spectrum:
        if self._spectrum is None:
            parts = _kronecker_sum.spectrum(*self._factors)
            # Cholesky may pass a matrix whose smallest eigenvalue rounds to less than zero.
            if self._validate_args and (smallest := parts.sums().min()) <= 0:
                raise ValueError(
                    "row_covariance and column_covariance are singular to the precision of "
                    f"{str(self.row_mean.dtype).removeprefix('torch.')}: "
                    f"the smallest eigenvalue of their Kronecker sum is {smallest:.3g}, and must be positive"
                )
            self._spectrum = parts
        return self._spectrum

    def _log_determinant(self) -> Tensor:
        return _kronecker_sum.log_determinant(*self._factors, self._decomposed())

    def _check_value(self, value: Tensor) -> None:
        _arguments.check_types({"row_mean": self.row_mean, "value": value})
        if value.shape[-2:] != self.event_shape:
            height, width = self.event_shape
            raise ValueError(
                f"value must be (*sample, *batch, {height}, {width}), got a tensor of shape {tuple(value.shape)}"
            )
        _arguments.broadcast_batch({"value": value.shape[:-2], "distribution": self.batch_shape})
        _arguments.check_finite("value", value)


@register_kl(KroneckerSumNormal, KroneckerSumNormal)
def _kl(first: KroneckerSumNormal, second: KroneckerSumNormal) -> Tensor:
    if first.event_shape != second.event_shape:
        raise ValueError(
            "the Kullback-Leibler divergence needs two distributions over matrices of one shape, "
            f"got {tuple(first.event_shape)} and {tuple(second.event_shape)}"
        )
    parts = second._decomposed()
    row_trace, column_trace = _kronecker_sum.inverse_traces(*second._factors, parts)
    trace = (row_trace * first.row_covariance).sum((-2, -1)) + (column_trace * first.column_covariance).sum((-2, -1))
    gap = second.mean - first.mean
    squared = (gap * _kronecker_sum.solve(*second._factors, gap, parts)).sum((-2, -1))
    size = first.event_shape.numel()
    return (trace + squared - size + second._log_determinant() - first._log_determinant()) / 2


def _average(mu: Tensor, omega: Tensor, upsilon: Tensor, psi: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and covariance of the average over the first axis."""
    count = mu.shape[-1]
    return mu.mean(-1, keepdim=True) + upsilon, _add_to_diagonal(psi / count, omega.sum((-2, -1)) / count**2)


def _index(axis: str, index: int, size: int) -> int:
    try:
        position = operator.index(index)
    except TypeError:
        raise TypeError(f"index of a {axis} must be an integer, got {type(index).__name__}") from None
    if not -size <= position < size:
        raise IndexError(f"index of a {axis} must be from 0 to {size - 1}, got {position}")
    return position


def _diagonal(matrix: Tensor) -> Tensor:
    return matrix.diagonal(dim1=-2, dim2=-1)


def _identity_like(matrix: Tensor) -> Tensor:
    return torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)


def _add_to_diagonal(matrix: Tensor, scalar: Tensor) -> Tensor:
    return matrix + scalar[..., None, None] * _identity_like(matrix)
