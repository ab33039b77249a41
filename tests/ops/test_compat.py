"""Each private interface of PyTorch that we use still is what we take it for. A failure here names what to replace."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import kronattn
from kronattn.ops import compat

SOURCE = Path(kronattn.__file__).parent


def test_transforms_are_seen():
    seen = []

    def note(x):
        seen.append(compat.under_transform())
        return x.sum()

    note(torch.ones(2))
    torch.func.grad(note)(torch.ones(2))
    torch.func.vmap(note)(torch.ones(2, 2))
    assert seen == [False, True, True]


def test_watchers_are_seen():
    x = torch.ones(2)
    assert not compat.needs_dispatcher(x)
    assert not compat.needs_dispatcher(nn.Parameter(x))
    with FlopCounterMode(display=False):
        assert compat.needs_dispatcher(x)

    class Watched(torch.Tensor):
        pass

    assert compat.needs_dispatcher(x.as_subclass(Watched))


def test_modes_are_switched_off():
    with FakeTensorMode():
        with compat.without_modes():
            assert type(torch.ones(2)) is torch.Tensor
        assert type(torch.ones(2)) is not torch.Tensor


def test_the_compiler_s_mark():
    def ours():
        return 1

    def theirs():
        return 1

    assert vars(compat.assume_constant(ours)) == vars(torch.compiler.assume_constant_result(theirs))


def test_hooks_are_seen():
    def hook(*_):
        return None

    for register in (
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
    ):
        module = nn.Linear(2, 2)
        assert not compat.has_hooks(module)
        handle = getattr(module, register)(hook)
        assert compat.has_hooks(module), register
        handle.remove()
        assert not compat.has_hooks(module)


def test_batch_norms_are_seen():
    for norm in (nn.BatchNorm1d(2), nn.BatchNorm2d(2), nn.BatchNorm3d(2), nn.SyncBatchNorm(2)):
        assert compat.is_batch_norm(norm)
    assert not compat.is_batch_norm(nn.GroupNorm(1, 2))


def test_trees_are_walked():
    assert compat.tree_map(lambda x: x + 1, {"a": [1, (2,)]}) == {"a": [2, (3,)]}


def test_lists_of_tensors_are_changed_at_once():
    tensors, others = [torch.zeros(2), torch.ones(3)], [torch.ones(2), torch.zeros(3)]
    compat.lerp_all(tensors, others, 0.25)
    assert torch.equal(tensors[0], torch.full((2,), 0.25))
    assert torch.equal(tensors[1], torch.full((3,), 0.75))
    compat.lerp_all(tensors, others, torch.tensor(1.0))
    assert torch.equal(tensors[0], torch.ones(2))
    tensors[0].zero_()
    compat.copy_all(tensors, others)
    assert all(torch.equal(a, b) for a, b in zip(tensors, others, strict=True))


def test_nothing_private_elsewhere():
    """Of PyTorch and Triton: attributes of modules that start with an underscore, and modules' tables of hooks."""
    private = re.compile(
        r"\b(?:torch|triton|nn)(?:\.\w+)*\._[A-Za-z]|_(?:forward|backward)_(?:pre_)?hooks\b|import _[A-Za-z]"
    )
    found = [
        f"{path.relative_to(SOURCE)}: {line.strip()}"
        for path in sorted(SOURCE.rglob("*.py"))
        if path.name != "compat.py"
        for line in path.read_text().splitlines()
        if private.search(line) and "kronattn" not in line
    ]
    assert found == []
