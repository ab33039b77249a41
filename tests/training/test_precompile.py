"""Kernels that are compiled ahead: where, and for which shapes."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from kronattn.models import create_model
from kronattn.training import precompile
from kronattn.training.precompile_worker import compile_share, marker, shapes_of_units
from kronattn.training.recipe import load_recipe


def test_nothing_is_started_on_a_cpu(monkeypatch):
    monkeypatch.setattr(precompile, "_start", lambda recipe, count: pytest.fail("started"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with precompile.precompiling(load_recipe("digits", ["accelerator=cpu"])):
        pass
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with precompile.precompiling(load_recipe("digits", ["accelerator=auto"])):
        pass


@pytest.mark.parametrize("module", ["precompile", "precompile_worker"])
def test_compiling_does_not_wait_for_imports(module):
    """Of what takes long to import and is not needed here."""
    code = f"import sys, kronattn.training.{module}; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"lightning", "torchmetrics", "torchvision", "timm", "matplotlib"} & set(modules)


def test_what_was_compiled_is_not_compiled_again(monkeypatch, tmp_path):
    started = []
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(precompile.subprocess, "Popen", lambda command, **_: started.append(command[-1]))
    recipe = load_recipe("imagenette/kanet_kv")
    precompile._start(recipe, 3)
    assert len(started) == 3
    marker(started[0]).touch()
    precompile._start(recipe, 3)
    assert len(started) == 5
    precompile._start(load_recipe("imagenette/kanet_kv", ["batch_size=64"]), 3)
    assert len(started) == 8


def test_networks_share_the_cores_that_training_leaves(monkeypatch):
    started = []
    monkeypatch.setattr(precompile, "_start", lambda recipe, count: started.append((recipe.model.name, count)) or [])
    monkeypatch.setattr(precompile, "_is_of_use", lambda recipe, count: count > 0)
    monkeypatch.setattr(precompile.os, "cpu_count", lambda: 16)
    both = [load_recipe(f"imagenette/{name}") for name in ("kanet_kv", "mobilenetv2")]
    with precompile.precompiling(both[0]):
        assert started == [("kanet_kv", 6)]
    started.clear()
    with precompile.precompiling(*both, jobs=7):
        assert started == [("kanet_kv", 4), ("mobilenetv2", 4)]
    started.clear()
    with precompile.precompiling(*both, jobs=14), precompile.precompiling(jobs=2):
        assert started == []


@pytest.mark.parametrize("name", ["kanet_kv", "mobilenetv2"])
def test_shapes_are_those_that_the_network_passes_on(name):
    network, found = create_model(name, num_classes=3).eval(), {}
    for unit in (expected := shapes_of_units(create_model(name, num_classes=3), 64)):
        module = network.get_submodule(unit)
        module.register_forward_pre_hook(lambda _, x, unit=unit: found.__setitem__(unit, tuple(x[0].shape)))
    with torch.no_grad():
        network(torch.zeros(1, 3, 64, 64))
    assert found == expected
    assert len(found) > 15


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_share_of_a_network():
    order = {"model": "kanet_kv", "options": {}, "sizes": [64, 96], "batch": 8, "precision": "bf16-mixed"}
    compile_share({**order, "share": [0, 5]})
