"""The soak: random cases by the thousand, for as long as you like. See ``python -m tests.soak --help``."""

import os

import torch

if not torch.cuda.is_available():
    # Kernels run in Triton's interpreter, which has to be asked for before Triton is imported: in every process.
    os.environ.setdefault("TRITON_INTERPRET", "1")
