"""Settings shared by tests and doctests."""

import os
import signal

import pytest
import torch
from hypothesis import HealthCheck, settings

# Examples of the guide import what may not be installed; tests/integrations and tests/test_docs.py run them.
collect_ignore = ["docs/examples"]

# The same few cases in every run: a red run is the change's doing. The soak looks for new ones, and for many.
_ALWAYS = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck), "print_blob": True}
settings.register_profile("ci", max_examples=40, derandomize=True, **_ALWAYS)
settings.register_profile("large", max_examples=3000, **_ALWAYS)
settings.load_profile("ci")

# Commands that tests start have a choice made for them: how busy the machine is should make no difference.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# What a shell starts in its background ignores Ctrl-C: tests that send it would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The torch backend is what most tests are about, whatever is installed; tests/native.py switches kronattn-cpu on.
os.environ["KRONATTN_NATIVE"] = "0"

if not torch.cuda.is_available():
    # Kernels run in Triton's interpreter, which has to be asked for before Triton is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    # Tests run in parallel processes on few cores; tensors here are small.
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _doctest_names(doctest_namespace):
    doctest_namespace["torch"] = torch
