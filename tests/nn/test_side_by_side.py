"""Branches of a module at the same time: only inside a CUDA graph, and with the same bits as one after the other."""

from __future__ import annotations

import pytest
import torch

from kronattn.nn import AttnSkipModule, KroneckerAttention
from kronattn.nn.side_by_side import _stream, side_by_side


def test_outside_of_a_graph_one_follows_the_other():
    calls = []
    x = torch.ones(1)
    found = side_by_side(lambda x: calls.append("first") or x + 1, lambda x: calls.append("second") or x + 2, x)
    assert calls == ["first", "second"]
    assert [y.item() for y in found] == [2, 3]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("mode", ["kv", "qkv"])
def test_a_captured_step_has_the_bits_of_an_eager_one(mode):
    torch.manual_seed(0)
    modules = [AttnSkipModule(64, 64, attn_layer=lambda c: KroneckerAttention(c, mode)) for _ in range(4)]
    network = torch.nn.Sequential(*modules).cuda().to(memory_format=torch.channels_last)
    places = torch.empty(32, 64, 10, 10, device="cuda").to(memory_format=torch.channels_last)
    batches = [torch.randn_like(places) for _ in range(3)]
    start = {name: tensor.clone() for name, tensor in network.state_dict().items()}

    def step():
        network.zero_grad(set_to_none=False)
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            y = network(places)
        y.float().square().mean().backward()
        return y

    def results(run):
        network.load_state_dict(start)
        found = []
        for batch in batches:
            places.copy_(batch)
            y = run()
            found += [y.detach().clone(), *(parameter.grad.clone() for parameter in network.parameters())]
        return found + [tensor.clone() for tensor in network.state_dict().values()]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    expected = results(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = step()
    assert _stream.cache_info().currsize

    def replay():
        graph.replay()
        return output

    for found, wanted in zip(results(replay), expected, strict=True):
        assert torch.equal(found, wanted)
