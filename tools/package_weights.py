"""Puts the weights of training runs into the package, in half precision, with a model card beside them.

    python tools/package_weights.py RUN_FOLDER... [--instead-of NAME]

A run's folder is what `kronattn train` and `kronattn compare` leave: config.yaml, history.csv, result.json,
weights.safetensors.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from kronattn.models.files import load_model, save_model
from kronattn.training.card import model_card
from kronattn.training.recipe import load_recipe

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "kronattn" / "weights"
NEEDED = ("weights.safetensors", "result.json", "history.csv", "config.yaml")
MOST_BYTES = 8_000_000
HALF = """
Matrices and kernels of the file are in half precision; the figures above were taken before they were rounded.
"""
# What a user of a network's weights has to know beyond the run.
NOTES = {
    "kanet_qkv": """
KAO_QKV counts the image's mean once (`mean="once"`), and these weights were trained so. They replace weights of the
same name that were trained with the equation as printed, which counts it once for each axis: those belong to
`kanet_qkv_as_printed`.
""",
    "kanet_qkv_as_printed": """
KAO_QKV is the equation as printed, which counts the image's mean once for each axis; `kanet_qkv` counts it once.
""",
}


def package(folder: Path, into: Path = PACKAGE) -> Path:
    """Write NAME.safetensors and NAME.md; returns the former."""
    missing = [name for name in NEEDED if not (folder / name).is_file()]
    if missing:
        raise SystemExit(f"{folder} is no folder of a training run: there is no {', no '.join(missing)} in it")
    network, description = load_model(folder / "weights.safetensors")
    result = figures_of_the_weights(folder)
    # The package has one file for each network: the card names no other.
    card = model_card(description, load_recipe(folder / "config.yaml"), result, with_last=False)
    target = into / f"{description.model}.safetensors"
    with tempfile.TemporaryDirectory() as place:
        small = Path(place) / target.name
        save_model(small, network, description, half=True)
        if small.stat().st_size > MOST_BYTES:
            raise SystemExit(f"{description.model} takes more than {MOST_BYTES:,} bytes: too many for a package")
        shutil.move(small, target)
    target.with_suffix(".md").write_text(card + NOTES.get(description.model, "") + HALF)
    return target


def figures_of_the_weights(folder: Path) -> dict[str, Any]:
    """A run's result with the validation figures of its best epoch, whose weights are kept: its own are the last's."""
    result = json.loads((folder / "result.json").read_text())
    epoch = result["best_epoch"]
    with (folder / "history.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if int(row["epoch"]) == epoch]
    if not rows:
        raise SystemExit(f"{folder / 'history.csv'} has no epoch {epoch}, whose weights these are")
    validated = {name.removeprefix("val/"): value for name, value in rows[-1].items() if name.startswith("val/")}
    return result | {name: float(value) for name, value in validated.items() if value}


def main(arguments: list[str] | None = None) -> int:
    """Package each run, then remove what they replace."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_FOLDER")
    parser.add_argument("--instead-of", metavar="NAME", help="a network whose packaged weights are removed")
    parser.add_argument("--into", type=Path, default=PACKAGE, help="another folder than the package's")
    chosen = parser.parse_args(arguments)
    old = [chosen.into / f"{chosen.instead_of}{suffix}" for suffix in (".safetensors", ".md") if chosen.instead_of]
    if not all(file.is_file() for file in old):
        raise SystemExit(f"--instead-of: there are no weights of {chosen.instead_of} in {chosen.into}")
    for run in chosen.runs:
        written = package(run, chosen.into)
        print(f"{written.name}: {written.stat().st_size:,} bytes")
        old = [file for file in old if file.stem != written.stem]
    for file in old:
        file.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
