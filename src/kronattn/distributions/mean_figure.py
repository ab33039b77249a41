"""A picture of the mean in Theorem 1: X̃ has that of X under the paper's normalisation, or with it counted once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kronattn.distributions.claims import Setting, paper_claims
from kronattn.distributions.samples import draw_samples
from kronattn.extras import require_library

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw_means"]

_BLUE, _ORANGE, _GREY = "#2b6cb0", "#dd6b20", "#718096"


def draw_means(setting: Setting, count: int = 20_000) -> Figure:
    """Draw the means of X and of X̃ as they are and with μ̄ + ῡ = 0, and X̃'s against X's; return the figure.

    Lines are what Theorem 1 says, points are means of ``count`` samples. X̃ with its mean counted once is what
    ``mean="once"`` of the operator makes of it: half of each sample's own mean is taken away.

    >>> from kronattn.distributions import random_setting
    >>> [axis.get_title() for axis in draw_means(random_setting(3, 4), 2000).axes][:2]
    ['Mean of X', 'Mean of X̃ (Theorem 1)']
    """
    drawing = require_library("matplotlib.figure", "the figure of means")
    figure = drawing.Figure(figsize=(10.5, 6.4), layout="constrained")
    axes = figure.subplots(2, 3, width_ratios=(1.15, 1.15, 1))
    rows = ((setting, "as it is"), (setting.normalised(), "normalised"))
    claims = [paper_claims(one) for one, _ in rows]
    largest = max(float(mean.abs().max()) for claim in claims for mean in (claim.model.mean, claim.tilde.mean))
    for panels, (one, label), claim in zip(axes, rows, claims, strict=True):
        shift = float(one.mu.mean() + one.upsilon.mean())
        # Rounding leaves the normalised sum at some 1e-17, with either sign.
        panels[0].set_ylabel(f"X {label}: μ̄ + ῡ = {shift if abs(shift) > 1e-9 else 0.0:.2f}\n\nrow i")
        for axis, mean, title in zip(
            panels, (claim.model.mean, claim.tilde.mean), ("Mean of X", "Mean of X̃ (Theorem 1)"), strict=False
        ):
            image = axis.imshow(
                mean.reshape(one.height, one.width).tolist(), cmap="RdBu_r", vmin=-largest, vmax=largest, aspect="auto"
            )
            axis.set_title(title, fontsize=11)
            axis.set(xlabel="column j", xticks=[], yticks=[])
        tilde = draw_samples(one, count).tilde
        _against(panels[2], claim.model.mean, claim.tilde.mean, tilde, f"{count:,}")
    figure.colorbar(image, ax=axes[:, :2], location="bottom", shrink=0.5, aspect=40, pad=0.03, label="mean")
    return figure


def _against(axis: Any, model: Tensor, claimed: Tensor, tilde: Tensor, count: str) -> None:
    """The mean of each entry of X̃ against that of X: on the diagonal if they are the same."""
    once = tilde - tilde.mean(dim=(1, 2), keepdim=True) / 2
    ends = torch.stack([model.min(), model.max()])
    axis.plot(ends.tolist(), ends.tolist(), color=_GREY, linewidth=1, linestyle="--", label="the mean of X itself")
    order = model.argsort()
    axis.plot(model[order].tolist(), claimed[order].tolist(), color=_ORANGE, linewidth=1.2, label="Theorem 1")
    for sampled, colour, marker, label in (
        (tilde, _ORANGE, "o", f"X̃, {count} samples"),
        (once, _BLUE, "x", "X̃, its mean counted once"),
    ):
        axis.plot(model.tolist(), sampled.mean(0).flatten().tolist(), marker, color=colour, markersize=4, label=label)
    axis.set_title("Entries of X̃ against X's", fontsize=11)
    axis.set(xlabel="mean of the entry of X", ylabel="mean of the entry of X̃")
    axis.legend(frameon=False, fontsize=8, loc="upper left")
    # Room for the legend above the points.
    low, high = axis.get_ylim()
    axis.set_ylim(low, high + 0.5 * (high - low))
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
