"""``kronattn theorem``: exit codes, JSON, files."""

import json
import os
import sys
from dataclasses import replace

import pytest

import kronattn.distributions.theorem as theorem_module
from kronattn.cli import main
from kronattn.distributions import Check, paper_claims
from kronattn.tables.theorem import theorem_table, to_json

QUICK = ("theorem", "--height", "3", "--width", "4", "--samples", "2000")


@pytest.fixture
def wrong_theorem(monkeypatch):
    """Claim a covariance of X̃ that is half as large again as the paper's."""

    def wrong(setting):
        claims = paper_claims(setting)
        return replace(claims, tilde=replace(claims.tilde, covariance=1.5 * claims.tilde.covariance))

    monkeypatch.setattr(theorem_module, "paper_claims", wrong)


def test_default_run_is_all_green(capsys):
    assert main(["theorem"]) == 0
    out, err = capsys.readouterr()
    assert "31 of 31 checks pass" in out
    assert out.count("✓") == 31
    assert "✗" not in out
    assert "[r₁ … r_h]ᵀ" in out
    assert err == ""


def test_wrong_theorem_is_red_and_exits_with_one(capsys, wrong_theorem):
    assert main(QUICK) == 1
    out, err = capsys.readouterr()
    lines = [line for line in out.splitlines() if "✗" in line]
    assert len(lines) == 3
    assert all("X̃" in line for line in lines)
    assert out.index("Eqs. 6, 10") < out.index("✗") < out.index("Eqs. 7, 12")
    assert sorted(word for line in lines for word in line.split() if word in ("exact", "sampled")) == [
        "exact",
        "sampled",
        "sampled",
    ]
    assert err == ""


def test_json_is_one_object_and_nothing_else(capsys):
    assert main([*QUICK, "--json", "--seed", "3", "--confidence", "0.99999"]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert err == ""
    assert set(result) == {"checks", "all_passed", "settings"}
    assert result["all_passed"] is True
    assert result["settings"] == {
        "height": 3,
        "width": 4,
        "samples": 2000,
        "confidence": 0.99999,
        "seed": 3,
        "output": None,
    }
    for check in result["checks"]:
        assert {"name", "equation", "kind", "measured", "bound", "passed"} <= set(check)
        assert check["passed"] is (check["measured"] <= check["bound"])
        assert check["kind"] in ("exact", "sampled")


def test_json_of_a_wrong_theorem(capsys, wrong_theorem):
    assert main([*QUICK, "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["all_passed"] is False
    failed = {(check["name"], check["kind"]) for check in result["checks"] if not check["passed"]}
    assert failed == {("covariance of X̃", "exact"), ("covariance of X̃", "sampled"), ("X̃ is normal", "sampled")}


def test_the_same_seed_gives_the_same_figures(capsys):
    outputs = []
    for seed in ("1", "1", "2"):
        main([*QUICK, "--json", "--seed", seed])
        outputs.append(json.loads(capsys.readouterr().out)["checks"])
    assert outputs[0] == outputs[1] != outputs[2]


@pytest.mark.parametrize(("name", "start"), [("a.png", b"\x89PNG"), ("sub/b.SVG", b"<?xml")])
def test_output(tmp_path, capsys, name, start):
    path = tmp_path / name
    assert main([*QUICK, "--output", str(path)]) == 0
    first = path.read_bytes()
    assert first.startswith(start)
    assert str(path) in capsys.readouterr().out
    assert main([*QUICK, "--json", "--output", str(path)]) == 0
    assert json.loads(capsys.readouterr().out)["settings"]["output"] == str(path)
    assert path.read_bytes() == first
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--height", "0"], "height must be at least 1, got 0"),
        (["--width", "500"], "height times width must be at most 1024"),
        (["--height", "many"], "--height"),
        (["--samples", "10"], "samples must be from 1035 to 1428571 for 5x7 matrices, got 10"),
        (["--samples", "99999999999"], "samples must be from 1035"),
        (["--confidence", "1"], "--confidence must be between 0 and 1, both excluded, got 1.0"),
        (["--confidence", "nan"], "--confidence must be between 0 and 1, both excluded, got nan"),
        (["--seed", "-1"], "seed must be from 0 to 9223372036854775807, got -1"),
        (["--seed", "9" * 30], "seed must be from 0"),
        (["--output", "figure.gif"], "--output must end in .png or .svg, got figure.gif"),
        (["--output", "/dev/null/figure.png"], "--output /dev/null/figure.png: cannot write"),
        (["--depth", "3"], "--depth"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_two(capsys, arguments, message):
    assert main(["theorem", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.startswith("kronattn: error: ")
    assert err.count("\n") == 1


def test_output_that_is_a_folder(tmp_path, capsys):
    folder = tmp_path / "x.png"
    folder.mkdir()
    assert main([*QUICK, "--output", str(folder)]) == 2
    assert "is a folder" in capsys.readouterr().err


def test_without_matplotlib(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main([*QUICK, "--output", str(tmp_path / "x.png")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "kronattn: error: --output needs matplotlib: pip install 'kronattn[plots]'\n"
    assert main(QUICK) == 0  # only the figure needs it


def test_help_has_an_example(capsys):
    assert main(["theorem", "--help"]) == 0
    assert "Example: kronattn theorem --height 6" in capsys.readouterr().out


def test_nan_is_valid_json_and_red():
    check = Check("x", "Eq. 2", "sampled", "KS", float("nan"), 1.0)
    result = to_json([check], {})
    assert result["checks"][0]["measured"] is None
    assert result["all_passed"] is False
    assert theorem_table([check], confidence=0.9, samples=10).groups[0].rows[0][-1].text == "✗"
