"""ONNX files in onnxruntime, as functions of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kronattn.extras import require_library

__all__ = ["open_session", "require_onnx", "run_onnx"]


def require_onnx() -> None:
    """Say what to install if one of the packages that ONNX export takes is missing."""
    for library in ("onnx", "onnxruntime", "onnxscript"):
        require_library(library, "ONNX")


def open_session(content: bytes | str) -> Any:
    """An onnxruntime session on the CPU, with as many threads as PyTorch has, from a file's bytes or its path."""
    require_onnx()
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def run_onnx(content: bytes | str) -> Callable[[Tensor], Tensor]:
    """An ONNX network as a function of (N, C, height, width)."""
    session = open_session(content)
    name = session.get_inputs()[0].name

    def run(images: Tensor) -> Tensor:
        (output,) = session.run(None, {name: images.numpy()})
        return torch.from_numpy(output)

    return run
