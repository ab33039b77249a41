"""Training from start to weights, as users run it: whole commands by the wall clock, part by part.

What was found is given back after every part, so that a run that is cut short leaves what it has.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kronattn.bench.training_step import time_stages
from kronattn.data.classification import load_split
from kronattn.training.recipe import load_recipe

__all__ = ["PARTS", "Wanted", "bench_training", "goals"]

NETWORKS = ("mobilenetv2", "kanet_kv", "kanet_qkv", "kanet_without_kao")
_EPOCH = re.compile(r"epoch (\d+) of \d+: .*?([\d,]+) images/s")


@dataclass(frozen=True)
class Wanted:
    """Where the data lie, and how long to train; ``settings`` are of every run, for a trial: accelerator=cpu."""

    imagenette: str = ""
    camvid: str = ""
    epochs: int = 60
    compare_epochs: int = 12
    jobs: int = 4
    settings: Sequence[str] = field(default_factory=list)


def bench_training(wanted: Wanted, parts: Sequence[str], *, until: float = 570) -> Iterator[dict[str, Any]]:
    """Run the parts one after another, and give back everything found so far after each.

    Args:
        wanted: data and lengths.
        parts: names in ``PARTS``.
        until: seconds after which no further part begins.
    """
    for name in parts:
        if name not in PARTS:
            raise ValueError(f"--parts must be of {', '.join(PARTS)}, not {name!r}")
        needs = "camvid" if name == "camvid" else "" if name == "steps" else "imagenette"
        if needs and not getattr(wanted, needs):
            raise ValueError(f"the part {name} needs --{needs}, the place of its images")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    start = time.monotonic()
    found: dict[str, Any] = {}
    for name in parts:
        spent = time.monotonic() - start
        if spent > until:
            found[name] = f"left out: {spent:.0f} s were spent"
        else:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    found[name] = PARTS[name](wanted, Path(folder))
                except (Exception, SystemExit) as error:  # the other parts are still of use
                    found[name] = {"failed": str(error)[-2000:]}
        yield found


def _kronattn(*arguments: str, stamps: list[tuple[float, str]] | None = None) -> float:
    """Run a command; its seconds. Lines of its standard error go into ``stamps``, each with its time."""
    start = time.monotonic()
    command = [sys.executable, "-m", "kronattn.cli", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    last = ""
    for line in process.stderr:
        last = line.strip() or last
        if stamps is not None:
            stamps.append((time.monotonic() - start, line.strip()))
        if not _EPOCH.match(line) or re.match(r"epoch \d*[05] ", line):
            print(line, end="", file=sys.stderr, flush=True)
    if process.wait():
        raise RuntimeError(last)
    return time.monotonic() - start


@contextmanager
def _busy() -> Iterator[list[float]]:
    """How busy nvidia-smi says that the GPU is, in percent, twice a second."""
    shares: list[float] = []
    if not shutil.which("nvidia-smi"):
        yield shares
        return
    query = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-lms", "500"]
    process = subprocess.Popen(query, stdout=subprocess.PIPE, text=True)
    lines = process.stdout
    assert lines is not None
    threading.Thread(target=lambda: shares.extend(float(line.split(",")[0]) for line in lines), daemon=True).start()
    try:
        yield shares
    finally:
        process.terminate()


def _mean(shares: Sequence[float]) -> float | None:
    return round(statistics.mean(shares), 1) if shares else None


def _run(wanted: Wanted, folder: Path, recipe: str, data: str, *settings: str) -> dict[str, Any]:
    """One run by itself: seconds from start to end, when each stage was reached, and its own figures."""
    stamps: list[tuple[float, str]] = []
    arguments = ["train", "--config", recipe, "--data", data, "--output", str(folder), *settings, *wanted.settings]
    with _busy() as shares:
        seconds = _kronattn(*arguments, stamps=stamps)
        weights = (folder / "weights.safetensors").stat().st_mtime - time.time() + seconds
    epochs = [(when, int(match[2].replace(",", ""))) for when, line in stamps if (match := _EPOCH.match(line))]
    result = json.loads((folder / "result.json").read_text())
    kept = ("images_per_second", "waiting_for_data", "training_share", "peak_bytes", "environment")
    score = "mean_iou" if "mean_iou" in result else "top1"
    return {
        "settings": [*settings, *wanted.settings],
        "seconds": round(seconds, 1),
        "seconds_to_weights": round(weights, 1),
        "seconds_to_first_epoch": round(epochs[0][0], 1) if epochs else None,
        "seconds_of_the_other_epochs": round(epochs[-1][0] - epochs[0][0], 1) if epochs else None,
        "images_per_second_of_epochs": [speed for _, speed in epochs],
        "gpu_busy_percent": _mean(shares),
        score: result[score],
        **{name: result[name] for name in kept},
        "notes": [line for _, line in stamps if line and not _EPOCH.match(line)],
    }


_SHORT = ("validate_every=4", "schedule.warmup=1")


def _whole(wanted: Wanted, folder: Path) -> dict[str, Any]:
    """kanet_kv on Imagenette, from the start of the command to its weights, on a machine that has compiled nothing."""
    return _run(wanted, folder / "run", "imagenette/kanet_kv", wanted.imagenette, f"epochs={wanted.epochs}", "seed=0")


def _comparison(wanted: Wanted, folder: Path, models: Sequence[str], seeds: str, jobs: int, *settings: str) -> Any:
    """Seconds of a whole comparison, and its runs."""
    arguments = ["compare", "--config", "imagenette/base", "--models", ",".join(models), "--seeds", seeds]
    arguments += ["--jobs", str(jobs), "--data", wanted.imagenette, "--folder", str(folder / "runs")]
    seconds = _kronattn(*arguments, "--output", str(folder / "compare.json"), *settings, *wanted.settings)
    return seconds, json.loads((folder / "compare.json").read_text())["runs"]


def _seeds(wanted: Wanted, folder: Path) -> dict[str, Any]:
    """Two more seeds side by side: accuracy is what counts here."""
    seconds, runs = _comparison(wanted, folder, ["kanet_kv"], "1,2", 2, f"epochs={wanted.epochs}")
    return {"seconds": round(seconds, 1), "top1": {str(one["seed"]): one["top1"] for one in runs}}


def _speeds(wanted: Wanted, folder: Path) -> dict[str, Any]:
    """Each network by itself, twice, one run after another in one process: what was imported and decoded serves all."""
    names = ("mobilenetv2", "kanet_kv", "kanet_qkv")
    _, runs = _comparison(wanted, folder, names, "0,1", 1, "epochs=4", *_SHORT)
    speeds = {name: [run["images_per_second"] for run in runs if run["model"] == name] for name in names}
    base, *others = (statistics.mean(speeds[name]) for name in names)
    return {
        "images_per_second": speeds,
        "waiting_for_data": max(run["waiting_for_data"] for run in runs),
        "over_mobilenetv2": {name: round(speed / base, 3) for name, speed in zip(names[1:], others, strict=True)},
    }


def _before(wanted: Wanted, folder: Path) -> dict[str, Any]:
    """The same network without graphs, each kernel launched by the host."""
    short = ("epochs=4", *_SHORT, "compile=false")
    return _run(wanted, folder / "run", "imagenette/kanet_kv", wanted.imagenette, *short)


def _compare(wanted: Wanted, folder: Path) -> dict[str, Any]:
    """Four networks with five seeds each, everything counted: imports, decoding, captures, validation, files."""
    epochs = wanted.compare_epochs
    short = ("schedule.warmup=2", "validate_every=4") if epochs < 60 else ()
    with _busy() as shares:
        seconds, runs = _comparison(wanted, folder, NETWORKS, "0-4", wanted.jobs, f"epochs={epochs}", *short)
    recipe = load_recipe("imagenette/base", wanted.settings)
    size = recipe.batch_size
    images = len(load_split(recipe.data.name, wanted.imagenette, "train")) // size * size
    return {
        "jobs": wanted.jobs,
        "epochs": epochs,
        "runs": len(runs),
        "seconds": round(seconds, 1),
        "images_per_second": round(len(runs) * epochs * images / seconds, 1),
        "gpu_busy_percent": _mean(shares),
        "gpu_busy_percents": shares,
        "top1": {f"{one['model']}, seed {one['seed']}": one["top1"] for one in runs},
    }


def _camvid(wanted: Wanted, folder: Path) -> dict[str, Any]:
    """A segmenter, 80 epochs; and a few epochs without graphs."""
    recipe = "camvid/deeplabv2_kao_kv"
    return {
        "auto": _run(wanted, folder / "auto", recipe, wanted.camvid),
        "false": _run(wanted, folder / "false", recipe, wanted.camvid, "compile=false", "epochs=4", *_SHORT),
    }


def _steps(wanted: Wanted, folder: Path) -> dict[str, Any]:
    """Where a step's time goes, for each network."""
    if not torch.cuda.is_available():
        raise RuntimeError("the part steps needs a CUDA device: it times CUDA graphs")
    return {name: time_stages(name, torch.device("cuda", 0)) for name in NETWORKS}


# In this order, the most telling first.
PARTS: dict[str, Callable[[Wanted, Path], Any]] = {
    "whole": _whole,
    "compare": _compare,
    "camvid": _camvid,
    "speeds": _speeds,
    "steps": _steps,
    "seeds": _seeds,
    "before": _before,
}


def goals(found: dict[str, Any]) -> list[tuple[str, str]]:
    """The figures that the goals are about, each with what it is.

    >>> dict(goals({"whole": {"images_per_second": 13_900}}))["kanet_kv, images/s (at least 12,000)"]
    '13900'
    """

    def of(*path: Any) -> Any:
        value: Any = found
        for key in path:
            try:
                value = value[key]
            except (KeyError, TypeError, IndexError):
                return "–"
        return value

    figures: dict[str, tuple[Any, ...]] = {
        "kanet_kv, start to weights, s (at most 90)": ("whole", "seconds_to_weights"),
        "kanet_kv, to the first epoch's end, s": ("whole", "seconds_to_first_epoch"),
        "kanet_kv, images/s (at least 12,000)": ("whole", "images_per_second"),
        "kanet_kv, waiting for data (under 0.05)": ("whole", "waiting_for_data"),
        "kanet_kv, training's share of the epochs": ("whole", "training_share"),
        "kanet_kv, top-1, seed 0": ("whole", "top1"),
        "kanet_kv, top-1, seeds 1 and 2": ("seeds", "top1"),
        "over mobilenetv2 (at least 0.97)": ("speeds", "over_mobilenetv2"),
        "mobilenetv2 alone, images/s": ("speeds", "images_per_second", "mobilenetv2"),
        "kanet_kv without graphs, images/s": ("before", "images_per_second"),
        "compare, images/s in all (at least 25,000)": ("compare", "images_per_second"),
        "compare, GPU busy, % (or at least 90)": ("compare", "gpu_busy_percent"),
        "CamVid, images/s (at least 3 times 275 to 334)": ("camvid", "auto", "images_per_second"),
        "CamVid without graphs, images/s": ("camvid", "false", "images_per_second"),
        "CamVid, 80 epochs, s": ("camvid", "auto", "seconds"),
        "CamVid, mean IoU": ("camvid", "auto", "mean_iou"),
        **{f"step of {name}, ms": ("steps", name) for name in NETWORKS},
    }
    return [(title, str(of(*path))) for title, path in figures.items()]
