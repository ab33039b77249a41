"""Candidates by turns: what is kept when one fails, what is told of ratios, and what is read back."""

from __future__ import annotations

import json

import pytest
import torch

from kronattn.measure import Call, Comparison, Row, Way, compare, read_comparison

WAYS = [Way({"size": 4}), Way({"size": 8})]


def compared(prepare, **options):
    return compare("example", ["base", "other"], WAYS, prepare, base="base", seconds=0.01, **options)


def adding(name, way):
    x = torch.ones(way.case["size"])
    return Call(lambda: x + x)


def test_rows_in_order_with_time_memory_and_counts():
    found = compared(adding, count=lambda name, way: {"madd": way.case["size"]})
    assert [(row.candidate, row.case, row.madd) for row in found.rows] == [
        (name, {"size": size}, size) for size in (4, 8) for name in ("base", "other")
    ]
    assert [row.memory_bytes for row in found.rows] == [16, 16, 32, 32]
    assert found.environment["torch"] == torch.__version__
    assert found.ratio(found.rows[0]).value == 1


def test_what_the_first_call_keeps_is_no_memory_of_a_call():
    kept = []

    def prepare(name, way):
        def once():
            kept.append(torch.ones(1000) if not kept else None)
            return torch.ones(way.case["size"])

        return Call(lambda: None, once=once)

    assert [row.memory_bytes for row in compared(prepare).rows] == [16, 16, 32, 32]


@pytest.mark.parametrize("where", ["prepare", "first call", "halfway"])
def test_a_candidate_that_fails_leaves_the_others(where):
    def prepare(name, way):
        if name == "base" or way.case["size"] == 8:
            return adding(name, way)
        if where == "prepare":
            raise RuntimeError("no\nsuch kernel")
        calls = []

        def run():
            calls.append(None)
            if len(calls) > {"first call": 0, "halfway": 6}[where]:
                raise RuntimeError("no\nsuch kernel")

        return Call(run)

    found = compared(prepare)
    assert [row.failed for row in found.rows] == ["", "no such kernel", "", ""]
    assert found.rows[1].time_ms is None
    assert found.left_out(lambda row: row.candidate) == ["Left out: other (no such kernel)."]
    assert len(found.measured) == 3


def test_what_a_limit_says_is_not_run():
    def limit(name, way, found):
        return "too large" if name == "other" and len(found.measured) == 2 else ""

    found = compared(adding, limit=limit)
    assert [row.failed for row in found.rows] == ["", "", "", "too large"]


def test_several_runs_are_medians_with_their_rounds():
    found = compared(adding, repeats=3)
    assert len(found.rows) == 4
    for row in found.rows:
        assert len(row.rounds_ms) == 3
        assert min(row.rounds_ms) <= row.time_ms <= max(row.rounds_ms)
        ratio = found.ratio(row)
        assert ratio.low <= ratio.high


def test_what_was_found_so_far_is_kept():
    """Two runs of two ways, cut short in the last: the first way has two rounds, the second is that of one run."""
    kept, prepared = [], []

    def prepare(name, way):
        prepared.append(way)
        if len(prepared) == 7:
            raise KeyboardInterrupt
        return adding(name, way)

    with pytest.raises(KeyboardInterrupt):
        compared(prepare, repeats=2, keep=kept.append)
    assert [[(row.case["size"], len(row.rounds_ms)) for row in found.rows] for found in kept] == [
        [(4, 0)] * 2,
        [(4, 0)] * 2 + [(8, 0)] * 2,
        [(4, 2)] * 2 + [(8, 0)] * 2,
    ]
    assert all(found.unfinished for found in kept)
    assert not compared(adding, keep=kept.append).unfinished


def test_ratio_has_the_spread_of_its_rounds():
    rows = [Row("base", {}, time_ms=2.0, rounds_ms=[2.0, 2.2]), Row("other", {}, time_ms=1.0, rounds_ms=[1.0, 2.0])]
    found = Comparison("example", "base", rows)
    assert found.ratio(rows[1]).value == 2
    assert (found.ratio(rows[1]).low, found.ratio(rows[1]).high) == (pytest.approx(1.1), 2)
    assert found.ratio(rows[1], "missing") is None


def test_ratio_of_turns_has_the_spread_of_quartiles():
    rows = [
        Row("base", {}, time_ms=2.0, quartiles_ms=(1.8, 2.4)),
        Row("other", {}, time_ms=1.0, quartiles_ms=(0.8, 1.2)),
    ]
    ratio = Comparison("example", "base", rows).ratio(rows[1])
    assert (ratio.value, ratio.low, ratio.high) == (2, pytest.approx(1.5), pytest.approx(3))


class TestFiles:
    def write(self, path, found, **changes):
        path.write_text(json.dumps({**found.to_json(), **changes}))
        return path

    def test_what_was_written_is_read(self, tmp_path):
        found = compared(adding)
        again = read_comparison(self.write(tmp_path / "a.json", found))
        assert again.to_json() == json.loads(json.dumps(found.to_json()))

    def test_a_run_that_was_cut_short_says_so(self, tmp_path):
        whole = Comparison("example", "base", [Row("base", {}, time_ms=1.0)])
        part = Comparison("example", "base", [Row("base", {}, time_ms=1.0)], unfinished=True)
        assert "unfinished" not in whole.to_json()
        paths = self.write(tmp_path / "whole.json", whole), self.write(tmp_path / "part.json", part)
        assert [read_comparison(path).unfinished for path in paths] == [False, True]
        assert read_comparison(*paths).unfinished

    def test_several_of_one_machine(self, tmp_path):
        found = Comparison("example", "base", [Row("base", {}, time_ms=1.0)], environment={"device": "a"})
        paths = [self.write(tmp_path / name, found) for name in ("a.json", "b.json")]
        assert len(read_comparison(*paths).rows) == 2

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            (
                {"schema": "kronattn.comparison/9"},
                "b.json has the schema 'kronattn.comparison/9', and this version reads",
            ),
            ({"schema": None}, "b.json names no schema, and this version reads 'kronattn.comparison/1'"),
            ({"environment": {"device": "b"}}, "b.json was measured with device b, .*a.json with a: not comparable"),
            ({"kind": "heads"}, "b.json is a comparison of heads over base, .*a.json one of example over base"),
            ({"rows": [{"case": {}}]}, "b.json is not whole"),
            ({"rows": [{"candidate": "a", "case": None}]}, "b.json is not whole: a row's case is None"),
            ({"rows": ["a"]}, "b.json is not whole"),
            ({"settings": None}, "b.json is not whole: settings is None"),
            ({"kind": []}, r"b.json is not whole: kind is \[\]"),
        ],
    )
    def test_what_does_not_fit_is_one_line(self, tmp_path, changes, message):
        found = Comparison("example", "base", [Row("base", {}, time_ms=1.0)], environment={"device": "a"})
        paths = self.write(tmp_path / "a.json", found), self.write(tmp_path / "b.json", found, **changes)
        with pytest.raises(ValueError, match=message) as raised:
            read_comparison(*paths)
        assert "\n" not in str(raised.value)

    def test_no_json(self, tmp_path):
        (tmp_path / "a.json").write_text("{")
        with pytest.raises(ValueError, match="a.json is not JSON"):
            read_comparison(tmp_path / "a.json")
