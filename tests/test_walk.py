"""A newcomer's walk: every command and every snippet of the README and the guide, as they stand, in an empty folder.

It fails on any traceback and on any command that does not succeed. Runs are shortened by further settings, data that
the pages only name (PATH, camvid.tar) is made up, and what cannot be done here is listed in ``LEFT_OUT``.
Minutes long, so outside the default run: ``make walk``.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]

pytestmark = [pytest.mark.walk, pytest.mark.slow]

# A command's beginning, and why nobody can type it here.
LEFT_OUT = {
    "make ": "sets up a whole environment; CI runs it",
    "pip install": "the package is installed, or these tests would not run",
    "torchrun": "needs several machines",
    "kronattn train --config imagenet/kanet_kv --data PATH --devices 8": "needs eight devices",
    "kronattn --install-completion": "changes the shell of whoever runs this",
    "kronattn study ": "hundreds of runs on a GPU; tests/study runs a small one",
}

SMALL_IMAGES = [f"data.images.{name}={size}" for name, size in (("resize", 40), ("size", 32))]
SMALL_EVALUATION = ["data.images.eval_resize=40", "data.images.eval_size=32"]
ON_A_CPU = ["accelerator=cpu", "precision=32-true", "compile=false", "validate_every=1"]
NARROW = "model.options={width: 0.25}"
SEGMENTER = "model.options={backbone: kanet_kv, backbone_options: {width: 0.25}}"
# What is added to a command so that it takes seconds.
SHORTER: list[tuple[str, list[str]]] = [
    (r"--config digits", ["epochs=1"]),
    (r"--config (finetune|photos)", ["epochs=1", *SMALL_IMAGES, *SMALL_EVALUATION]),
    (r"--config study/facades_unet", ["epochs=1", "batch_size=2", "data.images.crop=32", "data.workers=0", *ON_A_CPU]),
    (r"--config imagenette/", ["epochs=1", "batch_size=4", NARROW, *SMALL_IMAGES, *SMALL_EVALUATION, *ON_A_CPU]),
    (r"--config study/esc50", ["epochs=1", "batch_size=2", "model.options={in_chans: 1, width: 0.25}", *ON_A_CPU]),
    (r"--config study/hippocampus", ["epochs=1", "batch_size=2", "model.options={widths: [4, 8]}", *ON_A_CPU]),
    (r"--config camvid/", ["epochs=1", "batch_size=2", "data.images.crop=33", "data.workers=0", SEGMENTER, *ON_A_CPU]),
]
# A comparison trains that many networks that often, which shows no more than two runs do.
FEWER = {"0-4": "0", "0-2": "0", "mobilenetv2,kanet_kv,kanet_qkv": "mobilenetv2,kanet_kv"}


def blocks(page: str) -> list[tuple[str, str]]:
    """Language and text of each block of code."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(r"^``` ?([^\n]*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def commands(page: str) -> list[str]:
    joined = "\n".join(block.replace("\\\n", " ") for language, block in blocks(page) if not language)
    lines = (line.split("  #")[0].split(" # ")[0].strip() for line in joined.splitlines())
    return [line for line in lines if re.match(r"(kronattn|make|pip|python|torchrun) ", line)]


def snippets(page: str) -> list[str]:
    return [block for language, block in blocks(page) if language == "python" and ">>>" not in block]


def photograph(path: Path, colour: tuple[int, int, int], seed: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed).integers(0, 90, (160, 200, 3))
    Image.fromarray((noise + np.array(colour) // 2).astype(np.uint8)).save(path)


def labelled(root: Path, splits: tuple[str, ...], names: tuple[str, ...], each: int) -> None:
    for split in splits:
        for number, name in enumerate(names):
            for at in range(each):
                colour = tuple(200 if channel == number else 40 for channel in range(3))
                photograph(root / split / name / f"{at}.jpg", colour, seed=at)


def segmented(root: Path, classes: int) -> None:
    for split in ("train", "val", "test"):
        for at in range(2):
            photograph(root / split / "images" / f"{at}.png", (90, 90, 90), seed=at)
            mask = np.arange(160 * 200).reshape(160, 200) // 40 % classes
            (root / split / "masks").mkdir(parents=True, exist_ok=True)
            Image.fromarray(mask.astype(np.uint8)).save(root / split / "masks" / f"{at}.png")


def recorded(root: Path) -> None:
    """Pictures of sounds in five folds."""
    for fold in range(1, 6):
        for number, name in enumerate(("dog", "rain")):
            (root / f"fold{fold}" / name).mkdir(parents=True)
            noise = np.random.default_rng(fold).integers(0, 99, (64, 216)) + 99 * number
            Image.fromarray(noise.astype(np.uint8)).save(root / f"fold{fold}" / name / "a.png")


def scanned(root: Path) -> None:
    """Volumes of an organ with two parts."""
    nibabel = pytest.importorskip("nibabel", reason="volumes are an extra")
    for split in ("train", "val", "test"):
        for at in range(2):
            voxels = np.random.default_rng(at).normal(100, 20, (30, 42, 26)).astype(np.float32)
            parts = np.zeros(voxels.shape, np.uint8)
            parts[8:16, 8:16, 8:16], parts[16:24, 8:16, 8:16] = 1, 2
            for kind, array in (("images", voxels), ("labels", parts)):
                (root / split / kind).mkdir(parents=True, exist_ok=True)
                nibabel.save(nibabel.Nifti1Image(array, np.eye(4)), root / split / kind / f"{at}.nii.gz")


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """An empty folder, but for what the pages speak of."""
    place = tmp_path_factory.mktemp("walk")
    photograph(place / "church.jpg", (200, 120, 40))
    photograph(place / "photo.jpg", (40, 120, 200))
    labelled(place / "photos", ("",), ("cat", "dog", "fish"), 10)
    labelled(place / "flowers", ("",), ("daisy", "tulip"), 20)
    labelled(place / "PATH", ("train", "val"), ("n01440764", "n02102040"), 8)
    segmented(place / "FOLDER", 3)
    segmented(place / "camvid", 11)
    recorded(place / "esc50")
    scanned(place / "hippocampus")
    for name in ("camvid", "esc50", "hippocampus"):
        shutil.make_archive(str(place / name), "tar", place, name)
    return place


def run(command: list[str], place: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "COLUMNS": "120"}
    return subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=900)


def typed(command: str) -> list[str]:
    """A command line as it is run here."""
    words = shlex.split(command)
    words = [FEWER.get(word, word) for word in words]
    for pattern, settings in SHORTER:
        if re.search(pattern, command) and words[1] in ("train", "compare"):
            words += settings
    return [sys.executable, "-m", "kronattn", *words[1:]] if words[0] == "kronattn" else [sys.executable, *words[1:]]


CASES = list(dict.fromkeys((page, command) for page in PAGES for command in commands(page)))


def test_there_is_something_to_walk_through():
    assert len(CASES) > 15
    assert sum(len(snippets(page)) for page in PAGES) >= 2
    for beginning in LEFT_OUT:
        assert any(command.startswith(beginning) for _, command in CASES), f"nobody speaks of {beginning!r} any more"


@pytest.mark.parametrize(("page", "command"), CASES, ids=[f"{page}: {command}" for page, command in CASES])
def test_command(page, command, place):
    for beginning, reason in LEFT_OUT.items():
        if command.startswith(beginning):
            pytest.skip(reason)
    if command == "kronattn demo":
        return serve(place)
    words = typed(command)
    if words[3] == "train" and not {"--output", "-o"} & set(words):
        # Pages repeat a command: each is somebody's first.
        shutil.rmtree(place / "runs" / default_folder(command), ignore_errors=True)
    elif words[3] == "train":
        folder = next(words[at + 1] for at, word in enumerate(words) if word in ("--output", "-o"))
        shutil.rmtree(place / folder, ignore_errors=True)
    done = run(words, place)
    assert "Traceback" not in done.stdout + done.stderr, done.stderr
    assert done.returncode == 0, done.stderr
    return None


def default_folder(command: str) -> str:
    config = re.search(r"--config (\S+)", command)[1]
    model = config.split("/")[-1] if "/" in config else "kanet_kv"
    return f"{config.split('/')[-1]}-{model}-seed0"


def serve(place: Path) -> None:
    """The page comes up, and goes when it is interrupted."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-u", "-m", "kronattn", "demo", "--port", "0"]
    with (place / "demo.log").open("w") as log:
        server = subprocess.Popen(command, cwd=place, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + 180
            while "Page: http" not in (place / "demo.log").read_text():
                assert server.poll() is None, (place / "demo.log").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.2)
        finally:
            server.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(30)
            server.kill()
    assert "Traceback" not in (place / "demo.log").read_text()


@pytest.mark.parametrize("page", [page for page in PAGES if snippets(page)])
def test_snippets(page, place):
    if not (place / "kanet_kv.onnx").exists():
        done = run([sys.executable, "-m", "kronattn", "export", "-w", "kanet_kv", "-o", "kanet_kv.onnx"], place)
        assert done.returncode == 0, done.stderr
    for at, snippet in enumerate(snippets(page)):
        done = run([sys.executable, "-c", snippet], place)
        missing = re.search(r"ModuleNotFoundError: No module named '(pnnx)'", done.stderr)
        if missing:
            print(f"snippet {at} of {page} left out: {missing[1]} is not installed")
            continue
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES)
def test_examples_with_prompts(page, place):
    code = (
        "import doctest, sys\n"
        f"failed, _ = doctest.testfile({str(ROOT / page)!r}, module_relative=False, "
        "optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)\n"
        "sys.exit(bool(failed))"
    )
    done = run([sys.executable, "-c", code], place)
    assert done.returncode == 0, done.stdout
