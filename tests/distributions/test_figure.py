"""The theorem's figure."""

import io
import sys
from dataclasses import replace

import pytest

from kronattn.distributions import draw_samples, draw_theorem, paper_claims, random_setting

SETTING = random_setting(3, 4)
SAMPLES = draw_samples(SETTING, 2000)


def texts(figure):
    return [axis.get_title() for axis in figure.axes]


def image(figure, title):
    (axis,) = (axis for axis in figure.axes if axis.get_title() == title)
    return axis.images[0].get_array()


def test_shows_the_papers_values_and_the_samples():
    figure = draw_theorem(SETTING, SAMPLES)
    claims = paper_claims(SETTING)
    shown = image(figure, "Covariance of X: Ω ⊕ Ψ (Eq. 2)")
    assert shown.tolist() == claims.model.covariance.tolist()
    sampled = image(figure, "Variance of each entry of X̃: sampled")
    assert sampled.tolist() == SAMPLES.tilde.var(0).tolist()
    assert "Covariances of X̃, all 78: samples against Theorem 1" in texts(figure)


def test_a_wrong_claim_shows():
    claims = paper_claims(SETTING)
    wrong = replace(claims, tilde=replace(claims.tilde, mean=claims.tilde.mean + 1))

    def reach(figure):
        (axis,) = (axis for axis in figure.axes if axis.get_title().startswith("Q–Q"))
        return max(abs(limit) for limit in axis.get_ylim())

    assert reach(draw_theorem(SETTING, SAMPLES)) < 10 < 50 < reach(draw_theorem(SETTING, SAMPLES, claims=wrong))


@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 5), (20, 2)])
def test_narrow_and_tall(height, width):
    setting = random_setting(height, width)
    figure = draw_theorem(setting, draw_samples(setting, 1500))
    entries = height * width
    assert image(figure, "Covariance of X: Ω ⊕ Ψ (Eq. 2)").shape == (entries, entries)
    assert image(figure, "Variance of each entry of X̃: sampled").shape == (height, width)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="svg")
    assert drawn.getvalue().startswith(b"<?xml")


def test_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs matplotlib: pip install 'kronattn\[plots\]'"):
        draw_theorem(SETTING, SAMPLES)
