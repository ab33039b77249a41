"""A position's weights as they are drawn."""

from __future__ import annotations

import numpy as np

from kronattn.nn.recorded import PositionWeights

__all__ = ["drawn_shares"]


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
