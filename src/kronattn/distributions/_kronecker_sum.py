"""Linear algebra with Ω ⊕ Ψ = Ω ⊗ I + I ⊗ Ψ that never builds it: solves, log-determinants, inverse traces.

If Ω = U diag(λ) Uᵀ and Ψ = V diag(κ) Vᵀ, then Ω ⊕ Ψ has eigenvectors U ⊗ V and eigenvalues λᵢ + κⱼ, so
everything costs O(h³ + w³ + h²w + hw²) instead of O(h³w³).

The gradients are written out. Autograd through ``eigh`` divides by differences of eigenvalues, which is NaN
for the commonest covariance there is, a multiple of the identity; the derivatives of Ω ⊕ Ψ itself contain
only the sums λᵢ + κⱼ, which are positive.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


class Spectrum(NamedTuple):
    """Eigenvectors and eigenvalues of both factors, constants to autograd: (*, n, n) and (*, n), n = h, then w."""

    row_vectors: Tensor
    row_values: Tensor
    column_vectors: Tensor
    column_values: Tensor

    def sums(self) -> Tensor:
        """The eigenvalues λᵢ + κⱼ of the Kronecker sum, (*, h, w)."""
        return self.row_values.unsqueeze(-1) + self.column_values.unsqueeze(-2)


def spectrum(omega: Tensor, psi: Tensor) -> Spectrum:
    """Decompose both factors: ``omega`` (*, h, h), ``psi`` (*, w, w)."""
    row_values, row_vectors = torch.linalg.eigh(omega.detach())
    column_values, column_vectors = torch.linalg.eigh(psi.detach())
    return Spectrum(row_vectors, row_values, column_vectors, column_values)


def solve(omega: Tensor, psi: Tensor, right: Tensor, parts: Spectrum) -> Tensor:
    """Return A with Ω A + A Ψ = ``right``, (*, h, w): the h×w matrix form of (Ω ⊕ Ψ)⁻¹ vec(rightᵀ)."""
    return _Solve.apply(omega, psi, right, *parts)


def log_determinant(omega: Tensor, psi: Tensor, parts: Spectrum) -> Tensor:
    """Return log det(Ω ⊕ Ψ), (*)."""
    return _LogDeterminant.apply(omega, psi, *parts)


def inverse_traces(omega: Tensor, psi: Tensor, parts: Spectrum) -> tuple[Tensor, Tensor]:
    """Return the partial traces of (Ω ⊕ Ψ)⁻¹ over columns, (*, h, h), and over rows, (*, w, w)."""
    return _InverseTraces.apply(omega, psi, *parts)


def _symmetric(matrix: Tensor) -> Tensor:
    return (matrix + matrix.mT) / 2


class _Solve(Function):
    @staticmethod
    def forward(omega: Tensor, psi: Tensor, right: Tensor, *spectrum: Tensor) -> Tensor:
        parts = Spectrum(*spectrum)
        rotated = parts.row_vectors.mT @ right @ parts.column_vectors
        return parts.row_vectors @ (rotated / parts.sums()) @ parts.column_vectors.mT

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        omega, psi, right, *parts, solution = ctx.saved_tensors
        # d(Ω A + A Ψ) = d right, and the operator is its own adjoint.
        adjoint = solve(omega, psi, gradients[0], Spectrum(*parts))
        omega_gradient = psi_gradient = right_gradient = None
        if ctx.needs_input_grad[0]:
            omega_gradient = -_symmetric(adjoint @ solution.mT).sum_to_size(omega.shape)
        if ctx.needs_input_grad[1]:
            psi_gradient = -_symmetric(solution.mT @ adjoint).sum_to_size(psi.shape)
        if ctx.needs_input_grad[2]:
            right_gradient = adjoint.sum_to_size(right.shape)
        return omega_gradient, psi_gradient, right_gradient, None, None, None, None


class _LogDeterminant(Function):
    @staticmethod
    def forward(omega: Tensor, psi: Tensor, *spectrum: Tensor) -> Tensor:
        return Spectrum(*spectrum).sums().log().sum((-2, -1))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        omega, psi, *parts = ctx.saved_tensors
        row_trace, column_trace = inverse_traces(omega, psi, Spectrum(*parts))
        gradient = gradients[0][..., None, None]
        omega_gradient = (gradient * row_trace).sum_to_size(omega.shape)
        psi_gradient = (gradient * column_trace).sum_to_size(psi.shape)
        return omega_gradient, psi_gradient, None, None, None, None


class _InverseTraces(Function):
    @staticmethod
    def forward(omega: Tensor, psi: Tensor, *spectrum: Tensor) -> tuple[Tensor, Tensor]:
        parts = Spectrum(*spectrum)
        inverse = parts.sums().reciprocal()
        row_trace = (parts.row_vectors * inverse.sum(-1).unsqueeze(-2)) @ parts.row_vectors.mT
        column_trace = (parts.column_vectors * inverse.sum(-2).unsqueeze(-2)) @ parts.column_vectors.mT
        return row_trace, column_trace

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs)

    # The spectrum counts as a constant here, so a third derivative would be silently wrong: autograd refuses.
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        omega, psi, *saved = ctx.saved_tensors
        parts = Spectrum(*saved)
        rows, columns = parts.row_vectors, parts.column_vectors
        inverse = parts.sums().reciprocal()
        row_rotated = rows.mT @ _symmetric(gradients[0]) @ rows
        column_rotated = columns.mT @ _symmetric(gradients[1]) @ columns
        # d(Ω + κI)⁻¹ = -(Ω + κI)⁻¹ dΩ (Ω + κI)⁻¹ summed over κ: a product of sums, never a difference.
        row_inner = (inverse @ inverse.mT) * row_rotated + torch.diag_embed(
            (inverse.square() @ _diagonal(column_rotated)).squeeze(-1)
        )
        column_inner = (inverse.mT @ inverse) * column_rotated + torch.diag_embed(
            (inverse.square().mT @ _diagonal(row_rotated)).squeeze(-1)
        )
        omega_gradient = -(rows @ row_inner @ rows.mT).sum_to_size(omega.shape)
        psi_gradient = -(columns @ column_inner @ columns.mT).sum_to_size(psi.shape)
        return omega_gradient, psi_gradient, None, None, None, None


def _diagonal(matrix: Tensor) -> Tensor:
    return matrix.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
