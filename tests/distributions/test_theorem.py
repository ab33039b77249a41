"""Theorem 1: green as the paper states it, red for every statement that is made wrong on purpose."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kronattn.distributions import (
    Check,
    KroneckerSumNormal,
    Normal,
    check_theorem,
    derived_claims,
    draw_samples,
    paper_claims,
    random_setting,
)
from kronattn.distributions.theorem import EXACT_BOUND

SETTING = random_setting(4, 5, seed=1)
SAMPLES = draw_samples(SETTING, 10_000, seed=1)
PAPER = paper_claims(SETTING)


def red(claims):
    return {(c.equation, c.kind, c.name) for c in check_theorem(SETTING, SAMPLES, claims=claims) if not c.passed}


def test_all_green_and_every_equation_is_there():
    checks = check_theorem(SETTING, SAMPLES)
    assert [check for check in checks if not check.passed] == []
    both = {"exact", "sampled"}
    for equation in ("Eq. 2", "Eq. 3", "Sec. 3.2", "Eq. 4", "Eq. 5", "Eq. 8", "Eq. 9", "Eqs. 6, 10"):
        assert {check.kind for check in checks if check.equation == equation} == both, equation
    for equation in ("Eq. 11", "Eqs. 7, 12", "after Eq. 7", "Eq. 13"):
        assert {check.kind for check in checks if check.equation == equation} == {"exact"}, equation
    assert len({(check.name, check.equation, check.kind) for check in checks}) == len(checks)
    # A bound that everything meets with ease shows nothing: the χ² are of the size of their degrees of freedom.
    for check in checks:
        if check.statistic.startswith("χ²"):
            freedom = float(check.statistic.split()[1])
            assert 0.1 * freedom < check.measured < check.bound


@given(height=st.integers(1, 6), width=st.integers(1, 6), seed=st.integers(0, 10**6))
def test_the_exact_half_holds_at_every_size(height, width, seed):
    setting = random_setting(height, width, seed=seed)
    checks = check_theorem(setting, draw_samples(setting, 1100, seed=seed), confidence=1 - 1e-9)
    assert all(check.passed for check in checks)


def scaled(normal, factor):
    return replace(normal, covariance=factor * normal.covariance)


def shifted(normal, step):
    mean = normal.mean.clone()
    mean[0] += step
    return replace(normal, mean=mean)


STATEMENTS = {
    "model": {"Eq. 2"},
    "row_average": {"Eq. 4"},
    "column_average": {"Eq. 5"},
    "stacked_rows": {"Eq. 8"},
    "stacked_columns": {"Eq. 9"},
    "tilde": {"Eqs. 6, 10"},
}


@pytest.mark.parametrize("statement", STATEMENTS)
def test_a_covariance_that_is_a_tenth_too_large_turns_its_rows_red_and_no_others(statement):
    found = red(replace(PAPER, **{statement: scaled(getattr(PAPER, statement), 1.1)}))
    assert {equation for equation, _, _ in found} == STATEMENTS[statement]
    assert {kind for _, kind, name in found if "covariance" in name or kind == "exact"} == {"exact", "sampled"}
    assert not any(name.startswith("mean") for _, _, name in found)


@pytest.mark.parametrize("statement", STATEMENTS)
def test_a_wrong_mean_turns_its_rows_red(statement):
    found = red(replace(PAPER, **{statement: shifted(getattr(PAPER, statement), 0.2)}))
    equations = {"Eq. 2", "Eq. 3"} if statement == "model" else STATEMENTS[statement]
    assert {equation for equation, _, _ in found} == equations
    assert {kind for _, kind, _ in found} == {"exact", "sampled"}
    assert any(name.startswith("mean") and kind == "sampled" for _, kind, name in found)
    # The exact checks of Eqs. 2 and 6 have a row for the covariance alone, which is still right.
    assert not any(name.startswith("covariance") for _, _, name in found)


def test_one_wrong_correlation_in_tilde_is_found():
    covariance = PAPER.tilde.covariance.clone()
    extra = 0.2 * (covariance[0, 0] * covariance[7, 7]).sqrt()
    covariance[0, 7] += extra
    covariance[7, 0] += extra
    found = red(replace(PAPER, tilde=Normal(PAPER.tilde.mean, covariance)))
    assert ("Eqs. 6, 10", "exact", "covariance of X̃") in found
    assert ("Eqs. 6, 10", "sampled", "covariance of X̃") in found


def test_swapping_h_and_w_in_the_theorem_is_found():
    h, w, diagonal = SETTING.height, SETTING.width, SETTING.diagonal()
    column = (diagonal.psi.trace() / w * torch.eye(h) + diagonal.omega) / h
    row = (diagonal.omega.trace() / h * torch.eye(w) + diagonal.psi) / w
    zeros = torch.zeros(h, dtype=torch.float64), torch.zeros(w, dtype=torch.float64)
    swapped = KroneckerSumNormal(*zeros, column, row).covariance()
    found = red(replace(PAPER, tilde=Normal(PAPER.tilde.mean, swapped)))
    assert {kind for _, kind, name in found if name == "covariance of X̃"} == {"exact", "sampled"}


@pytest.mark.parametrize(("statement", "name"), [("rows", "each row"), ("columns", "each column")])
def test_one_wrong_marginal_among_all_is_found(statement, name):
    first, *others = getattr(PAPER, statement)
    found = red(replace(PAPER, **{statement: (scaled(first, 1.3), *others)}))
    assert found == {("Sec. 3.2", "exact", name), ("Sec. 3.2", "sampled", f"{name} is normal")}


@pytest.mark.parametrize(
    ("field", "equation"),
    [("square_trace", "Eq. 11"), ("square_trace_ratio", "Eqs. 7, 12"), ("trace_ratio", "after Eq. 7")],
)
def test_a_wrong_trace_is_found(field, equation):
    found = red(replace(PAPER, **{field: getattr(PAPER, field) * (1 + 1e-9)}))
    assert {e for e, _, _ in found} == {equation}


def test_a_wrong_normalised_mean_is_found():
    found = red(replace(PAPER, normalised_mean=PAPER.model.mean))
    assert {e for e, _, _ in found} == {"Eq. 13"}


def test_samples_that_are_not_normal_are_found():
    """The first two moments are right and the distribution is wrong: X̃ times an independent random scale."""
    scale = torch.where(torch.arange(SAMPLES.count) % 2 == 0, 0.6, (2 - 0.36) ** 0.5).double()[:, None, None]
    m_r, m_c = (PAPER.stacked_rows.mean.view(4, 5), PAPER.stacked_columns.mean.view(4, 5))
    mixture = replace(
        SAMPLES,
        stacked_rows=m_r + scale * (SAMPLES.stacked_rows - m_r),
        stacked_columns=m_c + scale * (SAMPLES.stacked_columns - m_c),
    )
    found = {check.name for check in check_theorem(SETTING, mixture) if not check.passed}
    assert "X̃ is normal" in found


def test_samples_of_a_wrong_library_are_found(monkeypatch):
    """A sampler that forgets one of the two noises."""
    monkeypatch.setattr(
        KroneckerSumNormal,
        "rsample",
        lambda self, shape: (
            self.mean
            + torch.linalg.cholesky(self.row_covariance) @ torch.randn(*shape, *self.event_shape, dtype=torch.float64)
        ),
    )
    samples = draw_samples(SETTING, 3000)
    found = {check.equation for check in check_theorem(SETTING, samples) if not check.passed}
    assert {"Eq. 2", "Eq. 4", "Eq. 5", "Eq. 8", "Eq. 9", "Eqs. 6, 10"} <= found


def test_the_library_agrees_with_the_paper():
    diagonal = SETTING.diagonal()
    model = KroneckerSumNormal(diagonal.mu, diagonal.upsilon, diagonal.omega, diagonal.psi)
    for ours, paper in (
        (model.row_average(), PAPER.row_average),
        (model.column_average(), PAPER.column_average),
    ):
        torch.testing.assert_close(ours.mean, paper.mean, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(ours.covariance_matrix, paper.covariance, rtol=1e-12, atol=1e-12)
    tilde = model.tilde()
    torch.testing.assert_close(tilde.mean.flatten(), PAPER.tilde.mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(tilde.covariance(), PAPER.tilde.covariance, rtol=1e-12, atol=1e-12)


def test_the_papers_average_formula_needs_diagonal_factors():
    """Why Section 3.3 assumes them, and why the library's averages have another formula."""
    model = KroneckerSumNormal(SETTING.mu, SETTING.upsilon, SETTING.omega, SETTING.psi)
    dense = model.row_average().covariance_matrix
    printed = (SETTING.omega.diagonal().mean() * torch.eye(5) + SETTING.psi) / SETTING.height
    assert (dense - printed).abs().max() > 0.01


def test_the_derivation_does_not_assume_diagonal_factors_for_the_marginals():
    derived = derived_claims(SETTING)
    assert (derived.rows[0].covariance - derived.rows[0].covariance.diagonal().diag()).abs().max() > 0.1


def test_false_alarms_are_as_rare_as_stated():
    """At a confidence of 0.5, about half of all seeds may be red, and hardly all of them green."""
    seeds = 40
    reds = 0
    for seed in range(seeds):
        setting = random_setting(2, 2, seed=seed)
        samples = draw_samples(setting, 1100, seed=seed)
        reds += not all(check.passed for check in check_theorem(setting, samples, confidence=0.5))
    assert 0 < reds <= seeds * 0.5 + 3 * (seeds * 0.25) ** 0.5


def test_a_higher_confidence_has_wider_bounds():
    low, high = (check_theorem(SETTING, SAMPLES, confidence=c) for c in (0.9, 0.999999))
    for one, other in zip(low, high, strict=True):
        assert one.measured == other.measured
        assert one.bound == other.bound == EXACT_BOUND if one.kind == "exact" else one.bound < other.bound


def test_same_seed_same_samples_and_torchs_state_is_left_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, other, third = (draw_samples(SETTING, 1100, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one.model, other.model)
    assert torch.equal(one.tilde, other.tilde)
    assert not torch.equal(one.model, third.model)
    assert torch.equal(random_setting(2, 3, seed=1).omega, random_setting(2, 3, seed=1).omega)


def test_progress_sees_every_block():
    seen = []
    draw_samples(random_setting(10, 10), 5000, track=lambda blocks: seen.extend(blocks) or blocks)
    assert len(seen) > 1
    assert seen[0] == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: random_setting(0, 3), "height must be at least 1, got 0"),
        (lambda: random_setting(3, -1), "width must be at least 1, got -1"),
        (lambda: random_setting(33, 32), "height times width must be at most 1024, .* got 33 times 32"),
        (lambda: random_setting(2, 2, seed=-1), "seed must be from 0 to 9223372036854775807, got -1"),
        (lambda: draw_samples(SETTING, 1100, seed=2**63), "seed must be from 0"),
        (lambda: draw_samples(SETTING, 1019), "samples must be from 1020 to 2500000 for 4x5 matrices, got 1019"),
        (lambda: draw_samples(SETTING, 10**12), "samples must be from 1020 to 2500000"),
        (
            lambda: check_theorem(SETTING, SAMPLES, confidence=1.0),
            "confidence must be between 0 and 1, .* got 1.0",
        ),
        (lambda: check_theorem(SETTING, SAMPLES, confidence=float("nan")), "confidence must be .* got nan"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_nan_is_not_a_pass():
    assert not Check("", "", "exact", "", float("nan"), 1.0).passed


def test_importing_the_distributions_needs_torch_only():
    code = "import sys, kronattn.distributions; print({'scipy', 'rich', 'matplotlib', 'typer'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
