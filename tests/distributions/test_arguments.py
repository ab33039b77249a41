"""Bad input: one line that names the argument, what was given and what is accepted."""

import pytest
import torch

from kronattn.distributions import KroneckerSumNormal, _kronecker_sum
from kronattn.distributions._kronecker_sum import Spectrum

GOOD = {
    "row_mean": torch.zeros(2),
    "column_mean": torch.zeros(3),
    "row_covariance": torch.eye(2),
    "column_covariance": torch.eye(3),
}
BAD = [
    ("row_mean", [0.0, 0.0], TypeError, "row_mean must be a float32 or float64 tensor, got list"),
    ("row_mean", torch.zeros(2, dtype=torch.int64), TypeError, "row_mean must be float32 or float64, got int64"),
    ("column_mean", torch.zeros(3).half(), TypeError, "column_mean must be float32 or float64, got float16"),
    ("row_covariance", torch.eye(2, dtype=torch.int32), TypeError, "row_covariance must be .* got int32"),
    ("row_covariance", torch.eye(2).cfloat(), TypeError, "row_covariance must be .* got complex64"),
    (
        "column_covariance",
        torch.eye(3).double(),
        TypeError,
        "column_covariance must have the dtype of row_mean, float32, got float64",
    ),
    ("row_mean", torch.tensor(0.0), ValueError, r"row_mean must be \(\*batch, n\) .* shape \(\)"),
    ("column_mean", torch.zeros(0), ValueError, r"column_mean must be \(\*batch, n\) .* shape \(0,\)"),
    ("row_covariance", torch.eye(3), ValueError, r"row_covariance must be \(\*batch, 2, 2\).*shape \(3, 3\)"),
    ("row_covariance", torch.ones(2), ValueError, r"row_covariance must be \(\*batch, 2, 2\).*shape \(2,\)"),
    (
        "column_covariance",
        torch.ones(3, 2),
        ValueError,
        r"column_covariance must be \(\*batch, 3, 3\), for a column_mean of 3 entries, got .* \(3, 2\)",
    ),
    ("row_mean", torch.tensor([0.0, torch.nan]), ValueError, "row_mean must be finite, got NaN or infinity"),
    ("column_mean", torch.full((3,), torch.inf), ValueError, "column_mean must be finite"),
    ("row_covariance", torch.full((2, 2), torch.nan), ValueError, "row_covariance must be finite, got NaN"),
    (
        "column_covariance",
        torch.diag(torch.tensor([1.0, torch.inf, 1.0])),
        ValueError,
        "column_covariance must be f",
    ),
    (
        "row_covariance",
        torch.tensor([[1.0, 0.5], [0.0, 1.0]]),
        ValueError,
        "row_covariance must be symmetric, got entries that differ from their mirror by 0.5",
    ),
    (
        "row_covariance",
        1e-8 * torch.tensor([[1.0, 0.5], [0.0, 1.0]]),
        ValueError,
        "row_covariance must be symmetric",
    ),
    (
        "row_covariance",
        torch.diag(torch.tensor([1.0, -2.0])),
        ValueError,
        "row_covariance must be positive definite, got a smallest eigenvalue of -2",
    ),
    ("column_covariance", torch.zeros(3, 3), ValueError, "column_covariance must be positive definite"),
    ("column_covariance", torch.ones(3, 3), ValueError, "column_covariance must be positive definite"),
    (
        "column_covariance",
        torch.stack([torch.eye(3), -torch.eye(3)]),
        ValueError,
        "column_covariance must be positive definite, got a smallest eigenvalue of -1",
    ),
]


@pytest.mark.parametrize(("name", "value", "error", "message"), BAD)
def test_bad_argument(name, value, error, message):
    with pytest.raises(error, match=message) as caught:
        KroneckerSumNormal(**{**GOOD, name: value})
    assert "\n" not in str(caught.value)


def test_batches_that_do_not_broadcast():
    with pytest.raises(ValueError, match=r"batch shapes must broadcast .* row_mean \(4,\), column_mean \(5,\)"):
        KroneckerSumNormal(torch.zeros(4, 2), torch.zeros(5, 3), torch.eye(2), torch.eye(3))


def test_devices_that_differ():
    with pytest.raises(ValueError, match="column_mean must be on the device of row_mean, cpu, got meta"):
        KroneckerSumNormal(**{**GOOD, "column_mean": torch.zeros(3, device="meta")})


def test_validation_can_be_turned_off_for_values_but_not_for_shapes():
    model = KroneckerSumNormal(**{**GOOD, "row_mean": torch.full((2,), torch.nan)}, validate_args=False)
    assert model.mean.isnan().all()
    with pytest.raises(ValueError, match="row_covariance must be"):
        KroneckerSumNormal(**{**GOOD, "row_covariance": torch.eye(5)}, validate_args=False)


def test_the_torch_default_for_validation_is_followed():
    torch.distributions.Distribution.set_default_validate_args(False)
    try:
        KroneckerSumNormal(**{**GOOD, "row_covariance": -torch.eye(2)})
    finally:
        torch.distributions.Distribution.set_default_validate_args(True)
    with pytest.raises(ValueError, match="positive definite"):
        KroneckerSumNormal(**{**GOOD, "row_covariance": -torch.eye(2)})


def test_rounding_of_a_float32_product_counts_as_symmetric():
    root = 100 * torch.randn(40, 40, generator=torch.Generator().manual_seed(0))
    covariance = (
        root @ root.mT + 0.1 * torch.randn(40, 40, generator=torch.Generator().manual_seed(1)) + 100 * torch.eye(40)
    )
    model = KroneckerSumNormal(torch.zeros(40), torch.zeros(3), covariance, torch.eye(3))
    # torch's own test of symmetry, entry by entry, refuses this matrix; the marginals must not.
    assert not torch.distributions.constraints.symmetric.check(covariance)
    assert model.column_marginal(0).event_shape == (40,)


def test_factors_that_round_to_singular_are_named(monkeypatch):
    model = KroneckerSumNormal(**GOOD)
    # Which matrices pass Cholesky and still get a negative eigenvalue depends on the linear algebra library.
    found = Spectrum(torch.eye(2), torch.tensor([-2e-8, 1.0]), torch.eye(3), torch.tensor([1e-8, 1.0, 1.0]))
    monkeypatch.setattr(_kronecker_sum, "spectrum", lambda omega, psi: found)
    with pytest.raises(ValueError, match=r"row_covariance and column_covariance are singular .* float32: .* -1e-08"):
        model.entropy()


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (torch.zeros(3, 2), ValueError, r"value must be \(\*sample, \*batch, 2, 3\), got .* shape \(3, 2\)"),
        (torch.zeros(3), ValueError, r"value must be .* shape \(3,\)"),
        (torch.zeros(5, 2, 3), ValueError, r"must broadcast .* value \(5,\), distribution \(4,\)"),
        (torch.full((2, 3), torch.nan), ValueError, "value must be finite, got NaN or infinity"),
        (torch.zeros(2, 3, dtype=torch.int64), TypeError, "value must be float32 or float64, got int64"),
        (torch.zeros(2, 3).double(), TypeError, "value must have the dtype of row_mean, float32, got float64"),
        ([[0.0] * 3] * 2, TypeError, "value must be a float32 or float64 tensor, got list"),
    ],
)
def test_bad_value(value, error, message):
    model = KroneckerSumNormal(**{**GOOD, "row_mean": torch.zeros(4, 2)})
    with pytest.raises(error, match=message) as caught:
        model.log_prob(value)
    assert "\n" not in str(caught.value)


def test_torch_conventions():
    model = KroneckerSumNormal(**GOOD)
    assert set(model.arg_constraints) == set(GOOD)
    for name, constraint in model.arg_constraints.items():
        assert constraint.check(getattr(model, name)).all()
    assert model.support.event_dim == 2
    assert model.support.check(torch.zeros(2, 3))
    assert not model.support.check(torch.full((2, 3), torch.nan))
    assert model.has_rsample
    torch.testing.assert_close(model.stddev, torch.full((2, 3), 2.0).sqrt())
