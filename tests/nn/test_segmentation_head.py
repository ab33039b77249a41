"""Heads for segmentation: against literal sums and the reference operators, at odd sizes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kronattn.nn import AtrousPyramidHead, DenseSegmentationHead, KroneckerSegmentationHead, resize_scores
from kronattn.nn.segmentation import classify_by_product
from kronattn.ops import reference

HEADS = {
    "aspp": AtrousPyramidHead,
    "attn": DenseSegmentationHead,
    "kao_kv": lambda *a, **k: KroneckerSegmentationHead(*a, mode="kv", **k),
    "kao_qkv": lambda *a, **k: KroneckerSegmentationHead(*a, mode="qkv", **k),
}
every_head = pytest.mark.parametrize("name", HEADS)


def built(name, in_channels=12, num_classes=5, **options):
    torch.manual_seed(0)
    head = HEADS[name](in_channels, num_classes, **options)
    for conv in head.classifiers():  # large enough for differences to show
        nn.init.normal_(conv.weight, std=0.5)
        if conv.bias is not None:
            nn.init.normal_(conv.bias)
    return head


@every_head
class TestEveryHead:
    @pytest.mark.parametrize("grid", [(1, 1), (7, 9), (9, 41)])
    def test_shapes(self, name, grid):
        head = built(name).eval()
        x = torch.randn(2, 12, *grid)
        assert head(x).shape == (2, 5, *grid)
        size = (grid[0] * 8 - 3, grid[1] * 8)
        torch.testing.assert_close(head(x, size=size), resize_scores(head(x), size))

    def test_gradients_reach_everything(self, name):
        head = built(name)
        x = torch.randn(2, 12, 7, 9, requires_grad=True)
        head(x).square().mean().backward()
        for key, parameter in head.named_parameters():
            assert parameter.grad is not None, key
            assert parameter.grad.abs().sum() > 0, key
        assert x.grad.abs().sum() > 0

    @pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
    def test_hooks_of_classifiers_are_called(self, name, memory_format):
        head = built(name).eval()
        x = torch.randn(2, 12, 7, 9).contiguous(memory_format=memory_format)
        expected, heard = head(x), []
        for conv in head.classifiers():
            conv.register_forward_hook(lambda module, *_: heard.append(module))
        torch.testing.assert_close(head(x), expected)
        assert sorted(map(id, heard)) == sorted(map(id, head.classifiers()))

    def test_new_classes(self, name):
        head = built(name)
        kept = {k: v.clone() for k, v in head.state_dict().items() if "attn" in k}
        head.reset_classifier(3)
        assert head(torch.randn(2, 12, 5, 6)).shape == (2, 3, 5, 6)
        assert head.num_classes == 3
        for key, tensor in kept.items():
            if "running" not in key and "tracked" not in key:
                assert torch.equal(head.state_dict()[key], tensor), key

    def test_export_with_dynamic_sizes(self, name):
        head = built(name).eval()
        sizes = dict.fromkeys((0, 2, 3), torch.export.Dim.DYNAMIC)
        program = torch.export.export(head, (torch.randn(2, 12, 9, 11),), dynamic_shapes=(sizes,))
        # With the last there are so few keys that the query's map would rather go into them, at the first not.
        for shape in [(3, 12, 7, 6), (2, 12, 30, 31), (1, 12, 2, 2)]:
            x = torch.randn(shape)
            torch.testing.assert_close(program.module()(x), head(x), rtol=1e-4, atol=1e-4)

    def test_channels_last_gives_the_same(self, name):
        head = built(name).eval()
        x = torch.randn(2, 12, 7, 9)
        torch.testing.assert_close(head(x.to(memory_format=torch.channels_last)), head(x), rtol=1e-4, atol=1e-4)

    def test_autocast_and_half_precision(self, name):
        head = built(name).eval()
        x = torch.randn(2, 12, 7, 9)
        expected = head(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            cast = head(x)
        halved = head.bfloat16()(x.bfloat16())
        for found in (cast, halved):
            assert found.dtype == torch.bfloat16
            # Eight bits of mantissa, through a few sums of some hundred products.
            torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.3)

    def test_one_node_of_a_graph(self, name):
        model = nn.Sequential(nn.Conv2d(3, 12, 1), built(name)).eval()
        traced = torch.fx.symbolic_trace(model)
        x = torch.randn(1, 3, 7, 9)
        torch.testing.assert_close(traced(x), model(x))

    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            ((0, 5), ValueError, "in_channels must be at least 1, not 0"),
            ((8, 0), ValueError, "num_classes must be at least 1, not 0"),
            ((8.0, 5), TypeError, "in_channels must be an int, not float"),
            ((8, True), TypeError, "num_classes must be an int, not bool"),
        ],
    )
    def test_bad_arguments(self, name, arguments, error, message):
        with pytest.raises(error, match=message):
            HEADS[name](*arguments)


def test_pyramid_is_a_sum_of_dilated_convolutions():
    head = built("aspp").double()
    x = torch.randn(2, 12, 31, 29, dtype=torch.float64)
    expected = torch.zeros(2, 5, 31, 29, dtype=torch.float64)
    for rate, branch in zip((6, 12, 18, 24), head.branches, strict=True):
        padded = F.pad(x, (rate,) * 4)
        expected += branch.bias[:, None, None]
        for i in range(3):
            for j in range(3):
                window = padded[:, :, i * rate : i * rate + 31, j * rate : j * rate + 29]
                expected += torch.einsum("kc,nchw->nkhw", branch.weight[:, :, i, j], window)
    torch.testing.assert_close(head(x), expected)


def test_pyramid_rates():
    assert [branch.dilation[0] for branch in AtrousPyramidHead(4, 2, rates=(1, 3)).branches] == [1, 3]
    for rates in ((), (0, 2)):
        with pytest.raises(ValueError, match="rates must be one or more numbers from 1 up"):
            AtrousPyramidHead(4, 2, rates=rates)


@pytest.mark.parametrize("name", ["attn", "kao_kv", "kao_qkv"])
@pytest.mark.parametrize("num_heads", [1, 2])
def test_against_the_reference_operators(name, num_heads):
    """Batch norm of the coefficients at its first statistics (mean 0, variance 1) is a scale of 1/√(1 + ε)."""
    head = built(name, width=6, num_heads=num_heads).double().eval()
    x = torch.randn(2, 12, 7, 9, dtype=torch.float64)
    q, k, v = (
        torch.einsum("pc,nchw->nphw", linear.weight, x)
        for linear in (head.attn.query_map, head.attn.key_map, head.attn.value_map)
    )
    scale = (1 + 1e-5) ** -0.5
    if name == "attn":
        context = reference.attention(q, k, v, num_heads=num_heads, scale=scale)
    else:
        context = reference.kronecker_attention(q, k, v, mode=name[4:], num_heads=num_heads, scale=scale, mean="once")
    # One classifier for both, side by side.
    weight = torch.cat([head.classifier.weight, head.context_classifier.weight], dim=1)
    expected = F.conv2d(torch.cat([x, context], dim=1), weight, head.classifier.bias)
    torch.testing.assert_close(head(x), expected)


def test_classifying_by_a_product():
    conv = nn.Conv2d(12, 5, 1).to(memory_format=torch.channels_last)
    x = torch.randn(2, 12, 7, 9).to(memory_format=torch.channels_last)
    y = classify_by_product(conv, x)
    torch.testing.assert_close(y, conv(x))
    assert y.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@every_head
def test_on_a_gpu(name):
    """Classifiers may be products there: as on the CPU, forward and backward, in both layouts."""
    head, x = built(name).double(), torch.randn(2, 12, 7, 9)
    exact = head(x.double())
    exact_gradients = torch.autograd.grad(exact.square().sum(), list(head.parameters()))
    for layout in (torch.channels_last, torch.contiguous_format):
        ours = built(name).cuda().to(memory_format=layout)
        with torch.backends.cudnn.flags(allow_tf32=False):
            y = ours(x.cuda().to(memory_format=layout))
            gradients = torch.autograd.grad(y.square().sum(), list(ours.parameters()))
        torch.testing.assert_close(y.cpu().double(), exact, rtol=1e-4, atol=1e-4)
        for found, gradient in zip(gradients, exact_gradients, strict=True):
            torch.testing.assert_close(
                found.cpu().double(), gradient, rtol=1e-3, atol=1e-3 * gradient.abs().max().item()
            )


def test_width():
    assert KroneckerSegmentationHead(64, 5).width == 16
    assert KroneckerSegmentationHead(3, 5).width == 1
    head = KroneckerSegmentationHead(64, 5, width=10, num_heads=2)
    assert head.attn.value_map.weight.shape == head.attn.key_map.weight.shape == (10, 64)
    for width in (0, 2.5, True):
        with pytest.raises(ValueError, match="width must be an int from 1 up"):
            KroneckerSegmentationHead(64, 5, width=width)


def test_features_are_not_copied():
    from kronattn.measure import peak_memory

    x = torch.randn(1, 256, 33, 33)
    head = KroneckerSegmentationHead(256, 4, mode="qkv", width=8).eval()
    assert peak_memory(lambda: head(x)) < 0.2 * x.nbytes


@pytest.mark.parametrize("head", [AtrousPyramidHead, KroneckerSegmentationHead])
@pytest.mark.parametrize(("classes", "error"), [(0, ValueError), (-2, ValueError), ("a", TypeError)])
def test_bad_numbers_of_classes_leave_the_head_as_it_was(head, classes, error):
    head = head(8, 5)
    with pytest.raises(error, match="num_classes must be"):
        head.reset_classifier(classes)
    assert head(torch.randn(1, 8, 5, 6)).shape == (1, 5, 5, 6)
    assert head.num_classes == 5


def test_unknown_mode():
    with pytest.raises(ValueError, match="mode"):
        KroneckerSegmentationHead(8, 5, mode="aspp")


def test_compiles_in_one_graph():
    head = built("kao_kv").eval()
    x = torch.randn(1, 12, 7, 9)
    compiled = torch.compile(head, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x, size=(50, 70)), head(x, size=(50, 70)), rtol=1e-4, atol=1e-4)


class TestResize:
    @pytest.mark.parametrize("stride", [8, 16])
    @pytest.mark.parametrize("size", [(1, 1), (33, 49), (32, 40), (30, 57)])
    def test_positions_lie_on_their_pixels(self, stride, size):
        grid = tuple(-(-n // stride) for n in size)
        scores = torch.randn(2, 3, *grid)
        resized = resize_scores(scores, size, stride=stride)
        assert resized.shape == (2, 3, *size)
        torch.testing.assert_close(resized[..., ::stride, ::stride], scores)

    def test_a_linear_map_stays_linear_until_the_last_position(self):
        rows, columns = torch.meshgrid(torch.arange(5.0), torch.arange(6.0), indexing="ij")
        resized = resize_scores((8 * rows + 80 * columns)[None, None], (35, 44), stride=8)[0, 0]
        y, x = torch.arange(35.0).clamp(max=32), torch.arange(44.0).clamp(max=40)
        torch.testing.assert_close(resized, y[:, None] + 10 * x[None])

    def test_both_ways_agree(self):
        scores = torch.randn(1, 3, 5, 6)
        captured = torch.compile(resize_scores, fullgraph=True, backend="eager")
        torch.testing.assert_close(captured(scores, (33, 41), stride=8), resize_scores(scores, (33, 41), stride=8))

    @pytest.mark.parametrize("grid", [(7, 10), (18, 24), (5, 6)])
    def test_a_map_that_does_not_fit_its_stride(self, grid):
        own = "×".join(map(str, grid))
        message = f"^scores must be a map of 9×12 for an image of 65×90 at stride 8, not of {own}$"
        with pytest.raises(ValueError, match=message):
            resize_scores(torch.randn(1, 3, *grid), (65, 90), stride=8)

    @pytest.mark.parametrize(("stride", "error"), [(0, ValueError), ("8", TypeError)])
    def test_a_bad_stride(self, stride, error):
        with pytest.raises(error, match="stride must be"):
            resize_scores(torch.randn(1, 3, 5, 6), (33, 41), stride=stride)

    def test_without_a_stride_it_is_pytorch_s(self):
        scores = torch.randn(1, 3, 5, 6)
        torch.testing.assert_close(
            resize_scores(scores, (33, 41)), F.interpolate(scores, (33, 41), mode="bilinear", align_corners=False)
        )
