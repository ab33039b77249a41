"""The kernels around coefficients that are built, each against the same in plain PyTorch and float64."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from kronattn.ops import built
from kronattn.ops.gpu import aligned
from kronattn.ops.triton import launch, rules
from kronattn.ops.triton.built import weights_backward, weights_forward
from kronattn.ops.triton.rows import centre, padded_pixels, padded_rows, uncentre
from tests.ops.cases import TOLERANCE, lay_out, poison_empty, relative_error

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

if not ON_GPU and not rules.interpreted():
    pytest.skip("neither a GPU nor Triton's interpreter", allow_module_level=True)

# samples, tokens, channels: in one block or several, with and without room to spare
SHAPES = [(1, 2, 1), (3, 7, 5), (2, 8, 70), (2, 45, 16)]


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch):
    poison_empty(monkeypatch)


@pytest.fixture(params=[528, 3], ids=["many", "few"])
def programs(request, monkeypatch):
    """Programs that walk through a block each, and through several."""

    def forget():
        launch.forget()
        rules.built_plan.cache_clear()

    monkeypatch.setattr(rules, "_ENOUGH_PROGRAMS", request.param)
    forget()
    yield request.param
    forget()


def noise(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(DEVICE, dtype)


def centring(count):
    """:func:`centre` as a matrix."""
    matrix = torch.zeros(aligned(count + 1), count, dtype=torch.float64, device=DEVICE)
    matrix[:count] = torch.eye(count) - 1 / count
    matrix[count] = 1 / count
    return matrix


def restoring(count):
    """:func:`uncentre` as a matrix."""
    matrix = torch.zeros(count, aligned(count + 1), dtype=torch.float64, device=DEVICE)
    matrix[:, :count] = torch.eye(count)
    matrix[:, count] = 1
    return matrix


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
class TestRows:
    def test_centre(self, shape, dtype):
        x = noise(*shape) + 10
        found = centre(x, dtype)
        assert found.dtype == dtype
        assert relative_error(found, centring(shape[1]) @ x.double()) < TOLERANCE[dtype]
        # The mean is taken off before anything is rounded.
        assert relative_error(found[:, : shape[1]], (x.double() - x.double().mean(1, keepdim=True))) < TOLERANCE[dtype]

    def test_gradient_of_centre(self, shape, dtype):
        batch, count, channels = shape
        x = noise(batch, aligned(count + 1), channels, dtype=dtype)
        found = uncentre(x, count, True)
        assert found.dtype == torch.float32
        assert relative_error(found, centring(count).t() @ x.double()) < TOLERANCE[torch.float32]

    def test_uncentre(self, shape, dtype):
        batch, count, channels = shape
        x = noise(batch, aligned(count + 1), channels, dtype=dtype)
        found = uncentre(x, count)
        assert found.dtype == torch.float32
        assert relative_error(found, restoring(count) @ x.double()) < TOLERANCE[torch.float32]

    def test_gradient_of_uncentre(self, shape, dtype):
        x = noise(*shape)
        found = centre(x, dtype, True)
        assert relative_error(found, restoring(shape[1]).t() @ x.double()) < TOLERANCE[dtype]

    def test_padded_rows(self, shape, dtype):
        copies, count, channels = shape
        x = noise(count, channels, 1, 1)
        found = padded_rows(x, copies, 3, dtype)
        assert found.shape == (copies, 3 + aligned(count), channels)
        assert relative_error(found[:, 3 : 3 + count], x.flatten(1).expand(copies, -1, -1)) < TOLERANCE[dtype]
        assert found[:, 3 + count :].eq(0).all()

    @pytest.mark.parametrize("layout", ["contiguous", "channels_last", "sliced", "transposed"])
    def test_padded_pixels(self, shape, dtype, layout):
        batch, channels, width = shape
        x = lay_out(noise(batch, channels, 3, width, dtype=dtype), layout)
        room = aligned(channels)
        found = padded_pixels(x, room)
        assert found.shape == (batch, 3 * width, room)
        assert torch.equal(found[..., :channels], x.flatten(2).transpose(1, 2))
        assert found[..., channels:].eq(0).all()


def test_a_row_that_is_not_contiguous():
    x = noise(6, 5).t()
    assert torch.equal(padded_rows(x, 1, 0, torch.float32)[0, :5], x)


def test_padded_pixels_of_one_number():
    x = torch.ones((), device=DEVICE).expand(2, 5, 3, 4)
    assert torch.equal(padded_pixels(x, 8)[..., :5], torch.ones(2, 12, 5, device=DEVICE))


def make_matrix(dtype, count, classes, shared=0.0, batch=2, queries=300):
    """Coefficients as the product gives them: what sets keys apart adds up to zero at each query."""
    matrix = noise(batch, queries, aligned(count + 1) + aligned(classes))
    matrix[..., :count] -= matrix[..., :count].mean(dim=-1, keepdim=True)
    matrix[..., count] += shared
    matrix[..., count + 1 : aligned(count + 1)] = 0
    return matrix.to(dtype)


def statistics(dtype):
    numbers = [torch.full((1,), x, device=DEVICE, dtype=dtype) for x in (0.75, 3.0, 2.0)]
    return [*numbers, torch.tensor(4, device=DEVICE)]


def plain(matrix, count, classes, norm, bias, gain, of_the_batch):
    """Weights with a one after them, and scores."""
    apart, shared = matrix[..., :count], matrix[..., count : count + 1]
    scale, moments = 1.0, None
    if norm is not None:
        moments = built.built_moments(apart, shared)
        variance = moments.squares / moments.members if of_the_batch else norm[2].double()
        scale = gain * torch.rsqrt(variance + 1e-5)
    weights = torch.zeros_like(matrix[..., : aligned(count + 1)])
    weights = torch.cat([(apart * scale).softmax(dim=-1), torch.ones_like(shared), weights[..., count + 1 :]], dim=-1)
    scores = matrix[..., aligned(count + 1) :]
    if bias is not None:
        scores = scores[..., :classes] + bias.double()
    return weights, scores, moments


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("count", "classes", "norm"),
    [(24, 70, None), (23, 0, "running"), (24, 5, "running"), (23, 0, "batch"), (24, 5, "batch"), (40, 8, "batch")],
)
def test_weights(dtype, count, classes, norm, programs):
    matrix = make_matrix(dtype, count, classes)
    bias = noise(classes, seed=1) if classes == 5 else None
    given = [None] * 4 if norm is None else statistics(torch.float32 if count == 24 else dtype)
    before = [None if x is None else x.clone() for x in given]
    of_the_batch = norm == "batch"
    weights, found, scores = weights_forward(matrix, count, *given, 0.1, 1e-5, of_the_batch, bias, classes)
    exact = matrix.double().requires_grad_()
    gain = None if norm is None else given[0].double().requires_grad_()
    expected, expected_scores, moments = plain(
        exact, count, classes, None if norm is None else before, bias, gain, of_the_batch
    )
    assert weights.dtype == dtype
    assert relative_error(weights, expected) < TOLERANCE[dtype]
    if classes:
        assert relative_error(scores[..., :classes], expected_scores[..., :classes]) < TOLERANCE[dtype]
        assert scores[..., classes:].eq(0).all()
    else:
        assert scores is None
    if of_the_batch:
        variance = moments.squares / (moments.members - 1)
        for after, old, new in zip(given[1:3], before[1:3], (moments.mean, variance), strict=True):
            assert relative_error(after, old.double().lerp(new, 0.1)) < TOLERANCE[after.dtype]
        assert given[3].item() == 5
    elif norm is not None:
        assert all(torch.equal(after, old) for after, old in zip(given, before, strict=True))

    d_weights = noise(*weights.shape, dtype=dtype, seed=2)
    d_scores = noise(*matrix.shape[:2], aligned(classes), dtype=dtype, seed=3) if classes else None
    d_matrix, d_gain = weights_backward(matrix, weights, d_weights, d_scores, found, given[0], count, of_the_batch)
    outputs, received = [expected], [d_weights.double()]
    if classes:
        # Columns without a class receive whatever there is.
        outputs.append(exact[..., aligned(count + 1) :])
        received.append(d_scores.double())
    sources = [exact] if gain is None else [exact, gain]
    gradients = torch.autograd.grad(outputs, sources, received)
    assert relative_error(d_matrix, gradients[0]) < TOLERANCE[dtype]
    if gain is None:
        assert d_gain is None
    else:
        assert d_gain.dtype == given[0].dtype
        # One number, what is left of a sum of either sign over all queries, perhaps next to nothing.
        floor = (matrix.shape[0] * matrix.shape[1]) ** 0.5
        assert relative_error(d_gain, gradients[1], floor) < TOLERANCE[dtype]


def test_a_large_mean_takes_nothing_away(programs):
    matrix = make_matrix(torch.float32, 23, 0, shared=1e4)
    given = statistics(torch.float32)
    _, found, _ = weights_forward(matrix, 23, *given, 1.0, 0.0, True, None, 0)
    moments = built.built_moments(matrix.double()[..., :23], matrix.double()[..., 23:24])
    assert relative_error(given[1], moments.mean) < TOLERANCE[torch.float32]
    assert relative_error(given[2], moments.squares / (moments.members - 1)) < TOLERANCE[torch.float32]
    assert relative_error(found[1:2], torch.rsqrt(moments.squares / moments.members)) < TOLERANCE[torch.float32]
    assert relative_error(found[2:], moments.mean) < TOLERANCE[torch.float32]


def test_many_keys(programs):
    """So many that a program holds one query at a time."""
    count = rules.most_built_keys()
    matrix = make_matrix(torch.float32, count, 0, batch=1, queries=5)
    weights, _, _ = weights_forward(matrix, count, None, None, None, None, 0.0, 0.0, False, None, 0)
    assert relative_error(weights[..., :count], matrix[..., :count].double().softmax(dim=-1)) < TOLERANCE[torch.float32]


def test_the_same_bits_every_time(programs):
    matrix = make_matrix(torch.bfloat16, 24, 5)
    found = []
    for _ in range(2):
        given = statistics(torch.float32)
        weights, norm, scores = weights_forward(matrix, 24, *given, 0.1, 1e-5, True, None, 5)
        gradients = weights_backward(
            matrix, weights, noise(*weights.shape, dtype=matrix.dtype), scores, norm, given[0], 24, True
        )
        found.append([*given, weights, norm, scores, *gradients])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("rows", [1, 3, 64, 5000, 10**6])
@pytest.mark.parametrize("room", [8, 136, 4096])
def test_plans_cover_all_rows(rows, room):
    plan = rules.built_plan(rows, room)
    assert plan.block_keys >= room
    assert (plan.programs - 1) * plan.per_program < rows <= plan.programs * plan.per_program
    assert plan.per_program % plan.block_rows == 0
    assert plan.programs <= plan.block_parts
    assert plan.programs <= 528
