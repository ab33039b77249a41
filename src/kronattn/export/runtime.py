"""ONNX files in onnxruntime, as functions of tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kronattn.extras import require_library

__all__ = ["require_onnx", "run_onnx"]


def require_onnx() -> None:
    """Say what to install if one of the packages that ONNX export takes is missing."""
    for library in ("onnx", "onnxruntime", "onnxscript"):
        require_library(library, "ONNX")


def run_onnx(content: bytes | str) -> Callable[[Tensor], Tensor]:
    """An ONNX network, a file's bytes or its path, as a function of (N, C, height, width): on the CPU, with as many
    threads as PyTorch has."""
    require_onnx()
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name

    def run(images: Tensor) -> Tensor:
        (output,) = session.run(None, {name: images.numpy()})
        return torch.from_numpy(output)

    return run
