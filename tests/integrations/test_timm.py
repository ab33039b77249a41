"""Our networks and our layer through timm's own doors."""

import subprocess
import sys

import pytest
import torch

from kronattn.nn import KroneckerAttention

timm = pytest.importorskip("timm", reason="timm is not installed")


def test_an_explicit_call_registers_what_the_import_hook_does():
    code = (
        "import sys, timm.models\n"
        "from kronattn.integrations.timm import register\n"
        "names = register()\n"
        "print(all(timm.models.is_model(name) for name in names), len(names) == len(set(register())))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["True", "True"], done.stderr


def test_a_layer_by_its_class():
    model = timm.create_model("resnet10t", block_args={"attn_layer": KroneckerAttention}, num_classes=3)
    layers = [module for module in model.modules() if isinstance(module, KroneckerAttention)]
    assert len(layers) == 4
    model(torch.randn(2, 3, 64, 64)).sum().backward()
    assert all(parameter.grad is not None for layer in layers for parameter in layer.parameters())


def test_without_timm(monkeypatch):
    from kronattn.integrations.timm import register

    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs timm: pip install 'kronattn\[timm\]'"):
        register()
