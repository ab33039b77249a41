"""What a covariance and a mean must be, each refusal one line that names the argument."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

_DTYPES = (torch.float32, torch.float64)
# Relative to the largest entry: what is left of the symmetry of a float32 matrix product such as A Aᵀ.
_SYMMETRY = 1e-5


def check_types(tensors: Mapping[str, Tensor]) -> None:
    """Refuse what is not a tensor, not float32 or float64, or not of one dtype on one device."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a float32 or float64 tensor, got {type(tensor).__name__}")
        if tensor.dtype not in _DTYPES:
            raise TypeError(f"{name} must be float32 or float64, got {_short(tensor.dtype)}")
    (first, reference), *others = tensors.items()
    for name, tensor in others:
        if tensor.dtype != reference.dtype:
            raise TypeError(
                f"{name} must have the dtype of {first}, {_short(reference.dtype)}, got {_short(tensor.dtype)}"
            )
        if tensor.device != reference.device:
            raise ValueError(f"{name} must be on the device of {first}, {reference.device}, got {tensor.device}")


def check_vector(name: str, vector: Tensor) -> None:
    """Refuse anything but (*batch, n) with n at least 1."""
    if vector.dim() < 1 or vector.shape[-1] < 1:
        raise ValueError(f"{name} must be (*batch, n) with n at least 1, got a tensor of shape {tuple(vector.shape)}")


def check_square(name: str, matrix: Tensor, size: int, mean: str) -> None:
    """Refuse anything but (*batch, size, size)."""
    if matrix.shape[-2:] != (size, size):
        raise ValueError(
            f"{name} must be (*batch, {size}, {size}), for a {mean} of {size} entries, "
            f"got a tensor of shape {tuple(matrix.shape)}"
        )


def check_finite(name: str, tensor: Tensor) -> None:
    """Refuse NaN and infinity."""
    if not tensor.isfinite().all():
        raise ValueError(f"{name} must be finite, got NaN or infinity")


def check_positive_definite(name: str, matrix: Tensor) -> None:
    """Refuse a matrix, (*batch, n, n), that is not symmetric positive definite."""
    gap, scale = (matrix - matrix.mT).abs().amax((-2, -1)), matrix.abs().amax((-2, -1))
    if (gap > _SYMMETRY * scale).any():
        raise ValueError(f"{name} must be symmetric, got entries that differ from their mirror by {gap.max():.3g}")
    if torch.linalg.cholesky_ex(matrix).info.any():
        smallest = torch.linalg.eigvalsh(matrix).min()
        raise ValueError(f"{name} must be positive definite, got a smallest eigenvalue of {smallest:.3g}")


def broadcast_batch(shapes: Mapping[str, torch.Size]) -> torch.Size:
    """Return the common batch shape, or refuse naming each argument's."""
    try:
        return torch.broadcast_shapes(*shapes.values())
    except RuntimeError:
        given = ", ".join(f"{name} {tuple(shape)}" for name, shape in shapes.items())
        raise ValueError(f"the batch shapes must broadcast with each other, got {given}") from None


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
