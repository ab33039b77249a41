"""Draws the guide's figures into docs/figures/. Run `python tools/figures.py` after changing what they show."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from stored import decided

from kronattn import axis_averages, record_coefficients
from kronattn.distributions import draw_means, random_setting
from kronattn.nn import DenseAttention, KroneckerAttention
from kronattn.present import figure_bytes
from kronattn.study.figures import draw_worth

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "figures"
BLUE, ORANGE, GREY, YELLOW = "#2b6cb0", "#dd6b20", "#718096", "#d69e2e"


def feature_map() -> torch.Tensor:
    """(1, 6, 9, 13): two soft blobs and a slope, so that there is something to attend to."""
    y, x = torch.meshgrid(torch.linspace(0, 1, 9), torch.linspace(0, 1, 13), indexing="ij")

    def blob(cx: float, cy: float, size: float) -> torch.Tensor:
        return torch.exp(-((x - cx) ** 2 + (y - cy) ** 2) / size)

    channels = [blob(0.25, 0.3, 0.03), blob(0.75, 0.7, 0.05), blob(0.75, 0.3, 0.02), x, y, torch.ones_like(x)]
    return torch.stack(channels)[None]


def averages() -> Figure:
    """A feature map, and the averages that Kronecker attention sees of it."""
    x = feature_map()[:, :2].sum(dim=1, keepdim=True)
    height, width = x.shape[2:]
    tokens = axis_averages(x)[0, 0].numpy()
    figure = Figure(figsize=(5.4, 4.0), layout="constrained")
    axes = figure.subplots(2, 2, width_ratios=(1, width), height_ratios=(1, height))
    corner, top, left, main = axes.ravel()
    corner.axis("off")
    limits = {"cmap": "Blues", "vmin": 0, "vmax": 1, "aspect": "auto"}
    main.imshow(x[0, 0].numpy(), **limits)
    top.imshow(tokens[None, :width], **limits)
    left.imshow(tokens[width:, None], **limits)
    top.set_title(f"H: the average of each of the {width} columns", fontsize=9)
    left.set_ylabel(f"L: the average of each of the {height} rows", fontsize=9)
    main.set_xlabel(f"X: {height} × {width} = {height * width} positions; C = [H, L] has {height + width}", fontsize=9)
    for axis in (top, left, main):
        axis.set(xticks=[], yticks=[])
    return figure


def matrices() -> Figure:
    """The coefficient matrices of the three operators, drawn to one scale."""
    side = 14
    positions, averaged = side * side, 2 * side
    figure = Figure(figsize=(7.6, 3.2), layout="constrained")
    axis = figure.subplots()
    start = 0.0
    shapes = (("regular", positions, positions, GREY), ("KAO_KV", positions, averaged, BLUE))
    for label, queries, keys, colour in (*shapes, ("KAO_QKV", averaged, averaged, ORANGE)):
        axis.add_patch(Rectangle((start, 0), queries, -keys, color=colour))
        axis.text(start, 8, f"{label}\n{keys} × {queries} = {keys * queries:,}", fontsize=9, va="bottom", color=colour)
        start += queries + 45
    axis.set(xlim=(-4, start + 40), ylim=(-positions - 4, 50), aspect="equal")
    axis.axis("off")
    figure.suptitle(f"Coefficients on a {side} × {side} map: keys × queries, to scale", fontsize=10)
    return figure


def maps() -> Figure:
    """Where one position attends with each operator: weights along the edges, and the map they imply."""
    x = feature_map() * 3
    position = (2, 3)
    figure = Figure(figsize=(9.2, 2.9), layout="constrained")
    layers = (
        ("KAO_KV", BLUE, KroneckerAttention(6, "kv", coefficient_norm=None, project="")),
        ("KAO_QKV", ORANGE, KroneckerAttention(6, "qkv", coefficient_norm=None, project="")),
        ("regular", GREY, DenseAttention(6, coefficient_norm=None, project="")),
    )
    for panel, (label, colour, layer) in zip(figure.subfigures(1, 3), layers, strict=True):
        with record_coefficients(layer) as recorded:
            layer(x)
        weights = recorded[0].at(*position)
        _edges(panel, weights, position, label, colour)
    return figure


def _edges(panel: Any, weights: Any, position: tuple[int, int], label: str, colour: str) -> None:
    rows, columns, places = (w[0, 0].numpy() / weights.total for w in (weights.rows, weights.columns, weights.map))
    ((corner, top), (left, main)) = panel.subplots(2, 2, width_ratios=(1, 5), height_ratios=(1, 4))
    corner.axis("off")
    main.imshow(places, cmap="Greys", vmin=0, aspect="auto")
    main.add_patch(Rectangle((position[1] - 0.5, position[0] - 0.5), 1, 1, fill=False, edgecolor=YELLOW, linewidth=2))
    top.bar(np.arange(len(columns)), columns, width=1, color=colour)
    left.barh(np.arange(len(rows)), rows, height=1, color=colour)
    top.set_xlim(-0.5, len(columns) - 0.5)
    left.set_ylim(len(rows) - 0.5, -0.5)
    left.invert_xaxis()
    top.set_title(label, fontsize=10, color=colour, loc="left")
    for axis in (top, left, main):
        axis.set(xticks=[], yticks=[])
        axis.spines[:].set_visible(axis is main)


def means() -> Figure:
    """The mean in Theorem 1, with and without the paper's normalisation."""
    return draw_means(random_setting(5, 7, seed=3))


def worth() -> Figure:
    """What Kronecker attention gains on each data set, a mean and regular attention beside it, and their price."""
    layers = ("global_mean", "attention", "kao_kv", "kao_qkv", "kao_qkv_sample")
    return draw_worth(decided(), "global_mean", "none", layers)


def worth_of_all() -> Figure:
    """The same of every context layer."""
    return draw_worth(decided(), "global_mean", "none")


FIGURES = {
    "averages": averages,
    "matrices": matrices,
    "maps": maps,
    "means": means,
    "worth": worth,
    "worth-of-all": worth_of_all,
}


def main() -> int:
    """Draw them all."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, draw in FIGURES.items():
        (FOLDER / f"{name}.svg").write_bytes(figure_bytes(draw(), "svg"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
