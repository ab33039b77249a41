"""Training runs killed at random moments, in the middle of a checkpoint, or by a disk that is full; then resumed.

What a run leaves in the end has to be what it leaves when nothing happens to it, bit for bit. Runs are processes forked
off this one, which has imported everything and computes nothing itself: a start takes no time.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from lightning.pytorch.callbacks import Callback
from PIL import Image

from kronattn.training.recipe import load_recipe
from kronattn.training.run import train
from tests.data.segmentation_folders import write_folder
from tests.soak.part import Outcome

COMMON = ("precision=32-true", "deterministic=true")
# For each task, what its runs are after.
TASKS = {
    "classification": (
        "model={name: kanet_kv, options: {width: 0.25, drop_rate: 0.2}}",
        "data={name: folder, images: {resize: 40, size: 32, crop: random}}",
        "batch_size=8",
        "epochs=3",
    ),
    "segmentation": (
        "model.options={backbone: kanet_kv, backbone_options: {width: 0.25}}",
        "data.name=folder",
        "data.images.crop=33",
        "batch_size=2",
        "iterations=6",
    ),
}
# Beside the weights: the figures of each epoch.
COMPARED = ("weights-last.safetensors", "weights.safetensors", "history.csv")
PATIENCE = 600  # seconds that a run of seconds may take on a busy machine


class FillDisk(Callback):
    """From some epoch on no file can grow beyond a size: the write fails half-way, as on a full disk."""

    def __init__(self, epoch: int, size: int) -> None:
        self.epoch, self.size = epoch, size

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == self.epoch:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.size, resource.RLIM_INFINITY))
            # Processes that load data hand it on in shared memory, which counts as files but is on no disk.
            os.register_at_fork(after_in_child=_lift_limit)


@dataclass(frozen=True)
class Whole:
    """A run that nothing happened to."""

    folder: Path
    seconds: float


class Kills:
    """Classifiers and segmenters, with data in memory and from workers, with and without a moving average."""

    def __init__(self, folder: Path, device: str) -> None:
        self.folder = folder
        self.accelerator = "gpu" if device.startswith("cuda") else "cpu"
        self._whole: dict[tuple[str, ...], Whole] = {}
        self._data = {"classification": _images(folder / "images"), "segmentation": folder / "masks"}
        write_folder(folder / "masks", {"train": 6, "val": 2})
        (folder / "masks" / "classes.txt").write_text("a\nb\nc\n")

    def close(self) -> Mapping[str, Any]:
        return {}

    def run(self, number: int) -> Outcome:
        draw = Random(number)
        task = draw.choice(list(TASKS))
        memory, ema = draw.choice(["yes", "no"]), draw.choice(["null", "0.9"])
        optimiser = draw.choice(["sgd", "adamw"])
        settings = (
            *TASKS[task],
            *COMMON,
            f"accelerator={self.accelerator}",
            f"data.path={self._data[task]}",
            f"data.in_memory={memory}",
            f"data.workers={draw.choice([0, 1])}",
            f"ema={ema}",
            # Every second of three epochs: the last is validated when training is over.
            f"validate_every={draw.choice([1, 2])}",
            f"optimiser={{name: {optimiser}, lr: 0.002}}",
        )
        # On a GPU steps are CUDA graphs, or not.
        compiled = draw.choice(["auto", "false"]) if self.accelerator == "gpu" else "false"
        settings = (*settings, f"compile={compiled}")
        config = self._config(task)
        whole = self._undisturbed(config, settings)
        folder = self.folder / f"killed-{number}"
        outcome = Outcome()
        labels = {"task": task, "in_memory": memory, "ema": ema, "optimiser": optimiser, "compile": compiled}
        for _ in range(draw.choice([1, 1, 2, 3])):
            kind = draw.choice(["moment", "moment", "checkpoint", "full disk"])
            hit = self._disturb(kind, draw, config, settings, folder, whole)
            outcome.tried.append({"kill": kind if hit else "too late", **labels})
        code, said = _finished(_forked(config, settings, folder, self.folder / "log"), self.folder / "log")
        if code:
            outcome.wrong.append(f"the resumed run ended with {code}: {said}")
            return outcome
        outcome.wrong += _differences(whole.folder, folder, labels)
        shutil.rmtree(folder)
        return outcome

    def _config(self, task: str) -> str:
        if task == "segmentation":
            return "voc/deeplabv2_kao_kv"
        path = self.folder / "small.yaml"
        path.write_text("epochs: 3\n")
        return str(path)

    def _undisturbed(self, config: str, settings: tuple[str, ...]) -> Whole:
        if settings not in self._whole:
            folder, start = self.folder / f"whole-{len(self._whole)}", time.monotonic()
            # What a run of other settings left that failed.
            shutil.rmtree(folder, ignore_errors=True)
            code, said = _finished(_forked(config, settings, folder, self.folder / "log"), self.folder / "log")
            if code:
                raise RuntimeError(f"a run that nothing happened to ended with {code}: {said}")
            self._whole[settings] = Whole(folder, time.monotonic() - start)
        return self._whole[settings]

    def _disturb(
        self, kind: str, draw: Random, config: str, settings: tuple[str, ...], folder: Path, whole: Whole
    ) -> bool:
        """Whether the run was hit before it ended by itself."""
        log = self.folder / "log"
        if kind == "full disk":
            filling = FillDisk(draw.choice([0, 1, 2]), draw.choice([0, 1000, 100_000, 300_000]))
            code, _ = _finished(_forked(config, settings, folder, log, filling), log)
            return code != 0
        process = _forked(config, settings, folder, log)
        if kind == "moment":
            _wait(process, draw.uniform(0, whole.seconds), lambda: False)
        else:
            # Temporary files have dots before their names; one of the first few.
            skipped, seen = draw.choice([0, 0, 1, 2]), set[str]()

            def writing() -> bool:
                seen.update(path.name for path in folder.glob(".*.ckpt.*"))
                return len(seen) > skipped

            _wait(process, PATIENCE, writing)
            time.sleep(draw.uniform(0, 0.02))
        os.kill(process, signal.SIGKILL)
        _, status = os.waitpid(process, 0)
        return os.WIFSIGNALED(status)


def _forked(config: str, settings: tuple[str, ...], folder: Path, log: Path, *callbacks: Callback) -> int:
    sys.stdout.flush()
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        # Processes that load data are forked, whatever started this one.
        multiprocessing.set_start_method("fork", force=True)
        train(load_recipe(config, settings), folder=folder, resume=True, callbacks=callbacks)
        code = 0
    except BaseException:
        # The limit on files would hold for this one, too.
        _lift_limit()
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def _lift_limit() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def _wait(process: int, seconds: float, until: Callable[[], bool]) -> None:
    """Until that, or until the process has ended by itself, which is left to be waited for."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not until():
        if os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return
        time.sleep(0.001)


def _finished(process: int, log: Path) -> tuple[int, str]:
    """The exit code of a run, and the end of what it said."""
    _wait(process, PATIENCE, lambda: False)
    ended = os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    if not ended:
        os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    said = log.read_text(errors="replace")[-1500:] if log.exists() else ""
    return (os.waitstatus_to_exitcode(status), said) if ended else (124, f"it hangs: {said}")


def _differences(whole: Path, resumed: Path, labels: Mapping[str, Any]) -> list[str]:
    wrong = [
        f"{name} is not that of the run that nothing happened to{_lines(whole / name, resumed / name)}: {dict(labels)}"
        for name in COMPARED
        if (whole / name).read_bytes() != (resumed / name).read_bytes()
    ]
    left = [path.name for path in resumed.iterdir() if path.name.startswith(".")]
    return [*wrong, f"left behind: {', '.join(left)}"] if left else wrong


def _lines(whole: Path, resumed: Path) -> str:
    if whole.suffix != ".csv":
        return ""
    pairs = zip(whole.read_text().splitlines(), resumed.read_text().splitlines(), strict=False)
    return next((f" ({one!r} and {other!r})" for one, other in pairs if one != other), " (it has other lines)")


def _images(place: Path) -> Path:
    generator = np.random.default_rng(0)
    for split, count in (("train", 9), ("val", 3)):
        for name, channel in (("red", 0), ("blue", 2)):
            (place / split / name).mkdir(parents=True)
            for index in range(count):
                pixels = generator.integers(0, 120, (50 + index, 48, 3), dtype=np.uint8)
                pixels[..., channel] += 120
                Image.fromarray(pixels).save(place / split / name / f"{index}.png")
    return place


PART = Kills
