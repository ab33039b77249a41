"""Figures of evaluations say what their colours mean."""

import torch

from kronattn.models.files import Description
from kronattn.training.figures import draw_curves, draw_pictures


def test_curves_of_a_single_epoch_are_seen():
    (line, *_) = draw_curves([{"epoch": 1, "train/loss": 0.5}]).axes[0].lines
    assert line.get_marker() == "o"
    (line, *_) = draw_curves([{"epoch": epoch, "train/loss": 0.5} for epoch in (1, 2)]).axes[0].lines
    assert line.get_marker() == "None"


def test_predictions_have_a_legend():
    labels = torch.zeros(4, 6, dtype=torch.int64)
    description = Description("m", classes=["sky", "road"], palette=[[0, 0, 255], [90, 90, 90]])
    figure = draw_pictures([(torch.zeros(3, 4, 6), labels, labels)], description)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["sky", "road"]
    assert [tuple(round(255 * value) for value in patch.get_facecolor()[:3]) for patch in legend.get_patches()] == [
        (0, 0, 255),
        (90, 90, 90),
    ]
