"""A picture of Theorem 1: what the paper says beside what samples say, and how far apart chance would put them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kronattn.distributions import statistics
from kronattn.distributions.claims import Claims, Normal, Setting, paper_claims
from kronattn.distributions.samples import Samples
from kronattn.extras import require_library

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw_theorem"]

_BLUE, _ORANGE, _GREEN, _GREY = "#2b6cb0", "#dd6b20", "#2f855a", "#a0aec0"
# A Q-Q plot of 20 000 points is a line; its ends are kept, its crowded middle is thinned.
_POINTS, _ENDS = 400, 20


def draw_theorem(setting: Setting, samples: Samples, *, claims: Claims | None = None) -> Figure:
    """Draw the covariance of X, the variances of X̃, and how well the samples fit both; return the figure.

    >>> from kronattn.distributions import draw_samples, random_setting
    >>> setting = random_setting(3, 4)
    >>> len(draw_theorem(setting, draw_samples(setting, 2000)).axes) >= 6
    True
    """
    claims = paper_claims(setting) if claims is None else claims
    height, width = setting.height, setting.width
    drawing = require_library("matplotlib.figure", "the theorem's figure")
    figure = drawing.Figure(figsize=(15, 8.2), layout="constrained")
    axes = figure.subplots(2, 3)
    figure.suptitle(
        f"Theorem 1 on {height}×{width} feature maps: the paper's distributions and {samples.count:,} samples",
        fontsize=14,
    )

    flat = samples.model.flatten(1)
    _heatmaps(
        figure,
        axes[0, :2],
        claims.model.covariance,
        flat.mT.cov().reshape(claims.model.size, -1),
        "RdBu_r",
        centred=True,
        titles=("Covariance of X: Ω ⊕ Ψ (Eq. 2)", "Covariance of X: sampled"),
        unit="covariance",
    )
    for axis in axes[0, :2]:
        _row_blocks(axis, height, width)

    tilde = samples.tilde
    _heatmaps(
        figure,
        axes[1, :2],
        claims.tilde.covariance.diagonal().reshape(height, width),
        tilde.var(0),
        "viridis",
        centred=False,
        titles=("Variance of each entry of X̃: Theorem 1 (Eq. 6)", "Variance of each entry of X̃: sampled"),
        unit="variance",
    )
    for axis in axes[1, :2]:
        axis.set(xlabel="column j", ylabel="row i")
        axis.xaxis.set_major_formatter(_from_one)
        axis.yaxis.set_major_formatter(_from_one)

    _quantiles(axes[0, 2], samples, claims)
    _scores(axes[1, 2], tilde.flatten(1), claims.tilde)
    return figure


def _heatmaps(
    figure: Any,
    axes: Any,
    claimed: Tensor,
    sampled: Tensor,
    colours: str,
    *,
    centred: bool,
    titles: tuple[str, str],
    unit: str,
) -> None:
    both = torch.stack([claimed, sampled])
    high = float(both.abs().max() if centred else both.max())
    low = -high if centred else float(both.min())
    for axis, matrix, title in zip(axes, (claimed, sampled), titles, strict=True):
        image = axis.imshow(matrix.tolist(), cmap=colours, vmin=low, vmax=high, interpolation="nearest")
        axis.set_title(title, fontsize=11)
        axis.locator_params(integer=True)
    figure.colorbar(image, ax=list(axes), shrink=0.85, pad=0.02, label=unit)


def _row_blocks(axis: Any, height: int, width: int) -> None:
    """Mark the w×w block of each pair of rows: Ψ sits in the blocks on the diagonal, Ω on their diagonals."""
    for i in range(1, height):
        axis.axhline(i * width - 0.5, color=_GREY, linewidth=0.5)
        axis.axvline(i * width - 0.5, color=_GREY, linewidth=0.5)
    centres, names = [(i + 0.5) * width - 0.5 for i in range(height)], [f"{i + 1}" for i in range(height)]
    if height <= 16:
        axis.set_xticks(centres, names)
        axis.set_yticks(centres, names)
    else:
        axis.set_xticks([])
        axis.set_yticks([])
    axis.tick_params(length=0)
    axis.set(xlabel="row k of X, its columns side by side", ylabel="row i of X")


def _from_one(position: float, _: int) -> str:
    """Label the paper's way: the first row is row 1."""
    return f"{position + 1:.0f}"


def _quantiles(axis: Any, samples: Samples, claims: Claims) -> None:
    """Q–Q plot of a row, a column and X̃, less the diagonal: on it, three good fits would hide each other."""
    count = samples.count
    middle = torch.linspace(_ENDS, count - 1 - _ENDS, _POINTS).long()
    kept = torch.cat([torch.arange(_ENDS), middle, torch.arange(count - _ENDS, count)])
    probability = (kept.double() + 0.5) / count
    expected = torch.special.ndtri(probability)
    density = torch.exp(-expected.square() / 2) / (2 * torch.pi) ** 0.5
    error = (probability * (1 - probability) / count).sqrt() / density
    axis.axhspan(-3, 3, color=_GREY, alpha=0.25, linewidth=0)
    axis.axhline(0, color=_GREY, linewidth=1)
    shown: tuple[tuple[str, str, Tensor, Normal], ...] = (
        ("first row of X", _BLUE, samples.model[:, 0], claims.rows[0]),
        ("first column of X", _ORANGE, samples.model[:, :, 0], claims.columns[0]),
        ("X̃", _GREEN, samples.tilde.flatten(1), claims.tilde),
    )
    for label, colour, sample, claim in shown:
        # One number for each sample that is a standard normal under the claim: the sum over whitened entries.
        score = statistics.whiten(sample, claim.mean, claim.covariance).sum(1) / claim.size**0.5
        gap = (score.sort().values[kept] - expected) / error
        axis.plot(expected.tolist(), gap.tolist(), color=colour, linewidth=1.3, label=label)
    axis.set_title("Q–Q plot of the whitened marginals, less the diagonal", fontsize=11)
    axis.set(xlabel="quantile of the standard normal", ylabel="sampled less expected, in standard errors")
    # A wrong claim may be hundreds of standard errors off: the axis grows, and never shrinks below the band.
    low, high = axis.get_ylim()
    axis.set_ylim(min(low, -5), max(high, 5))
    axis.legend(frameon=False, loc="best", ncols=3)
    axis.grid(alpha=0.25)


def _scores(axis: Any, sample: Tensor, claim: Normal) -> None:
    """Histogram of the differences between sampled and claimed covariance of X̃, in standard errors."""
    scores = statistics.bartlett_scores(statistics.whiten(sample, claim.mean, claim.covariance))
    edge = max(4.0, float(scores.abs().max()) * 1.05)
    axis.hist(scores.tolist(), bins=31, range=(-edge, edge), density=True, color=_BLUE, alpha=0.55, label="samples")
    grid = torch.linspace(-edge, edge, 401)
    density = torch.exp(-grid.square() / 2) / (2 * torch.pi) ** 0.5
    axis.plot(grid.tolist(), density.tolist(), color=_ORANGE, linewidth=1.5, label="chance alone")
    axis.set_title(f"Covariances of X̃, all {len(scores):,}: samples against Theorem 1", fontsize=11)
    axis.set(xlabel="sampled less claimed, in standard errors", ylabel="density")
    axis.legend(frameon=False, loc="upper left")
    axis.grid(alpha=0.25)
