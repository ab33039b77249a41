"""KroneckerSumNormal against MultivariateNormal on the dense covariance."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributions import MultivariateNormal, kl_divergence

from kronattn.distributions import KroneckerSumNormal
from tests.distributions.oracle import dense, kronecker_sum, normal, spd

SIZES = st.integers(1, 7)
close = torch.testing.assert_close


def parameters(height, width, seed=0):
    return (
        normal(height, seed=seed),
        normal(width, seed=seed + 1),
        spd(height, seed=seed + 2),
        spd(width, seed=seed + 3),
    )


@given(height=SIZES, width=SIZES, seed=st.integers(0, 10**6))
def test_density_entropy_and_moments_are_those_of_the_dense_normal(height, width, seed):
    given_parameters = parameters(height, width, seed)
    ours, theirs = KroneckerSumNormal(*given_parameters), dense(*given_parameters)
    x = 2 * normal(4, height, width, seed=seed + 4)
    close(ours.log_prob(x), theirs.log_prob(x.flatten(1)), rtol=1e-10, atol=1e-10)
    close(ours.entropy(), theirs.entropy(), rtol=1e-10, atol=1e-10)
    close(ours.mean.flatten(), theirs.mean, rtol=0, atol=0)
    close(ours.variance.flatten(), theirs.variance, rtol=1e-12, atol=0)
    close(ours.covariance(), theirs.covariance_matrix, rtol=1e-12, atol=1e-12)
    assert ours.event_shape == (height, width)
    assert ours.batch_shape == ()


@given(height=SIZES, width=SIZES, seed=st.integers(0, 10**6))
def test_gradients_of_the_density_are_those_of_the_dense_normal(height, width, seed):
    leaves = [p.requires_grad_() for p in (*parameters(height, width, seed), normal(3, height, width, seed=seed))]
    weight = normal(3, seed=seed)
    ours = (KroneckerSumNormal(*leaves[:4]).log_prob(leaves[4]) * weight).sum()
    theirs = (dense(*leaves[:4]).log_prob(leaves[4].flatten(1)) * weight).sum()
    for one, other in zip(torch.autograd.grad(ours, leaves), torch.autograd.grad(theirs, leaves), strict=True):
        close(one, other, rtol=1e-10, atol=1e-10)


@given(height=SIZES, width=SIZES, seed=st.integers(0, 10**6))
def test_kl_divergence_is_that_of_the_dense_normals(height, width, seed):
    first, second = parameters(height, width, seed), parameters(height, width, seed + 10)
    ours = kl_divergence(KroneckerSumNormal(*first), KroneckerSumNormal(*second))
    close(ours, kl_divergence(dense(*first), dense(*second)), rtol=1e-10, atol=1e-10)


def test_kl_divergence_needs_one_shape():
    with pytest.raises(ValueError, match=r"got \(2, 3\) and \(3, 2\)"):
        kl_divergence(KroneckerSumNormal(*parameters(2, 3)), KroneckerSumNormal(*parameters(3, 2)))


def test_the_rows_and_columns_of_the_covariance_are_not_swapped():
    omega, psi = torch.tensor([[2.0, 0.5], [0.5, 1.0]]), torch.diag(torch.tensor([10.0, 20.0, 30.0]))
    model = KroneckerSumNormal(torch.zeros(2), torch.zeros(3), omega, psi)
    covariance = model.covariance().reshape(2, 3, 2, 3)
    assert covariance[0, 0, 1, 0] == 0.5  # two rows, one column: Omega
    assert covariance[0, 2, 0, 2] == 2.0 + 30.0
    assert covariance[0, 0, 1, 1] == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_samples_have_the_mean_and_covariance(dtype):
    torch.manual_seed(0)
    given_parameters = [p.to(dtype) for p in parameters(3, 4)]
    model = KroneckerSumNormal(*given_parameters)
    count = 40_000
    x = model.sample((count,))
    assert x.dtype == dtype
    assert x.shape == (count, 3, 4)
    target = kronecker_sum(*given_parameters[2:])
    scale = target.diagonal().sqrt()
    # Five standard errors of each entry; the variance of a covariance is at most 2 Σii Σjj / n.
    assert ((x.mean(0) - model.mean).flatten().abs() < 5 * scale / count**0.5).all()
    assert ((x.flatten(1).mT.cov() - target).abs() < 5 * (2 / count) ** 0.5 * torch.outer(scale, scale)).all()


def test_rsample_matches_its_construction_so_that_its_gradient_is_that_of_cholesky():
    leaves = [p.requires_grad_() for p in parameters(3, 4)]
    torch.manual_seed(3)
    x = KroneckerSumNormal(*leaves).rsample((2,))
    torch.manual_seed(3)
    rows, columns = (torch.randn(2, 3, 4, dtype=torch.float64) for _ in range(2))
    mu, upsilon, omega, psi = leaves
    literal = mu[:, None] + upsilon + torch.linalg.cholesky(omega) @ rows + (torch.linalg.cholesky(psi) @ columns.mT).mT
    close(x, literal, rtol=1e-12, atol=1e-12)
    weight = normal(2, 3, 4)
    ours, theirs = (torch.autograd.grad((y * weight).sum(), leaves) for y in (x, literal))
    for one, other in zip(ours, theirs, strict=True):
        close(one, other, rtol=1e-12, atol=1e-12)


def test_sample_keeps_no_graph():
    model = KroneckerSumNormal(*(p.requires_grad_() for p in parameters(2, 3)))
    assert not model.sample().requires_grad
    assert model.rsample().requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_512_by_512_never_needs_the_dense_matrix(dtype):
    """Dense, this covariance has 2³⁶ entries: 256 GiB in float32."""
    torch.manual_seed(2)  # not a seed of the factors: the noise must be independent of them
    side = 512
    omega, psi = (spd(side, seed=seed).to(dtype).requires_grad_() for seed in (0, 1))
    model = KroneckerSumNormal(torch.zeros(side, dtype=dtype), torch.zeros(side, dtype=dtype), omega, psi)
    x = model.rsample()
    density = model.log_prob(x)
    density.backward()
    assert omega.grad.isfinite().all()
    # Under the model, log p(X) + entropy is half of (hw − χ²_hw): within 6 standard deviations.
    assert abs(density.item() + model.entropy().item()) < 6 * (side * side / 2) ** 0.5


class TestMarginalsAndAverages:
    mu, upsilon, omega, psi = parameters(3, 5)
    model = KroneckerSumNormal(mu, upsilon, omega, psi)
    full = dense(mu, upsilon, omega, psi)
    places = torch.arange(15).reshape(3, 5)

    def assert_is(self, distribution, matrix):
        """Check against the image of the dense normal under a matrix."""
        assert isinstance(distribution, MultivariateNormal)
        close(distribution.mean, matrix @ self.full.mean, rtol=1e-12, atol=1e-12)
        close(
            distribution.covariance_matrix,
            matrix @ self.full.covariance_matrix @ matrix.mT,
            rtol=1e-12,
            atol=1e-12,
        )

    @pytest.mark.parametrize("i", [0, 1, 2, -1])
    def test_row(self, i):
        self.assert_is(self.model.row_marginal(i), torch.eye(15, dtype=torch.float64)[self.places[i]])

    @pytest.mark.parametrize("j", [0, 3, 4, -5])
    def test_column(self, j):
        self.assert_is(self.model.column_marginal(j), torch.eye(15, dtype=torch.float64)[self.places[:, j]])

    def test_row_average(self):
        matrix = torch.eye(15, dtype=torch.float64).reshape(3, 5, 15).mean(0)
        self.assert_is(self.model.row_average(), matrix)

    def test_column_average(self):
        matrix = torch.eye(15, dtype=torch.float64).reshape(3, 5, 15).mean(1)
        self.assert_is(self.model.column_average(), matrix)

    def test_tilde_is_the_sum_of_independent_averages(self):
        tilde, row, column = self.model.tilde(), self.model.row_average(), self.model.column_average()
        eye_h, eye_w = torch.eye(3, dtype=torch.float64), torch.eye(5, dtype=torch.float64)
        expected = torch.kron(eye_h, row.covariance_matrix) + torch.kron(column.covariance_matrix, eye_w)
        close(tilde.covariance(), expected, rtol=1e-12, atol=1e-12)
        close(tilde.mean, row.mean + column.mean[:, None], rtol=1e-12, atol=1e-12)

    def test_diagonal_factors_give_the_papers_formulas(self):
        omega, psi = self.omega.diagonal().diag(), self.psi.diagonal().diag()
        model = KroneckerSumNormal(self.mu, self.upsilon, omega, psi)
        eye_h, eye_w = torch.eye(3, dtype=torch.float64), torch.eye(5, dtype=torch.float64)
        row = (omega.trace() / 3 * eye_w + psi) / 3
        column = (psi.trace() / 5 * eye_h + omega) / 5
        close(model.row_average().covariance_matrix, row, rtol=1e-12, atol=1e-12)
        close(model.column_average().covariance_matrix, column, rtol=1e-12, atol=1e-12)
        close(model.tilde().row_covariance, column, rtol=1e-12, atol=1e-12)
        close(model.tilde().column_covariance, row, rtol=1e-12, atol=1e-12)
        shift = self.mu.mean() + self.upsilon.mean()
        close(model.tilde().mean, model.mean + shift, rtol=1e-12, atol=1e-12)

    @pytest.mark.parametrize("index", [3, -4])
    def test_a_row_that_is_not_there(self, index):
        with pytest.raises(IndexError, match=f"index of a row must be from 0 to 2, got {index}"):
            self.model.row_marginal(index)

    def test_an_index_that_is_no_integer(self):
        with pytest.raises(TypeError, match="index of a column must be an integer, got float"):
            self.model.column_marginal(1.0)


class TestBatches:
    mu, upsilon = normal(2, 3), normal(4, 1, 5, seed=1)
    omega, psi = spd(3), spd(2, 5)

    @property
    def model(self):
        return KroneckerSumNormal(self.mu, self.upsilon, self.omega, self.psi)

    def one(self, a, b):
        return KroneckerSumNormal(self.mu[b], self.upsilon[a, 0], self.omega, self.psi[b])

    def test_each_element_is_a_distribution_of_its_own(self):
        x = normal(6, 4, 2, 3, 5)
        model = self.model
        assert model.batch_shape == (4, 2)
        assert model.sample((7,)).shape == (7, 4, 2, 3, 5)
        density, entropy, covariance = model.log_prob(x), model.entropy(), model.covariance()
        assert entropy.shape == (4, 2)
        tilde = model.tilde()
        for a in range(4):
            for b in range(2):
                one = self.one(a, b)
                close(density[:, a, b], one.log_prob(x[:, a, b]), rtol=1e-12, atol=1e-12)
                close(entropy[a, b], one.entropy(), rtol=1e-12, atol=1e-12)
                close(covariance[a, b], one.covariance(), rtol=1e-12, atol=1e-12)
                close(model.mean[a, b], one.mean)
                close(model.variance[a, b], one.variance)
                close(tilde.mean[a, b], one.tilde().mean)
                close(model.row_average().mean[a, b], one.row_average().mean)
                close(model.row_marginal(1).covariance_matrix[a, b], one.row_marginal(1).covariance_matrix)
                close(model.column_average().covariance_matrix[a, b], one.column_average().covariance_matrix)

    def test_gradients_reach_arguments_of_their_own_shape(self):
        leaves = [p.clone().requires_grad_() for p in (self.mu, self.upsilon, self.omega, self.psi)]
        model = KroneckerSumNormal(*leaves)
        (model.log_prob(model.rsample((3,))).sum() + model.entropy().sum()).backward()
        for leaf in leaves:
            assert leaf.grad.shape == leaf.shape
            assert leaf.grad.isfinite().all()

    def test_gradients_of_a_batch_are_the_sum_of_those_of_its_elements(self):
        x = normal(4, 2, 3, 5)
        leaves = [p.clone().requires_grad_() for p in (self.mu, self.upsilon, self.omega, self.psi)]
        batch = torch.autograd.grad(KroneckerSumNormal(*leaves).log_prob(x).sum(), leaves)
        mu, upsilon, omega, psi = leaves
        single = sum(
            dense(mu[b], upsilon[a, 0], omega, psi[b]).log_prob(x[a, b].flatten()) for a in range(4) for b in range(2)
        )
        for one, other in zip(batch, torch.autograd.grad(single, leaves), strict=True):
            close(one, other, rtol=1e-10, atol=1e-10)

    def test_expand(self):
        model = KroneckerSumNormal(normal(3), normal(5), spd(3), spd(5))
        wide = model.expand((4, 2))
        assert wide.batch_shape == (4, 2)
        assert wide.event_shape == (3, 5)
        assert wide.sample().shape == (4, 2, 3, 5)
        assert wide.row_covariance.shape == (4, 2, 3, 3)
        x = normal(4, 2, 3, 5)
        close(wide.log_prob(x), model.log_prob(x))
        close(wide.entropy(), model.entropy().expand(4, 2))
        # The samples of an expanded distribution are independent, not copies of one.
        assert wide.sample()[0, 0].ne(wide.sample()[0, 1]).all()

    def test_expand_keeps_validation(self):
        quiet = KroneckerSumNormal(normal(3), normal(5), spd(3), spd(5), validate_args=False).expand((2,))
        assert quiet.log_prob(torch.full((3, 5), torch.nan, dtype=torch.float64)).isnan().all()

    def test_independent_and_copies(self):
        model = self.model
        independent = torch.distributions.Independent(model, 2)
        x = model.sample()
        close(independent.log_prob(x), model.log_prob(x).sum())
        close(copy.deepcopy(model).log_prob(x), model.log_prob(x))
        assert repr(model).startswith("KroneckerSumNormal(row_mean: torch.Size([4, 2, 3])")
