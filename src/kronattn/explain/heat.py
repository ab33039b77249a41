"""Weights as colours over an image: light enough for dark photographs, and the same in a picture and on the page."""

from __future__ import annotations

import numpy as np
from PIL import Image

from kronattn.nn.recorded import PositionWeights

__all__ = ["HEAT", "drawn_shares", "heat_colours", "overlaid"]

# Viridis: as light as it is large, also in grey and for the colour-blind.
HEAT = ("#440154", "#472f7d", "#39568c", "#29788e", "#1f968b", "#35b779", "#74d055", "#b8de29", "#fde725")
_ANCHORS = np.array([[int(colour[at : at + 2], 16) for at in (1, 3, 5)] for colour in HEAT], dtype=np.float32)
# How much of a pixel's colour is the weight's, and how dark the photograph below may be.
_STRENGTH = 0.6
_DARKEST = 0.3


def drawn_shares(weights: PositionWeights) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Weights of rows, columns and positions for the first sample, heads averaged, of a whole of one.

    With the mean counted once, a row may weigh less than nothing: it is asked for less than by all positions on the
    average. Nothing is drawn there.
    """
    rows, columns, places = (
        (x[0].mean(dim=0).float().cpu().numpy() / weights.total).clip(min=0)
        for x in (weights.rows, weights.columns, weights.map)
    )
    return rows, columns, places


def heat_colours(values: np.ndarray) -> np.ndarray:
    """Values from 0 to 1 as colours, (..., 3) uint8.

    Example:
        >>> heat_colours(np.array([0.0, 1.0])).tolist()
        [[68, 1, 84], [253, 231, 37]]
    """
    at = np.clip(values, 0, 1) * (len(_ANCHORS) - 1)
    steps = np.arange(len(_ANCHORS))
    return (
        np.stack([np.interp(at, steps, _ANCHORS[:, channel]) for channel in range(3)], axis=-1).round().astype(np.uint8)
    )


def overlaid(image: Image.Image, weights: np.ndarray) -> Image.Image:
    """An image in grey, spread over its range and lightened, with (rows, columns) weights in colour over it.

    Weights count from zero to the largest, so that an even map looks even.

    Example:
        >>> overlaid(Image.new("RGB", (60, 40)), np.ones((2, 3))).size
        (60, 40)
    """
    grey = np.asarray(image.convert("L"), dtype=np.float32)
    low, high = np.percentile(grey, (1, 99))
    spread = np.clip((grey - low) / max(float(high - low), 1.0), 0, 1)
    base = Image.fromarray((255 * (_DARKEST + (1 - _DARKEST) * spread)).astype(np.uint8)).convert("RGB")
    colours = Image.fromarray(heat_colours(weights / weights.max()))
    return Image.blend(base, colours.resize(image.size, Image.Resampling.NEAREST), _STRENGTH)
