"""How good a trained network is on labelled images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L

from kronattn.data.transforms import ImageSettings
from kronattn.measure import describe_environment
from kronattn.models.files import load_model
from kronattn.training.classifier import Examination
from kronattn.training.data import ImageData, Track
from kronattn.training.recipe import DataSettings
from kronattn.training.run import quiet

__all__ = ["evaluate"]


def evaluate(
    source: str | Path,
    path: str | None,
    *,
    data: str | None = None,
    batch_size: int = 256,
    accelerator: str = "auto",
    precision: str = "32-true",
    workers: int = 8,
    skip_bad_images: bool = False,
    track: Track = lambda items, description: items,
) -> dict[str, Any]:
    """Examine a network on the validation images of a dataset.

    Args:
        source: a ``.safetensors`` or ``.ckpt`` file, or the name of a network that comes with weights.
        path: where the images lie.
        data: which kind of dataset; the one that the network was trained on by default.

    Returns:
        ``top1``, ``top5``, ``calibration_error`` (expected, 15 bins), ``classes`` (each with its accuracy and count),
        ``confusion`` (rows: true).
    """
    network, description = load_model(source)
    if description.task != "classification":
        raise ValueError(f"{source} is made for {description.task}, not for classification")
    images = ImageSettings(
        resize=description.resize,
        size=description.size,
        mean=tuple(description.mean),  # type: ignore[arg-type]
        std=tuple(description.std),  # type: ignore[arg-type]
    )
    settings = DataSettings(
        name=data or description.data, path=path, images=images, workers=workers, skip_bad_images=skip_bad_images
    )
    module = ImageData(settings, batch_size, classes=description.classes, track=track)
    module.split("val")
    quiet()
    trainer = L.Trainer(
        accelerator=accelerator,
        devices=1,
        precision=precision,  # type: ignore[arg-type]
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    examination = Examination(network, len(description.classes))
    trainer.test(examination, module, verbose=False)
    found = examination.results()
    confusion = found["confusion"].tolist()
    bad = module.bad_images()
    return {
        "model": description.model,
        "data": settings.name,
        "images": sum(map(sum, confusion)),
        "top1": float(found["top1"]),
        "top5": float(found["top5"]),
        "calibration_error": float(found["calibration_error"]),
        "classes": [
            {"name": name, "images": sum(row), "top1": row[index] / sum(row) if sum(row) else None}
            for index, (name, row) in enumerate(zip(description.classes, confusion, strict=True))
        ],
        "confusion": confusion,
        **({"skipped_images": len(bad), "skipped": bad[:20]} if bad else {}),
        "environment": describe_environment(trainer.strategy.root_device),
    }
