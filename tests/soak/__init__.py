"""The soak: random cases by the thousand, for as long as you like. See ``python -m tests.soak --help``."""

import os

import torch

# Runs can be forked off as long as their parent has not asked the GPU for anything, its number included.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
if not torch.cuda.is_available():
    # Kernels run in Triton's interpreter, which has to be asked for before Triton is imported: in every process.
    os.environ.setdefault("TRITON_INTERPRET", "1")
