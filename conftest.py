"""Settings shared by tests and doctests."""

import os

import pytest
import torch
from hypothesis import settings

# Examples of the guide import what may not be installed; tests/integrations and tests/test_docs.py run them.
collect_ignore = ["docs/examples"]

# pytest --hypothesis-profile=large: as many random cases as anyone has the patience for.
settings.register_profile("large", max_examples=500)

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
