"""Two processes with half the batch each: the statistics and gradients of one process with all of it."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

from kronattn.nn import DenseAttention, KroneckerAttention, synchronise_coefficient_norms

LAYERS = {
    "kv": lambda: KroneckerAttention(6, "kv", num_heads=2),
    "qkv_per_key": lambda: KroneckerAttention(6, "qkv", coefficient_norm="batch_per_key", grid=(4, 5)),
    "dense": lambda: DenseAttention(6, pool=2),
}


def build(name):
    torch.manual_seed(0)
    return LAYERS[name]().double()


def batch():
    # Samples that differ in scale, so that the two halves have different statistics.
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(6, 6, 4, 5, generator=generator, dtype=torch.float64)
    return x * torch.arange(1.0, 7.0, dtype=torch.float64).view(-1, 1, 1, 1) ** 0.5


def _work(rank, folder, name):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    torch.set_num_threads(1)
    layer = synchronise_coefficient_norms(build(name))
    model = DistributedDataParallel(layer)
    # Halves of different size: the members must be weighed, not only the means.
    half = batch()[:2] if rank == 0 else batch()[2:]
    output = model(half)
    # DDP averages over processes: make the average of the two losses the loss of the whole batch.
    (output.square().sum() * 2).backward()
    gradients = {key: parameter.grad for key, parameter in layer.named_parameters()}
    torch.save((output.detach(), layer.state_dict(), gradients), f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("name", LAYERS)
def test_two_processes_equal_one(name, tmp_path):
    layer = build(name)
    untouched = copy.deepcopy(layer)
    output = layer(batch())
    output.square().sum().backward()

    mp.spawn(_work, args=(str(tmp_path), name), nprocs=2)
    reports = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]

    torch.testing.assert_close(torch.cat([report[0] for report in reports]), output, rtol=1e-10, atol=1e-12)
    for _, state, gradients in reports:
        for key, value in layer.state_dict().items():
            torch.testing.assert_close(state[key], value, rtol=1e-10, atol=1e-12)
        for key, parameter in layer.named_parameters():
            torch.testing.assert_close(gradients[key], parameter.grad, rtol=1e-9, atol=1e-11)
    # Not a comparison of zeros: the halves alone would have given something else.
    alone = untouched(batch()[:2])
    assert not torch.allclose(alone, output[:2], rtol=1e-3)
