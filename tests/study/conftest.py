"""A small study of spectrograms, and workers that invent their results."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kronattn.study.settings import load_study
from kronattn.training import workers

STUDY = """
title: Small
rules: [All alike.]
references: [none, global_mean]
layers: {none: , global_mean: , kao: {context: kao_qkv, options: {num_heads: 2}}}
data:
  sounds:
    recipe: RECIPE
    path: sounds
    folds: [1, 2]
    seeds: 0-1
    learning_rates: [0.01, 0.1]
    sweep_folds: first
"""
RECIPE = """
task: spectrograms
data: {name: spectrograms, images: {size: [32, 40]}}
model: {name: kanet_kv, options: {in_chans: 1, width: 0.25}}
optimiser: {name: adamw, lr: 0.001}
epochs: 1
batch_size: 4
accelerator: cpu
"""

# Answers like a worker: what it finds follows from the recipe that was planned. global_mean is better by 0.1, and the
# larger learning rate by 0.01; a learning rate of 9 or more fails.
FAKE = """
import json, sys, yaml
for line in sys.stdin:
    order = json.loads(line)
    recipe = yaml.safe_load(open(order["folder"] + "/planned.yaml"))
    rate, context = recipe["optimiser"]["lr"], recipe["model"]["context"]
    if rate >= 9:
        print(json.dumps({"failure": "the loss became NaN"}), flush=True)
        continue
    fold, seed = recipe["data"]["images"]["fold"], recipe["seed"]
    score = 0.5 + 0.01 * fold + 0.001 * seed * (context == "none")
    score += 0.1 * (context == "global_mean") + 0.01 * (rate == 0.1)
    result = {"top1": score, "parameters": 7, "madd": 9, "environment": {"device": "paper"}}
    if order["options"]["test"]:
        result["test"] = {"split": order["options"]["test"], "top1": score - 0.2}
    json.dump(result, open(order["folder"] + "/result.json", "w"))
    print(json.dumps({"failure": ""}), flush=True)
"""


@pytest.fixture
def write_study(tmp_path):
    def write(text: str = STUDY) -> Path:
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(RECIPE)
        path = tmp_path / "small.yaml"
        path.write_text(text.replace("RECIPE", str(recipe)))
        return path

    return write


@pytest.fixture
def study(write_study):
    return load_study(write_study())


@pytest.fixture
def fake_workers(monkeypatch):
    def start(self):
        return subprocess.Popen([sys.executable, "-c", FAKE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    monkeypatch.setattr(workers._Worker, "_start", start)


def write_sounds(tmp_path):
    generator = np.random.default_rng(0)
    for fold in (1, 2, 3, 4):
        for name in ("dog", "rain"):
            place = tmp_path / "data" / "sounds" / f"fold{fold}" / name
            place.mkdir(parents=True, exist_ok=True)
            for number in range(2):
                pixels = generator.integers(0, 255, (32, 40), dtype=np.uint8)
                Image.fromarray(pixels).save(place / f"{number}.png")
    return tmp_path / "data"


@pytest.fixture
def sounds(tmp_path):
    return write_sounds(tmp_path)
