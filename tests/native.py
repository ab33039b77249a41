"""The operators of kronattn-cpu, switched on for a test; skipped where the package is not installed (make native)."""

import importlib.util

import pytest

from kronattn.ops import native

needs_native = pytest.mark.skipif(
    importlib.util.find_spec("kronattn_cpu") is None, reason="kronattn-cpu is not installed: make native"
)


@pytest.fixture
def native_operators():
    native.switch(True)
    assert native.missing_reason() is None
    yield
    native.switch(False)
