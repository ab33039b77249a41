"""Post-training quantisation to 8 bits for the CPU, and what it does to the accuracy."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kronattn.data.images import is_image_name, read_image
from kronattn.data.prepare import prepare_image
from kronattn.export.capture import _quietly
from kronattn.export.runtime import require_onnx
from kronattn.models.files import Description

__all__ = ["labelled_images", "measure_accuracy", "quantise"]

# The convolutions and the classifier are where the arithmetic is; attention's few products and its softmax stay float.
_QUANTISED = ["Conv", "Gemm"]


def quantise(content: bytes, how: str, calibration: Iterable[Tensor] = ()) -> bytes:
    """An ONNX network with 8-bit weights.

    Args:
        content: the ONNX file's bytes.
        how: "static" (8-bit activations too, whose ranges come from ``calibration``) or "dynamic" (ranges found anew
            at every call).
        calibration: (N, C, height, width) batches of prepared images, all of one size.
    """
    if how not in ("static", "dynamic"):
        raise ValueError(f"--int8 must be static or dynamic, not {how!r}")
    require_onnx()
    from onnxruntime import quantization
    from onnxruntime.quantization.shape_inference import quant_pre_process

    with tempfile.TemporaryDirectory() as folder, _quietly():
        plain, ready, small = (Path(folder) / f"{name}.onnx" for name in ("plain", "ready", "small"))
        plain.write_bytes(_without_inner_shapes(content))
        if how == "dynamic":
            quantization.quantize_dynamic(plain, small, op_types_to_quantize=_QUANTISED, per_channel=True)
            return small.read_bytes()
        # Folds batch norms into convolutions, which the ranges depend on.
        quant_pre_process(plain, ready, skip_symbolic_shape=True)
        batches = iter(calibration)

        class Reader(quantization.CalibrationDataReader):
            """Calibration images one batch after another."""

            def get_next(self) -> dict[str, Any] | None:
                batch = next(batches, None)
                return None if batch is None else {"image": batch.numpy()}

        quantization.quantize_static(
            ready,
            small,
            Reader(),
            op_types_to_quantize=_QUANTISED,
            per_channel=True,
            weight_type=quantization.QuantType.QInt8,
            activation_type=quantization.QuantType.QUInt8,
        )
        return small.read_bytes()


def _without_inner_shapes(content: bytes) -> bytes:
    """The quantiser transposes matrices and then trips over the shapes that the exporter noted for them."""
    import onnx

    model = onnx.load_from_string(content)
    del model.graph.value_info[:]
    return model.SerializeToString()


def labelled_images(folder: Path, classes: Sequence[str]) -> list[tuple[Path, int]]:
    """Image files below FOLDER/CLASS/, each with the number of its class.

    Folders are matched with the classes by name or, where no name fits and there are as many, in alphabetical order.
    """
    if not folder.is_dir():
        raise NotADirectoryError(f"there is no folder {folder}")
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if set(names) <= set(classes) and names:
        number = {name: list(classes).index(name) for name in names}
    elif len(names) == len(classes):
        number = {name: index for index, name in enumerate(names)}
    else:
        raise ValueError(f"{folder} must hold a folder for each of the {len(classes)} classes, but holds {len(names)}")
    found = [
        (path, number[name])
        for name in names
        for path in sorted((folder / name).rglob("*"))
        if path.is_file() and is_image_name(path.name)
    ]
    if not found:
        raise ValueError(f"{folder} holds no images")
    return found


def prepared_batches(paths: Sequence[Path], description: Description, batch: int) -> Iterator[Tensor]:
    """(N, 3, size, size) batches of images as the network was evaluated with."""
    for start in range(0, len(paths), batch):
        yield torch.stack([prepare_image(read_image(path), description) for path in paths[start : start + batch]])


def measure_accuracy(
    run: Callable[[Tensor], Tensor],
    images: Sequence[tuple[Path, int]],
    description: Description,
    *,
    batch: int = 16,
    track: Callable[[Sequence[int]], Iterable[int]] = lambda items: items,
) -> float:
    """Top-1 accuracy, from 0 to 1, of a network on labelled image files."""
    right = 0
    for start in track(range(0, len(images), batch)):
        part = images[start : start + batch]
        (prepared,) = prepared_batches([path for path, _ in part], description, batch)
        with torch.no_grad():
            found = run(prepared).argmax(dim=1)
        right += int((found == torch.tensor([label for _, label in part])).sum())
    return right / len(images)
