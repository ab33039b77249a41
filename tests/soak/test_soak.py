"""The soak itself: it finds what is wrong, says which case it was, and that case can be run again alone."""

import json
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
import torch

from kronattn.nn import DenseAttention
from kronattn.ops import torch_backend
from tests.soak import mutations, operators
from tests.soak.__main__ import main
from tests.soak.layers import _options_of
from tests.soak.part import KEPT_FAILURES, Outcome, Tally

ROOT = Path(__file__).parents[2]


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def soak(tmp_path, *arguments: str) -> tuple[int, dict]:
    output = tmp_path / "soak.json"
    code = main(["--minutes", "1", "--cases", "12", "--seed", "3", "--output", str(output), *arguments])
    return code, json.loads(output.read_text())


def test_what_was_tried_is_counted(tmp_path, one_thread):
    code, found = soak(tmp_path, "--parts", "operators,layers,options,threads")
    assert code == 0
    assert set(found) == {"operators/cpu", "layers/cpu", "options/cpu", "threads/cpu"}
    for section in found.values():
        assert section["cases"] >= 12
        assert section["failed"] == 0
    assert sum(found["operators/cpu"]["counts"]["dtype"].values()) == found["operators/cpu"]["cases"]
    assert "options_not_tried" not in found["layers/cpu"]


def test_processes_share_the_cases(tmp_path):
    # As a user starts it: other processes cannot find what is defined in the module that is run.
    output = tmp_path / "soak.json"
    command = [sys.executable, "-m", "tests.soak", "--parts", "operators", "--processes", "2", "--cases", "12"]
    done = subprocess.run([*command, "--output", str(output)], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(output.read_text())["operators/cpu"]["cases"] == 12


def test_a_layers_options_are_found_where_it_hands_them_on():
    assert {"pool", "num_heads", "project"} <= set(_options_of(DenseAttention))


@pytest.mark.parametrize("part", ["operators", "layers", "options"])
def test_a_flaw_is_found_and_found_again(tmp_path, one_thread, monkeypatch, capsys, part):
    spread = torch_backend.spread
    monkeypatch.setattr(torch_backend, "spread", lambda *a, **o: spread(*a, **o) * 1.2)
    code, found = soak(tmp_path, "--parts", part)
    assert code == 1
    (first, *_) = found[f"{part}/cpu"]["failures"]
    assert "is off by" in first["wrong"]
    assert f"--case {part}:{first['case']}" in capsys.readouterr().out
    assert main(["--case", f"{part}:{first['case']}"]) == 1
    monkeypatch.setattr(torch_backend, "spread", spread)
    assert main(["--case", f"{part}:{first['case']}"]) == 0


def test_results_over_their_tolerance_are_judged_by_their_coefficients(tmp_path, one_thread, monkeypatch):
    tolerances = {dtype: 3e-16 if dtype == torch.float64 else 1e-3 * t for dtype, t in operators.TOLERANCE.items()}
    monkeypatch.setattr(operators, "TOLERANCE", tolerances)
    _, found = soak(tmp_path, "--parts", "operators", "--cases", "200")
    judged = found["operators/cpu"]["counts"]["judged"]
    assert judged["by its coefficients"] > found["operators/cpu"]["failed"] > 0


def test_memory_that_nobody_wrote_shows(tmp_path, one_thread, monkeypatch):
    def forgetful(*arguments, **options):
        y = spread(*arguments, **options)
        return y + torch.empty(y.shape, dtype=y.dtype)

    spread = torch_backend.spread
    monkeypatch.setattr(torch_backend, "spread", forgetful)
    _, found = soak(tmp_path, "--parts", "operators")
    assert found["operators/cpu"]["failed"]


def test_what_a_case_raises_is_wrong(tmp_path, one_thread, monkeypatch):
    def fail(*arguments, **options):
        raise RuntimeError("out of order")

    monkeypatch.setattr(torch_backend, "pool", fail)
    code, found = soak(tmp_path, "--parts", "layers")
    assert code == 1
    assert "out of order" in found["layers/cpu"]["failures"][0]["wrong"]


def test_sections_of_another_machine_are_taken_in(tmp_path):
    ours, theirs = tmp_path / "soak.json", tmp_path / "theirs.json"
    ours.write_text(json.dumps({"page/cpu": 1, "layers/cuda": 2}))
    theirs.write_text(json.dumps({"layers/cuda": 3}))
    assert main(["--merge", str(theirs), "--output", str(ours)]) == 0
    assert json.loads(ours.read_text()) == {"layers/cuda": 3, "page/cpu": 1}


def test_failures_are_counted_but_not_all_kept():
    tally = Tally()
    for number in range(KEPT_FAILURES + 5):
        tally.add(number, Outcome([{"a": 1}], ["wrong"]))
    assert (tally.cases, tally.failed, len(tally.failures)) == (KEPT_FAILURES + 5, KEPT_FAILURES + 5, KEPT_FAILURES)


@pytest.mark.parametrize("kind", ["bytes", *mutations.STRUCTURES])
def test_changes_follow_from_their_number(kind, files_of_every_kind):
    change = mutations.by_bytes if kind == "bytes" else mutations.STRUCTURES[kind]
    data = files_of_every_kind["image" if kind == "bytes" else kind]
    found = [change(data, Random(number))[1] for number in (1, 2, 3, 1)]
    assert found[0] == found[3]
    assert len({data, *found}) >= 3


@pytest.fixture(scope="module")
def files_of_every_kind(tmp_path_factory):
    import io
    import tarfile

    from safetensors.torch import save

    from tests.data.segmentation_folders import encoded, picture

    image, packed, saved = encoded(picture(0)), io.BytesIO(), io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name in ("a/0.png", "b/1.png"):
            member = tarfile.TarInfo(name)
            member.size = len(image)
            archive.addfile(member, io.BytesIO(image))
    torch.save({"state_dict": {"a": torch.zeros(3)}}, saved)
    return {
        "image": image,
        "mask": image,
        "archive": packed.getvalue(),
        "checkpoint": saved.getvalue(),
        "safetensors": save({"a": torch.zeros(3)}, {"kronattn": '{"model": "kanet_kv", "size": 32}'}),
    }
