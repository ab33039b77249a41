"""Networks rewritten for other runtimes: the portable form of fused networks, in operators that converters know."""

from __future__ import annotations

import torch
from torch import nn

from kronattn.export.rewrite import rewritten
from kronattn.nn import AttnSkipModule
from tests.trained import network, settled


def test_convolutions_stay_convolutions():
    """Other runtimes fold activations and sums into them; the classifier alone is a matrix product."""
    traced = torch.jit.trace(rewritten(network("mobilenetv2")), torch.randn(1, 3, 64, 64), check_trace=False)
    kinds = [node.kind() for node in traced.inlined_graph.nodes()]
    assert kinds.count("aten::linear") == 1
    assert kinds.count("aten::_convolution") + kinds.count("aten::conv2d") == 52
    assert "aten::batch_norm" not in kinds


def test_modules_that_are_not_known_stay():
    block = settled(AttnSkipModule(3, 3, norm_layer=lambda channels: nn.GroupNorm(1, channels)), size=9)
    x = torch.randn(2, 3, 7, 10)
    with torch.no_grad():
        torch.testing.assert_close(rewritten(block)(x), block(x), rtol=1e-4, atol=1e-5)
