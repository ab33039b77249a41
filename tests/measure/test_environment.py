from __future__ import annotations

import json
import platform

import pytest
import torch

from kronattn.measure import describe_environment, resolve_device, resolve_dtype
from kronattn.ops import native
from tests.native import native_operators, needs_native


def test_describes_versions_and_hardware_only():
    found = describe_environment("cpu", torch.bfloat16)
    assert found["torch"] == torch.__version__
    assert found["python"] == platform.python_version()
    assert found["threads"] == torch.get_num_threads()
    assert found["dtype"] == "bfloat16"
    assert "/" not in json.dumps({name: value for name, value in found.items() if name != "device"})
    if platform.node():
        assert platform.node() not in found.values()


@needs_native
@pytest.mark.usefixtures(native_operators.__name__)
def test_says_that_compiled_operators_take_part():
    assert describe_environment()["kronattn-cpu"]
    native.switch(False)
    assert "kronattn-cpu" not in describe_environment()


@pytest.mark.parametrize("name", ["", "abc", "meta", "cpu:x"])
def test_unknown_devices(name):
    with pytest.raises(ValueError, match="device must be auto, cpu, cuda or mps"):
        resolve_device(name)


def test_absent_device():
    with pytest.raises(ValueError, match="'cuda:99' is not there"):
        resolve_device("cuda:99")


def test_dtypes():
    assert resolve_dtype("float16") is torch.float16
    with pytest.raises(ValueError, match="dtype must be one of float32"):
        resolve_dtype("int8")
