"""Gradients by finite differences, above all where eigenvalues repeat and autograd through eigh gives NaN."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.distributions import kl_divergence

from kronattn.distributions import KroneckerSumNormal
from tests.distributions.oracle import normal, spd

eye = torch.eye(3, dtype=torch.float64)
FACTORS = {
    "identity": (torch.eye(2, dtype=torch.float64), eye),
    "multiples": (0.5 * torch.eye(2, dtype=torch.float64), 2 * eye),
    "one pair repeats": (spd(2), torch.diag(torch.tensor([1.0, 1.0, 3.0], dtype=torch.float64))),
    "random": (spd(2), spd(3)),
}


@pytest.fixture(params=FACTORS, name="factors")
def _factors(request):
    return [factor.clone().requires_grad_() for factor in FACTORS[request.param]]


def means():
    return [normal(2).requires_grad_(), normal(3).requires_grad_()]


def symmetric(matrix):
    # Finite differences move one entry of a covariance; a covariance moves with its mirror.
    return (matrix + matrix.mT) / 2


def build(mu, upsilon, omega, psi):
    return KroneckerSumNormal(mu, upsilon, symmetric(omega), symmetric(psi))


def test_log_prob(factors):
    x = normal(4, 2, 3).requires_grad_()

    def log_prob(*inputs):
        return build(*inputs[:4]).log_prob(inputs[4])

    assert gradcheck(log_prob, (*means(), *factors, x))
    assert gradgradcheck(log_prob, (*means(), *factors, x))


def test_entropy(factors):
    assert gradcheck(lambda *inputs: build(*means(), *inputs).entropy(), factors)
    assert gradgradcheck(lambda *inputs: build(*means(), *inputs).entropy(), factors)


def test_rsample(factors):
    def draw(*inputs):
        torch.manual_seed(0)
        return build(*inputs).rsample((2,))

    assert gradcheck(draw, (*means(), *factors))


def test_kl_divergence(factors):
    other = KroneckerSumNormal(*means(), spd(2, seed=5), spd(3, seed=6))
    assert gradcheck(lambda *inputs: kl_divergence(other, build(*inputs)), (*means(), *factors))
    assert gradcheck(lambda *inputs: kl_divergence(build(*inputs), other), (*means(), *factors))


def test_tilde_and_averages(factors):
    x = normal(2, 3)

    def densities(*inputs):
        model = build(*inputs)
        return model.tilde().log_prob(x), model.row_average().log_prob(x[0]), model.column_marginal(1).entropy()

    assert gradcheck(densities, (*means(), *factors))


def test_a_third_derivative_is_refused_rather_than_wrong():
    omega = eye.clone().requires_grad_()
    value = KroneckerSumNormal(normal(3), normal(3), omega, eye).entropy()
    (first,) = torch.autograd.grad(value, omega, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), omega, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        second.sum().backward()


def test_torch_func_grad():
    x, mu, upsilon = normal(2, 3), normal(2), normal(3)

    def log_prob(psi):
        return KroneckerSumNormal(mu, upsilon, spd(2), psi).log_prob(x)

    psi = spd(3).requires_grad_()
    (expected,) = torch.autograd.grad(log_prob(psi), psi)
    torch.testing.assert_close(torch.func.grad(log_prob)(psi.detach()), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_maximum_likelihood_finds_the_factors_from_the_identity(dtype):
    """Starts at identity factors, where a gradient through eigh would be NaN at the first step."""
    torch.manual_seed(0)
    truth = [factor.to(dtype) for factor in (torch.diag(torch.tensor([0.3, 1.0])), spd(3))]
    zeros = [torch.zeros(2, dtype=dtype), torch.zeros(3, dtype=dtype)]
    x = KroneckerSumNormal(*zeros, *truth).sample((4000,))
    roots = [torch.eye(n, dtype=dtype).requires_grad_() for n in (2, 3)]
    optimiser = torch.optim.LBFGS(roots, line_search_fn="strong_wolfe", max_iter=50)

    def model():
        return KroneckerSumNormal(*zeros, *(r @ r.mT + 0.01 * torch.eye(len(r), dtype=dtype) for r in roots))

    def loss():
        optimiser.zero_grad()
        value = -model().log_prob(x).mean()
        value.backward()
        return value

    optimiser.step(loss)
    # The factors are known up to a multiple of the identity that moves between them; their sum is not.
    fitted = model().covariance().detach()
    expected = KroneckerSumNormal(*zeros, *truth).covariance()
    assert (fitted - expected).abs().max() < 0.15
    assert (torch.eye(6, dtype=dtype) * 2 - expected).abs().max() > 0.5
