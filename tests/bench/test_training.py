"""Training from start to weights: what is run and kept, with a command that does nothing."""

from __future__ import annotations

import json

import pytest

from kronattn.bench import training
from kronattn.cli import main

DATA = ["--imagenette", "x.tar", "--camvid", "y.tar"]


@pytest.fixture
def command(monkeypatch):
    """Stands for `kronattn train` and `kronattn compare`: leaves the files that they leave."""
    ran = []

    def run(*arguments, stamps=None):
        ran.append(list(arguments))
        result = {"top1": 0.9, "images_per_second": 100, "waiting_for_data": 0.0, "training_share": 1.0}
        result |= {"peak_bytes": 1, "environment": {}, "model": "kanet_kv", "seed": 0}
        target = training.Path(arguments[arguments.index("--output") + 1])
        if arguments[0] == "compare":
            target.write_text(json.dumps({"runs": [result]}))
        else:
            target.mkdir(parents=True)
            (target / "weights.safetensors").touch()
            (target / "result.json").write_text(json.dumps(result))
            stamps.append((2.0, "epoch 1 of 60: loss 1.0, 1,234 images/s"))
        return 3.0

    monkeypatch.setattr(training, "_kronattn", run)
    return ran


def test_every_part_is_kept_as_soon_as_it_is_done(command, tmp_path, capsys):
    path = tmp_path / "training.json"
    assert main(["bench", "training", *DATA, "--parts", "whole,seeds,steps", "--output", str(path), "--json"]) == 0
    found = json.loads(path.read_text())
    assert json.loads(capsys.readouterr().out) == found
    assert found["whole"]["images_per_second_of_epochs"] == [1234]
    assert found["seeds"]["top1"] == {"0": 0.9}
    assert command[0][:3] == ["train", "--config", "imagenette/kanet_kv"]


def test_goals_for_readers(command, capsys):
    assert main(["bench", "training", *DATA, "--parts", "whole", "--until", "-1"]) == 0
    assert main(["bench", "training", *DATA, "--parts", "whole"]) == 0
    out = capsys.readouterr().out
    assert "start to weights" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--parts", "walk"], "--parts must be of whole, compare, "),
        (["--parts", "camvid"], "the part camvid needs --camvid"),
    ],
)
def test_bad_input(arguments, message, capsys):
    assert main(["bench", "training", *arguments]) == 2
    assert message in capsys.readouterr().err
