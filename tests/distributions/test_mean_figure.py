"""The figure of Theorem 1's mean."""

import sys

import pytest
import torch

from kronattn.distributions import draw_means, random_setting
from kronattn.distributions.mean_figure import _against

SETTING = random_setting(3, 4, seed=3)


def lines(axis):
    return {line.get_label(): torch.tensor([*map(list, line.get_data())]).double() for line in axis.lines}


def test_with_the_normalisation_the_means_agree_and_without_it_they_are_off_by_the_mean():
    figure = draw_means(SETTING, 2000)
    panels = figure.axes[:6]
    shift = SETTING.mu.mean() + SETTING.upsilon.mean()
    assert shift.abs() > 0.5
    for (model, tilde, against), off in ((panels[:3], shift), (panels[3:], torch.zeros_like(shift))):
        x, y = (torch.tensor(axis.images[0].get_array()) for axis in (model, tilde))
        torch.testing.assert_close(y - x, off.expand_as(x), atol=1e-12, rtol=0)
        along, claimed = lines(against)["Theorem 1"]
        torch.testing.assert_close(claimed - along, off.expand_as(along), atol=1e-12, rtol=0)
    assert "0.00" in panels[3].get_ylabel()


def test_counted_once_the_mean_is_that_of_x_whatever_the_normalisation():
    from matplotlib.figure import Figure

    model = torch.tensor([[1.0, 2.0], [3.0, 6.0]])
    # Row means plus column means, without noise: the mean of X, 3, is counted twice.
    tilde = model.mean(1, keepdim=True) + model.mean(0, keepdim=True)
    additive = tilde - model.mean()
    axis = Figure().subplots()
    _against(axis, additive.flatten(), tilde.flatten(), tilde[None], "1")
    drawn = lines(axis)
    torch.testing.assert_close(drawn["X̃, its mean counted once"][1], additive.flatten().double())
    torch.testing.assert_close(drawn["X̃, 1 samples"][1], tilde.flatten().double())


def test_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs matplotlib: pip install 'kronattn\[plots\]'"):
        draw_means(SETTING)
