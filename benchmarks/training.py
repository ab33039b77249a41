"""Training on a GPU from start to weights: python benchmarks/training.py results/training-h200.json --imagenette TARS.

Each part runs `kronattn train` or `kronattn compare` as users do, and takes the wall clock of the whole command.
`steps` tells where the time of a step goes. The file is written after every part: a run that is cut short leaves what
it has.
"""

from __future__ import annotations

import argparse
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

EPOCH = re.compile(r"epoch (\d+) of \d+: .*?([\d,]+) images/s")
NETWORKS = ("mobilenetv2", "kanet_kv", "kanet_qkv", "kanet_without_kao")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--imagenette", help="where Imagenette lies: a pattern of .tar files")
    parser.add_argument("--camvid", help="where CamVid lies")
    parser.add_argument("--parts", default=",".join(list(PARTS)[:-1]), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--until", type=float, default=570, help="seconds after which no further part begins")
    parser.add_argument("--epochs", type=int, default=60, help="of Imagenette's runs")
    parser.add_argument("--compare-epochs", type=int, default=12)
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--settings", nargs="*", default=[], help="of every run, for a trial: accelerator=cpu ...")
    given = parser.parse_args()
    start = time.monotonic()
    found: dict[str, Any] = {"command": " ".join(["python", *sys.argv])}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        for name in given.parts.split(","):
            spent = time.monotonic() - start
            if spent > given.until:
                found[name] = f"left out: {spent:.0f} s were spent"
            else:
                print(f"--- {name}, after {spent:.0f} s", flush=True)
                try:
                    found[name] = PARTS[name](given, place / name)
                except (Exception, SystemExit) as error:
                    found[name] = {"failed": str(error)[-2000:]}
                shutil.rmtree(place / name, ignore_errors=True)
            print(json.dumps(found[name], indent=1)[:3000], flush=True)
            given.output.parent.mkdir(parents=True, exist_ok=True)
            given.output.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found), flush=True)


def kronattn(*arguments: str, stamps: list[tuple[float, str]] | None = None) -> float:
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
        if not EPOCH.match(line) or re.match(r"epoch \d*[05] ", line):
            print(line, end="", flush=True)
    if process.wait():
        raise RuntimeError(last)
    return time.monotonic() - start


class Busy:
    """How busy nvidia-smi says that the GPU is, twice a second."""

    def __enter__(self) -> Busy:
        self.shares: list[float] = []
        self._process = None
        if shutil.which("nvidia-smi"):
            query = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-lms", "500"]
            self._process = subprocess.Popen(query, stdout=subprocess.PIPE, text=True)
            threading.Thread(target=self._read, daemon=True).start()
        return self

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.shares.append(float(line.split(",")[0]))

    def __exit__(self, *error: object) -> None:
        if self._process is not None:
            self._process.terminate()

    def mean(self) -> float | None:
        return round(statistics.mean(self.shares), 1) if self.shares else None


def run(given: argparse.Namespace, folder: Path, recipe: str, data: str, *settings: str) -> dict[str, Any]:
    """One run by itself: seconds from start to end, when each stage was reached, and its own figures."""
    stamps: list[tuple[float, str]] = []
    with Busy() as busy:
        arguments = ["train", "--config", recipe, "--data", data, "--output", str(folder), *settings, *given.settings]
        seconds = kronattn(*arguments, stamps=stamps)
        weights = (folder / "weights.safetensors").stat().st_mtime - time.time() + seconds
    epochs = [(when, int(match[2].replace(",", ""))) for when, line in stamps if (match := EPOCH.match(line))]
    result = json.loads((folder / "result.json").read_text())
    kept = ("images_per_second", "waiting_for_data", "training_share", "peak_bytes", "environment")
    score = "mean_iou" if "mean_iou" in result else "top1"
    return {
        "settings": [*settings, *given.settings],
        "seconds": round(seconds, 1),
        "seconds_to_weights": round(weights, 1),
        "seconds_to_first_epoch": round(epochs[0][0], 1) if epochs else None,
        "seconds_of_the_other_epochs": round(epochs[-1][0] - epochs[0][0], 1) if epochs else None,
        "images_per_second_of_epochs": [speed for _, speed in epochs],
        "gpu_busy_percent": busy.mean(),
        score: result[score],
        **{name: result[name] for name in kept},
        "notes": [line for _, line in stamps if line and not EPOCH.match(line)],
    }


def whole(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """kanet_kv on Imagenette, from the start of the command to its weights, on a machine that has compiled nothing."""
    return run(given, folder / "run", "imagenette/kanet_kv", given.imagenette, f"epochs={given.epochs}", "seed=0")


def seeds(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Two more seeds side by side: accuracy is what counts here."""
    arguments = ["compare", "--config", "imagenette/base", "--models", "kanet_kv", "--seeds", "1,2", "--jobs", "2"]
    arguments += ["--data", given.imagenette, "--folder", str(folder / "runs"), "--output", str(folder / "seeds.json")]
    seconds = kronattn(*arguments, f"epochs={given.epochs}", *given.settings)
    runs = json.loads((folder / "seeds.json").read_text())["runs"]
    return {"seconds": round(seconds, 1), "top1": {str(one["seed"]): one["top1"] for one in runs}}


def speeds(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Each network by itself, six epochs; mobilenetv2 twice, first and last, to see what the machine does."""
    names = ("mobilenetv2", "kanet_kv", "kanet_qkv", "mobilenetv2")
    short = ("epochs=6", "validate_every=6", "schedule.warmup=1")
    runs = [
        run(given, folder / f"{at}", "imagenette/base", given.imagenette, f"model.name={name}", *short)
        for at, name in enumerate(names)
    ]
    found: dict[str, Any] = {}
    for name, one in zip(names, runs, strict=True):
        found.setdefault(name, []).append(one)
    base = statistics.mean(one["images_per_second"] for one in found["mobilenetv2"])
    found["over_mobilenetv2"] = {name: round(found[name][0]["images_per_second"] / base, 3) for name in names[1:3]}
    return found


def before(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The same network without graphs, each kernel asked for by the host."""
    short = ("epochs=4", "validate_every=4", "schedule.warmup=1", "compile=false")
    return run(given, folder / "run", "imagenette/kanet_kv", given.imagenette, *short)


def compare(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Four networks with five seeds each, everything counted: imports, decoding, captures, validation, files."""
    arguments = ["compare", "--config", "imagenette/base", "--models", ",".join(NETWORKS), "--seeds", "0-4"]
    arguments += ["--jobs", str(given.jobs), "--data", given.imagenette]
    arguments += ["--folder", str(folder / "runs"), "--output", str(folder / "compare.json")]
    short = ("schedule.warmup=2", "validate_every=4") if given.compare_epochs < 60 else ()
    with Busy() as busy:
        seconds = kronattn(*arguments, f"epochs={given.compare_epochs}", *short, *given.settings)
    runs = json.loads((folder / "compare.json").read_text())["runs"]
    images = len(runs) * given.compare_epochs * images_per_epoch(given)
    return {
        "jobs": given.jobs,
        "epochs": given.compare_epochs,
        "runs": len(runs),
        "seconds": round(seconds, 1),
        "images_per_second": round(images / seconds, 1),
        "gpu_busy_percent": busy.mean(),
        "gpu_busy_percents": busy.shares,
        "top1": {f"{one['model']}, seed {one['seed']}": one["top1"] for one in runs},
    }


def compare_mps(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The same under NVIDIA's multi-process service, by which kernels of several processes share the GPU's units."""
    folder.mkdir(parents=True)
    os.environ["CUDA_MPS_PIPE_DIRECTORY"] = os.environ["CUDA_MPS_LOG_DIRECTORY"] = str(folder)
    subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True)
    try:
        return compare(given, folder)
    finally:
        subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", text=True, check=False)
        del os.environ["CUDA_MPS_PIPE_DIRECTORY"], os.environ["CUDA_MPS_LOG_DIRECTORY"]


def images_per_epoch(given: argparse.Namespace) -> int:
    """Those of whole batches."""
    from kronattn.data.classification import load_split
    from kronattn.training.recipe import load_recipe

    recipe = load_recipe("imagenette/base", given.settings)
    size = recipe.batch_size
    return len(load_split(recipe.data.name, given.imagenette, "train")) // size * size


def camvid(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """A segmenter, 80 epochs; and a few epochs without graphs."""
    short = ("epochs=4", "validate_every=4", "schedule.warmup=1")
    recipe = "camvid/deeplabv2_kao_kv"
    return {
        "auto": run(given, folder / "auto", recipe, given.camvid),
        "false": run(given, folder / "false", recipe, given.camvid, "compile=false", *short),
    }


def steps(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Where a step's time goes, for each network."""
    script = Path(__file__).with_name("training_step.py")
    done = subprocess.run([sys.executable, str(script), *NETWORKS], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def table(found: dict[str, Any]) -> str:
    """The figures that the goals are about, a line each."""

    def of(*path: Any) -> Any:
        value: Any = found
        for key in path:
            try:
                value = value[key]
            except (KeyError, TypeError, IndexError):
                return "–"
        return value

    rows = [
        ("kanet_kv, start to weights, s (at most 90)", of("whole", "seconds_to_weights")),
        ("  to the first epoch's end, s", of("whole", "seconds_to_first_epoch")),
        ("  images/s (at least 12,000)", of("whole", "images_per_second")),
        ("  waiting for data (under 0.05)", of("whole", "waiting_for_data")),
        ("  training's share of the epochs", of("whole", "training_share")),
        ("  top-1, seeds 0, 1, 2", (of("whole", "top1"), of("seeds", "top1"))),
        ("over mobilenetv2 (at least 0.97)", of("speeds", "over_mobilenetv2")),
        ("mobilenetv2 alone, images/s", of("speeds", "mobilenetv2", 0, "images_per_second")),
        ("without graphs, images/s", of("before", "images_per_second")),
        ("compare, images/s in all (at least 25,000)", of("compare", "images_per_second")),
        ("  GPU busy, % (or at least 90)", of("compare", "gpu_busy_percent")),
        ("CamVid, images/s (at least 3 times 275 to 334)", of("camvid", "auto", "images_per_second")),
        ("  without graphs", of("camvid", "false", "images_per_second")),
        ("  80 epochs, s; mean IoU", (of("camvid", "auto", "seconds"), of("camvid", "auto", "mean_iou"))),
        *[(f"step of {name}, ms", of("steps", name)) for name in NETWORKS],
    ]
    return "\n".join(f"{name:<52} {value}" for name, value in rows)


# In this order, the most telling first.
PARTS: dict[str, Callable[[argparse.Namespace, Path], Any]] = {
    "whole": whole,
    "compare": compare,
    "camvid": camvid,
    "speeds": speeds,
    "steps": steps,
    "seeds": seeds,
    "before": before,
    "compare_mps": compare_mps,
}

if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
