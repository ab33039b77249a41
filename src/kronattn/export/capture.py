"""From a network to an ONNX file or an exported program, as bytes that have been checked."""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kronattn.export.check import LIMIT, Difference, largest_difference
from kronattn.export.rewrite import rewritten
from kronattn.export.runtime import require_onnx, run_onnx
from kronattn.models.files import DESCRIPTION_KEY, Description, load_model
from kronattn.models.registry import MODELS, create_model, task_of

__all__ = ["FORMATS", "SIZES", "Exported", "export_network", "find_network"]

FORMATS = ("onnx", "torch-export")
# Square, wide, and larger than what most networks were trained on.
SIZES = ((224, 224), (192, 256), (320, 320))
# What graphs are captured on: unlike numbers, or one dimension would be taken for another.
_EXAMPLE = (2, 224, 256)


@dataclass(frozen=True)
class Exported:
    """A file's content, and how far its outputs were from PyTorch's at each size that it was checked at."""

    content: bytes
    differences: list[Difference]

    @property
    def largest(self) -> Difference:
        return max(self.differences, key=lambda difference: difference.relative)


def find_network(source: str) -> tuple[nn.Module, Description, bool]:
    """A network with its weights from a file or by name; by name also without weights, where it has none.

    Returns:
        The network in evaluation mode, its description, and whether it is trained.

    Example:
        >>> find_network("kanet_zz")
        Traceback (most recent call last):
        ...
        FileNotFoundError: ...
    """
    try:
        model, description = load_model(source)
    except ValueError:
        if source not in MODELS:
            raise
        return create_model(source).eval(), Description(source, task=task_of(source)), False
    return model, description, True


def export_network(
    model: nn.Module,
    description: Description,
    *,
    format: str = "onnx",
    dynamic: bool = True,
    sizes: Sequence[tuple[int, int]] = SIZES,
) -> Exported:
    """Capture a network in another format and compare its outputs with PyTorch's.

    Args:
        model: (N, channels, height, width) to a tensor; evaluation mode is set.
        description: goes into the file as metadata and gives the fixed size.
        format: "onnx" or "torch-export".
        dynamic: any batch, height and width; otherwise one image of the description's size.
        sizes: height and width to check at, where they are dynamic.

    Returns:
        The file's content. Outputs that differ by more than 1e-4 of the largest are a ValueError.
    """
    if description.task != "classification":
        # What tasks import is not needed for the export of a classifier.
        from kronattn.tasks import find_task

        find_task(description.task).check_takes_images(description)
    if format not in FORMATS:
        raise ValueError(f"--format must be {' or '.join(FORMATS)}, not {format!r}")
    if format == "onnx":
        require_onnx()
    model = model.eval()
    channels = int(description.options.get("in_chans", 3))
    if not dynamic:
        sizes = [_own_size(description)]
    batch, height, width = _EXAMPLE if dynamic else (1, *_own_size(description))
    # What is compared in the end is the network itself.
    portable, example = rewritten(model), torch.zeros(batch, channels, height, width)
    if not dynamic:
        with torch.no_grad():
            portable(example)  # makes the matrices that a graph of one size has as constants
    program = _captured(portable, example, dynamic)
    content, run = (_onnx if format == "onnx" else _torch_export)(program, description, dynamic)
    # Two images where the batch is free: a batch of one can hide a wrong axis.
    batch = 2 if dynamic else 1
    differences = [
        largest_difference(model, run, torch.randn(batch, channels, *size, generator=torch.Generator().manual_seed(0)))
        for size in sizes
    ]
    exported = Exported(content, differences)
    if not exported.largest.small_enough:
        raise ValueError(
            f"not written: the exported network differs from PyTorch by {exported.largest}, more than {LIMIT:g} of that"
        )
    return exported


def _own_size(description: Description) -> tuple[int, int]:
    """Height and width of what the network was trained on."""
    height, width = description.shape[1:] or (description.size, description.size)
    return height, width


def _captured(model: nn.Module, images: Tensor, dynamic: bool) -> torch.export.ExportedProgram:
    any_size = torch.export.Dim.DYNAMIC
    shapes = ({0: any_size, 2: any_size, 3: any_size},) if dynamic else None
    try:
        with torch.no_grad(), _quietly():
            return torch.export.export(model, (images,), dynamic_shapes=shapes)
    except Exception as error:  # whatever the tracer trips over: its own exceptions have no common base
        sizes = " with dynamic sizes" if dynamic else ""
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ValueError(
            f"{type(model).__name__} cannot be exported{sizes} by torch {torch.__version__}: {reason}"
        ) from error


Run = Callable[[Tensor], Tensor]


def _onnx(program: torch.export.ExportedProgram, description: Description, dynamic: bool) -> tuple[bytes, Run]:
    # Imported here: tasks read images, and what is missing is to be named by those who ask for it.
    from kronattn.tasks import find_task

    output = find_task(description.task).output
    names: dict[str, Any] = {"input_names": ["image"], "output_names": [output]}
    with _quietly():
        onnx_program = torch.onnx.export(program, dynamo=True, verbose=False, **names)
    assert onnx_program is not None
    onnx_program.model.metadata_props[DESCRIPTION_KEY] = json.dumps(asdict(description))
    if dynamic:
        _name_axes(onnx_program.model)
    content = onnx_program.model_proto.SerializeToString()
    return content, run_onnx(content)


def _name_axes(model: Any) -> None:
    """Call the input's free sizes what they are; the tracer calls them s77 and the like."""
    (image,) = model.graph.inputs
    names = {str(image.shape[at].value): name for at, name in ((0, "batch"), (2, "height"), (3, "width"))}
    for value in (*model.graph.inputs, *model.graph.outputs):
        for at, size in enumerate(value.shape):
            name = names.get(str(getattr(size, "value", size)))
            if name is not None:
                value.shape[at] = name


def _torch_export(program: torch.export.ExportedProgram, description: Description, dynamic: bool) -> tuple[bytes, Run]:
    buffer = io.BytesIO()
    torch.export.save(program, buffer, extra_files={f"{DESCRIPTION_KEY}.json": json.dumps(asdict(description))})
    buffer.seek(0)
    loaded = torch.export.load(buffer).module()
    return buffer.getvalue(), lambda images: loaded(images)


@contextmanager
def _quietly() -> Iterator[None]:
    """Keep the exporter's advice to its developers off the user's screen."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
