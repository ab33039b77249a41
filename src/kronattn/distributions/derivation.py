"""The same quantities as in :mod:`kronattn.distributions.claims`, worked out from the model of X alone.

The only things taken from the paper are the entrywise meaning of Eq. 2, Cov(X_ij, X_kl) = Ω_ik [j = l] +
[i = k] Ψ_jl, and how the averages and X̃ are made from X: every later covariance is A Σ Aᵀ for a matrix A that
does just that. No formula that is to be checked is used.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kronattn.distributions.claims import Claims, Normal, Setting

__all__ = ["derived_claims"]


def derived_claims(setting: Setting) -> Claims:
    """Work out by dense linear algebra what the paper states in closed form.

    >>> import torch
    >>> from kronattn.distributions import paper_claims, random_setting
    >>> setting = random_setting(3, 4)
    >>> torch.allclose(derived_claims(setting).tilde.covariance, paper_claims(setting).tilde.covariance)
    True
    """
    height, width = setting.height, setting.width
    model = _model(setting)
    pick = torch.eye(height * width, dtype=setting.mu.dtype).reshape(height, width, -1)
    row_average, column_average, stacked_rows, stacked_columns, tilde = _reconstruction(setting.diagonal())
    square = setting.square().diagonal()
    square_trace = _trace(_model(square))
    return Claims(
        model=model,
        rows=tuple(_apply(pick[i], model) for i in range(height)),
        columns=tuple(_apply(pick[:, j], model) for j in range(width)),
        row_average=row_average,
        column_average=column_average,
        stacked_rows=stacked_rows,
        stacked_columns=stacked_columns,
        tilde=tilde,
        square_trace=square_trace,
        square_trace_ratio=_trace(_reconstruction(square)[-1]) / square_trace,
        trace_ratio=_trace(tilde) / _trace(_model(setting.diagonal())),
        normalised_mean=_reconstruction(setting.normalised().diagonal())[-1].mean,
    )


def _model(setting: Setting) -> Normal:
    height, width = setting.height, setting.width
    mean, covariance = (setting.mu.new_zeros(shape) for shape in ((height, width), (height, width) * 2))
    for i in range(height):
        for j in range(width):
            mean[i, j] = setting.mu[i] + setting.upsilon[j]
            covariance[i, j, :, j] += setting.omega[i]
            covariance[i, j, i, :] += setting.psi[j]
    return Normal(mean.flatten(), covariance.reshape(height * width, height * width))


def _reconstruction(setting: Setting) -> tuple[Normal, Normal, Normal, Normal, Normal]:
    height, width = setting.height, setting.width
    model = _model(setting)
    # Rows of `pick` read one entry of X each; averaging rows of X is averaging those.
    pick = torch.eye(height * width, dtype=setting.mu.dtype).reshape(height, width, -1)
    row_average, column_average = _apply(pick.mean(0), model), _apply(pick.mean(1), model)
    shape = (height, width)
    row_mean, column_mean = (setting.mu.new_zeros(shape) for _ in range(2))
    row_covariance, column_covariance = (setting.mu.new_zeros(shape * 2) for _ in range(2))
    # The r_i come from independent copies of X, so only entries of one row are correlated; so too the c_j.
    for i in range(height):
        row_mean[i] = row_average.mean
        row_covariance[i, :, i, :] = row_average.covariance
    for j in range(width):
        column_mean[:, j] = column_average.mean
        column_covariance[:, j, :, j] = column_average.covariance
    size = height * width
    stacked_rows = Normal(row_mean.flatten(), row_covariance.reshape(size, size))
    stacked_columns = Normal(column_mean.flatten(), column_covariance.reshape(size, size))
    tilde = Normal(stacked_rows.mean + stacked_columns.mean, stacked_rows.covariance + stacked_columns.covariance)
    return row_average, column_average, stacked_rows, stacked_columns, tilde


def _apply(matrix: Tensor, normal: Normal) -> Normal:
    return Normal(matrix @ normal.mean, matrix @ normal.covariance @ matrix.mT)


def _trace(normal: Normal) -> float:
    return float(normal.covariance.trace())
