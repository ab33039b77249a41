"""Puts the weights of a training run into the package, in half precision, with a model card beside them.

    python tools/package_weights.py RUN_FOLDER

The run's folder is what `kronattn train` and `kronattn compare` leave: config.yaml, result.json, weights.safetensors.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path

from kronattn.models.files import load_model, save_model
from kronattn.training.card import model_card
from kronattn.training.recipe import load_recipe

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "kronattn" / "weights"
MOST_BYTES = 8_000_000
HALF = """
Matrices and kernels of the file are in half precision; the figures above were taken before they were rounded.
"""


def package(folder: Path) -> Path:
    """Write NAME.safetensors and NAME.md; returns the former."""
    network, description = load_model(folder / "weights.safetensors")
    target = PACKAGE / f"{description.model}.safetensors"
    with tempfile.TemporaryDirectory() as place:
        small = Path(place) / target.name
        save_model(small, network, description, half=True)
        if small.stat().st_size > MOST_BYTES:
            raise SystemExit(f"{description.model} takes more than {MOST_BYTES:,} bytes: too many for a package")
        shutil.move(small, target)
    result = json.loads((folder / "result.json").read_text())
    card = model_card(description, load_recipe(folder / "config.yaml"), result)
    target.with_suffix(".md").write_text(card + HALF)
    return target


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    for run in sys.argv[1:]:
        written = package(Path(run))
        print(f"{written.name}: {written.stat().st_size:,} bytes")
