"""The dense way, for comparison: random factors, and the multivariate normal of vec(Xᵀ)."""

import torch
from torch import Tensor
from torch.distributions import MultivariateNormal


def spd(*shape: int, seed: int = 0) -> Tensor:
    """Random symmetric positive-definite float64 matrices, (*shape, shape[-1])."""
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(*shape, shape[-1], generator=generator, dtype=torch.float64)
    return root @ root.mT / shape[-1] + 0.3 * torch.eye(shape[-1], dtype=torch.float64)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def kronecker_sum(omega: Tensor, psi: Tensor) -> Tensor:
    """Ω ⊗ I + I ⊗ Ψ of matrices without a batch."""
    return torch.kron(omega, torch.eye(len(psi), dtype=psi.dtype)) + torch.kron(
        torch.eye(len(omega), dtype=omega.dtype), psi
    )


def dense(mu: Tensor, upsilon: Tensor, omega: Tensor, psi: Tensor) -> MultivariateNormal:
    """The distribution of vec(Xᵀ), for parameters without a batch."""
    return MultivariateNormal((mu[:, None] + upsilon).flatten(), kronecker_sum(omega, psi))
