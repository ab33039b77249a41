"""Table 6 as the paper prints it, and what our own runs found."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PRINTED", "Accuracy", "read_results"]


@dataclass(frozen=True)
class Accuracy:
    """Pixel accuracy and mean IoU, both from 0 to 1, and how many runs they are the mean of."""

    pixel_accuracy: float
    mean_iou: float
    runs: int = 1


# Where `kronattn compare` on CamVid leaves its results.
USUAL = Path("results", "camvid.json")

# On the validation images of PASCAL VOC 2012.
PRINTED = {
    "deeplabv2_aspp": Accuracy(0.944, 0.751),
    "deeplabv2_attn": Accuracy(0.947, 0.763),
    "deeplabv2_kao_kv": Accuracy(0.946, 0.759),
    "deeplabv2_kao_qkv": Accuracy(0.946, 0.758),
}


def read_results(path: str | Path | None = None) -> dict[str, Accuracy]:
    """Read what training runs found: the mean over the runs of each network.

    By default from results/camvid.json, where that is there. The file is one JSON object whose ``runs`` hold ``model``,
    ``pixel_accuracy`` and ``mean_iou`` (from 0 to 1), one for each run.

    Example:
        >>> read_results("nowhere.json")
        Traceback (most recent call last):
        ...
        FileNotFoundError: there is no file nowhere.json
    """
    if path is None and not USUAL.is_file():
        return {}
    path = Path(path or USUAL)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        rows = json.loads(path.read_text())["runs"]
        runs: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            found = float(row["pixel_accuracy"]), float(row["mean_iou"])
            runs.setdefault(row["model"], []).append(found)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} does not hold the results of segmentation runs: {error!r}") from None
    return {
        model: Accuracy(statistics.mean(a for a, _ in found), statistics.mean(m for _, m in found), len(found))
        for model, found in runs.items()
    }
