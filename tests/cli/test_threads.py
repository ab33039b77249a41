"""How many threads a command computes with, and how it says so."""

import os

import pytest
import torch

from kronattn.cli import main, threads
from kronattn.cli.threads import allowed_cores, take_threads


class Others:
    """As many cores busy as it says."""

    def __init__(self, cores: float) -> None:
        self._cores = cores

    def cores(self) -> float:
        return self._cores


@pytest.fixture
def machine(monkeypatch):
    """Eight cores, all allowed, and nobody has chosen."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(threads, "allowed_cores", lambda: 8)
    before, chosen = torch.get_num_threads(), []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    yield chosen
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(("busy", "expected"), [(0.0, 8), (0.4, 8), (3.2, 5), (7.9, 1), (20.0, 1)])
def test_those_that_are_free(machine, capsys, busy, expected):
    take_threads(None, Others(busy))
    assert machine == [expected]
    assert os.environ["OMP_NUM_THREADS"] == str(expected)
    err = capsys.readouterr().err
    if expected == 8:
        assert err == ""
    else:
        count = f"{expected} thread" + ("s" if expected > 1 else "")
        assert err == f"kronattn: note: others keep {busy:.1f} of 8 cores busy: {count}; --threads for more\n"


def test_a_container_gets_no_more_than_its_share(machine, monkeypatch, capsys):
    monkeypatch.setattr(threads, "allowed_cores", lambda: 2)
    take_threads(None, Others(4.0))
    assert machine == [2]
    assert capsys.readouterr().err == ""


def test_what_was_asked_for_is_taken(machine, capsys):
    take_threads(3, Others(8.0))
    assert machine == [3]
    assert capsys.readouterr().err == ""


def test_what_the_environment_says_is_left_alone(machine, monkeypatch, capsys):
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    take_threads(None, Others(8.0))
    assert machine == []
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("files", "most"),
    [
        ({"cpu.max": "150000 100000\n"}, 1),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "5000 100000\n"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
        ({"cpu.max": "nonsense\n"}, None),
        ({}, None),
    ],
)
def test_limits_of_control_groups(tmp_path, monkeypatch, files, most):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert allowed_cores(tmp_path) == (most or 8)


@pytest.mark.parametrize("arguments", [["--threads", "2", "list", "weights"], ["list", "weights", "--threads=2"]])
def test_before_or_after_the_sub_command(machine, capsys, arguments):
    assert main(arguments) == 0
    assert machine == [2]


def test_a_number_that_is_none(capsys):
    assert main(["list", "weights", "--threads", "0"]) == 2
    err = capsys.readouterr().err
    assert "--threads" in err
    assert err.count("\n") == 1


def test_a_resumed_run_keeps_its_own(tmp_path, monkeypatch):
    """The bits of a run on the CPU depend on how many there are."""
    from kronattn.cli import train
    from kronattn.training.recipe import load_recipe, recipe_yaml

    used = []
    monkeypatch.setattr(train, "use_threads", used.append)
    recipe = load_recipe("digits")
    (tmp_path / "config.yaml").write_text(recipe_yaml(load_recipe("digits", ["threads=7"])))
    train._with_threads(recipe, tmp_path)
    train._with_threads(load_recipe("digits", ["threads=3"]), tmp_path)
    assert used == [7, 3]
    assert train._with_threads(recipe, None).threads == torch.get_num_threads()
