"""Bad files through every command that reads any: one line and exit code 2, or an answer; nothing else.

Each case is a process forked off this one, with a folder of its own to work in, a limit on its memory and on its time.
It may write where it was told to, and nowhere else.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sys
import tarfile
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import torch
import yaml
from PIL import Image

from kronattn.cli import main
from kronattn.models.files import Description, save_model
from kronattn.models.registry import create_model
from tests.data.segmentation_folders import labels, picture
from tests.soak import mutations
from tests.soak.part import Outcome
from tests.trained import CLASSES

# Seconds for what takes a second, on a machine that may be busy; bytes beside what this process has.
PATIENCE = 120
MEMORY = 6 << 30
_RAISED, _STOPPED = 70, "the soak stops training here"
_OPTIONS = {"num_classes": len(CLASSES), "width": 0.25}


class Files:
    """Images, masks, archives, checkpoints, safetensors, recipes, lists of classes, and files of other kinds."""

    def __init__(self, folder: Path, device: str) -> None:
        self.folder = folder
        self.good = folder / "good"
        self.good.mkdir()
        self._write_good()
        _prepare_this_process()

    def close(self) -> Mapping[str, Any]:
        return {}

    def run(self, number: int) -> Outcome:
        draw = Random(number)
        kind = draw.choice(list(COMMANDS))
        command = draw.choice(COMMANDS[kind])
        place = self.folder / "case"
        shutil.copytree(self.good, place / "in")
        (place / "out").mkdir()
        target = place / "in" / TARGETS[kind]
        how, content = self._changed(kind, target.read_bytes(), draw)
        target.write_bytes(content)
        arguments = [argument.format(target=f"in/{TARGETS[kind]}") for argument in command]
        before = _listing(place)
        code, said, seconds = _run(place, arguments)
        tried = {"kind": kind, "change": how, "command": arguments[0], "answer": _named(code)}
        wrong = _judged(code, said, place, before)
        shutil.rmtree(place)
        for path in (Path("/tmp/kronattn-outside"), self.folder / "outside", self.folder.parent / "outside"):
            if path.exists():
                wrong.append(f"{path.name} was written outside of the folders that were named")
        shown = " ".join(arguments)
        return Outcome([tried], [f"{one} ({kind}, {how}, kronattn {shown}, {seconds:.1f} s)" for one in wrong])

    def _changed(self, kind: str, data: bytes, draw: Random) -> tuple[str, bytes]:
        if kind == "recipe" and draw.random() < 0.75:
            return mutations.recipe(yaml.safe_load(data), draw)
        structure = {"labelled image": "image", "segmenter": "safetensors"}.get(kind, kind)
        if structure in mutations.STRUCTURES and draw.random() < 0.5:
            return mutations.STRUCTURES[structure](data, draw)
        return mutations.by_bytes(data, draw)

    def _write_good(self) -> None:
        """One whole file of each kind, and the folders that they stand in."""
        torch.manual_seed(0)
        network = create_model("kanet_kv", **_OPTIONS)
        description = Description("kanet_kv", _OPTIONS, CLASSES, resize=40, size=32, data="folder")
        save_model(self.good / "network.safetensors", network, description)
        state = {f"network.{name}": tensor for name, tensor in network.state_dict().items()}
        torch.save(
            {"state_dict": state, "kronattn": description.to_dict(), "epoch": 0, "global_step": 1},
            self.good / "network.ckpt",
        )
        options = {"num_classes": 3, "backbone": "kanet_kv", "backbone_options": {"width": 0.25}}
        segmenter = create_model("deeplabv2_kao_qkv", **options)
        described = Description(
            "deeplabv2_kao_qkv", options, ["a", "b", "c"], resize=33, size=33, data="folder", task="segmentation"
        )
        save_model(self.good / "segmenter.safetensors", segmenter, described)
        for index, name in enumerate(CLASSES * 2):
            for split in ("train", "val"):
                path = self.good / "images" / split / name / f"{index}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                picture(index, (36, 44)).save(path)
        for split in ("train", "val"):
            for index in range(2):
                base = self.good / "pairs" / split
                for part in ("images", "masks"):
                    (base / part).mkdir(parents=True, exist_ok=True)
                picture(index).save(base / "images" / f"{index}.png")
                Image.fromarray(labels(index, 3)).save(base / "masks" / f"{index}.png")
        (self.good / "pairs" / "classes.txt").write_text("a 0 0 0\nb 0 255 0\nc 255 0 0\n")
        picture(3, (50, 60)).save(self.good / "photo.jpg")
        with tarfile.open(self.good / "images.tar", "w") as archive:
            archive.add(self.good / "images", "images")
        recipe = {
            "model": {"name": "kanet_kv", "options": {"width": 0.25}},
            "data": {"name": "folder", "path": "in/images", "images": {"resize": 40, "size": 32, "flip": 0.5}},
            "optimiser": {"name": "sgd", "lr": 0.01, "momentum": 0.9, "weight_decay": 1e-4},
            "schedule": {"name": "cosine", "warmup": 1},
            "epochs": 2,
            "batch_size": 4,
            "ema": 0.9,
            "accelerator": "cpu",
            "seed": 1,
        }
        (self.good / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        (self.good / "model.onnx").write_bytes(_onnx())


TARGETS = {
    "image": "photo.jpg",
    "labelled image": "images/val/cat/0.png",
    "mask": "pairs/val/masks/0.png",
    "classes": "pairs/classes.txt",
    "archive": "images.tar",
    "checkpoint": "network.ckpt",
    "safetensors": "network.safetensors",
    "segmenter": "segmenter.safetensors",
    "recipe": "recipe.yaml",
    "onnx": "model.onnx",
}


_NETWORK = "in/network.safetensors"
_SEGMENTER = "in/segmenter.safetensors"
_EVALUATE = ["--device", "cpu", "--workers", "0", "--batch", "4"]
COMMANDS: dict[str, list[list[str]]] = {
    "image": [
        ["predict", "{target}", "--weights", _NETWORK, "--output", "out/found.json"],
        ["predict", "{target}", "in/images/val/dog", "--weights", _NETWORK, "--output", "out/found.csv"],
        ["predict", "{target}", "--weights", _SEGMENTER, "--overlays", "out/overlays", "--masks", "out/masks"],
        ["explain", "{target}", "--weights", _NETWORK, "--layer", "0", "--output", "out/picture.png"],
    ],
    "labelled image": [
        ["evaluate", _NETWORK, "--data", "in/images", *_EVALUATE],
        ["evaluate", _NETWORK, "--data", "in/images", "--skip-bad-images", *_EVALUATE],
        ["train", "--config", "in/recipe.yaml", "--output", "out/run"],
    ],
    "mask": [
        ["evaluate", _SEGMENTER, "--data", "in/pairs", *_EVALUATE],
        ["evaluate", _SEGMENTER, "--data", "in/pairs", "--skip-bad-images", *_EVALUATE],
    ],
    "classes": [["evaluate", _SEGMENTER, "--data", "in/pairs", *_EVALUATE]],
    "archive": [
        ["evaluate", _NETWORK, "--data", "{target}", *_EVALUATE],
        ["train", "--config", "in/recipe.yaml", "--data", "{target}", "--output", "out/run"],
    ],
    "checkpoint": [
        ["predict", "in/photo.jpg", "--weights", "{target}", "--output", "out/found.json"],
        ["evaluate", "{target}", "--data", "in/images", *_EVALUATE],
        ["train", "--config", "in/recipe.yaml", "--output", "out/run", "model.weights={target}"],
        ["explain", "in/photo.jpg", "--weights", "{target}", "--layer", "0", "--output", "out/picture.png"],
    ],
    "safetensors": [
        ["predict", "in/photo.jpg", "--weights", "{target}", "--output", "out/found.csv"],
        ["evaluate", "{target}", "--data", "in/images", *_EVALUATE],
        ["train", "--config", "in/recipe.yaml", "--output", "out/run", "model.weights={target}"],
        ["export", "{target}", "--format", "torch-export", "--output", "out/network.pt2"],
        ["demo", "--weights", "{target}", "--port", "0"],
    ],
    "segmenter": [
        ["predict", "in/photo.jpg", "--weights", "{target}", "--overlays", "out/overlays", "--masks", "out/masks"],
    ],
    "recipe": [
        ["train", "--config", "{target}", "--output", "out/run"],
        ["compare", "--config", "{target}", "--models", "kanet_kv", "--seeds", "0", "--folder", "out/runs",
         "--output", "out/found.json"],
    ],
    "onnx": [
        ["predict", "in/photo.jpg", "--weights", "{target}"],
        ["predict", "{target}", "--weights", _NETWORK],
        ["export", "{target}", "--output", "out/network.onnx"],
    ],
}  # fmt: skip


def _prepare_this_process() -> None:
    """What a fork should find done: imports, and training and serving that stop where they would begin."""
    import kronattn.demo.serve
    import kronattn.export
    import kronattn.training.comparison
    import kronattn.training.evaluation
    import kronattn.training.run as run

    def stop(*arguments: Any, **options: Any) -> None:
        raise ValueError(_STOPPED)

    run.L.Trainer.fit = stop
    kronattn.training.comparison.run_all = stop
    kronattn.demo.serve.serve = stop
    # Exporting itself takes seconds, and has nothing to do with what the file was like.
    kronattn.export.export_network = stop


def _run(place: Path, arguments: list[str]) -> tuple[int, str, float]:
    sys.stdout.flush()
    log, start = place.parent / "log", time.monotonic()
    process = os.fork()
    if not process:
        code = _RAISED
        try:
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.chdir(place)
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            sys.stdout, sys.stderr = open(1, "w"), open(2, "w")  # noqa: SIM115
            code = main(arguments)
            sys.stdout.flush()
            sys.stderr.flush()
        except BaseException:
            os.write(2, traceback.format_exc(limit=-6).encode())
        finally:
            os._exit(code)
    deadline = start + PATIENCE
    while os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() > deadline:
            os.kill(process, signal.SIGKILL)
        time.sleep(0.002)
    _, status = os.waitpid(process, 0)
    return os.waitstatus_to_exitcode(status), log.read_text(errors="replace"), time.monotonic() - start


def _named(code: int) -> str:
    return {0: "answered", 1: "answered in part", 2: "refused"}.get(code, f"ended with {code}")


def _judged(code: int, said: str, place: Path, before: set[str]) -> list[str]:
    wrong = []
    lines = [line for line in said.splitlines() if line.strip()]
    if code == -signal.SIGKILL:
        wrong.append(f"it hung for {PATIENCE} s")
    elif code not in (0, 1, 2):
        wrong.append(f"it ended with {code}: {said[-900:]}")
    elif "Traceback" in said:
        wrong.append(f"a traceback: {said[-900:]}")
    elif code == 2 and sum(line.startswith("kronattn: error: ") for line in lines) != 1:
        wrong.append(f"not one line that says what is wrong: {said[-500:]!r}")
    after = _listing(place)
    elsewhere = {name for name in after - before if not name.startswith("out/")}
    if elsewhere or before - after:
        wrong.append(f"files came or went outside of out/: {sorted(elsewhere | (before - after))[:5]}")
    half = [name for name in after if Path(name).name.startswith(".")]
    if half:
        wrong.append(f"left half-written: {half[:5]}")
    return wrong


def _listing(place: Path) -> set[str]:
    return {str(path.relative_to(place)) for path in place.rglob("*")}


def _onnx() -> bytes:
    """A small ONNX file, where onnx is installed."""
    try:
        import onnx
        from onnx import TensorProto, helper
    except ModuleNotFoundError:
        return b"\x08\x0a"
    sides = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 3]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "relu", sides[:1], sides[1:])
    return onnx.helper.make_model(graph).SerializeToString()


PART = Files
