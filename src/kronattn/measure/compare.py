"""Candidates × cases, by turns in one run: time, memory and multiply-adds, and the ratios that can be told from them.

Every table and benchmark is a list of candidates, a list of cases and a function that makes a call of both. What they
find is one row type and one JSON schema, with the hardware, the versions and the command beside it.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from kronattn.measure.environment import describe_environment
from kronattn.measure.memory import available_memory, peak_memory
from kronattn.measure.timing import quartiles, time_calls

__all__ = ["Call", "Comparison", "Ratio", "Row", "Way", "compare", "memory_budget", "read_comparison"]

SCHEMA = "kronattn.comparison/1"
# What a candidate may fail with while the others go on.
_EXPECTED = (RuntimeError, ValueError, torch.OutOfMemoryError)


@dataclass(frozen=True)
class Call:
    """What is timed: ``run()`` does the work of ``count`` calls, ``once()`` that of one, for its memory."""

    run: Callable[[], Any]
    count: int = 1
    once: Callable[[], Any] | None = None


@dataclass(frozen=True)
class Way:
    """A case and the way of running it: ``case`` says what candidates are run on, in words and numbers for JSON."""

    case: Mapping[str, Any]
    work: str = "inference"
    how: str = "eager"


@dataclass(frozen=True)
class Row:
    """What one candidate costs on one case; ``failed`` says in one line why there are no figures.

    ``madd`` is for one sample; time and memory are for the whole case. ``rounds_ms`` has the time of every round where
    the candidates of a round can be compared with each other. ``cpu_ms`` is what all cores spent on it: waiting for a
    core does not count, threads that spin while they wait for each other do. ``shares`` has quartiles of what
    :meth:`Comparison.share_of_rounds` gives, in files whose rounds were not kept.
    """

    candidate: str
    case: dict[str, Any]
    work: str = "inference"
    how: str = "eager"
    time_ms: float | None = None
    quartiles_ms: tuple[float, float] | None = None
    rounds_ms: list[float] = field(default_factory=list)
    cpu_ms: float | None = None
    cpu_rounds_ms: list[float] = field(default_factory=list)
    shares: dict[str, list[float]] | None = None
    memory_bytes: int | None = None
    madd: int | None = None
    params: int | None = None
    failed: str = ""

    def same_way(self, other: Row | Way) -> bool:
        """Whether it was run on the same case in the same way."""
        return (self.work, self.how) == (other.work, other.how) and self.case == other.case


@dataclass(frozen=True)
class Ratio:
    """A ratio of two candidates, and its spread: the least and the most over the rounds of a run or, where turns are no
    rounds, what the quartiles of both give."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass
class Comparison:
    """The rows of one run on one machine. ``kind`` says which table they are for, ``base`` whom ratios are taken to;
    ``unfinished`` rows are those that were found before the run came to its end."""

    kind: str
    base: str
    rows: list[Row] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    command: str = ""
    unfinished: bool = False

    @property
    def measured(self) -> list[Row]:
        """The rows that have figures."""
        return [row for row in self.rows if not row.failed]

    def find(self, candidate: str, like: Row | Way) -> Row | None:
        """Another candidate's row on the same case, run in the same way, if it has figures."""
        return next((row for row in self.measured if row.candidate == candidate and row.same_way(like)), None)

    def ratio(self, row: Row, base: str | None = None, figure: str = "time_ms") -> Ratio | None:
        """The base's figure over the row's: a speed-up, for times. None where one of them is missing.

        Example:
            >>> rows = [Row("copy", {}, time_ms=2.0), Row("kao_kv", {}, time_ms=4.0)]
            >>> Comparison("operators", "copy", rows).ratio(rows[1]).value
            0.5
        """
        other = self.find(base or self.base, row)
        over, under = (getattr(one, figure) if one is not None else None for one in (other, row))
        if other is None or over is None or not under:
            return None
        if figure == "time_ms" and row.rounds_ms and len(row.rounds_ms) == len(other.rounds_ms):
            rounds = [theirs / own for theirs, own in zip(other.rounds_ms, row.rounds_ms, strict=True)]
            return Ratio(over / under, min(rounds), max(rounds))
        if figure == "time_ms" and row.quartiles_ms and other.quartiles_ms:
            (lower, upper), (least, most) = other.quartiles_ms, row.quartiles_ms
            return Ratio(over / under, lower / most, upper / least)
        return Ratio(over / under)

    def share(self, row: Row, base: str | None = None, figure: str = "time_ms") -> float | None:
        """The row's figure over the base's: how much of it is left."""
        ratio = self.ratio(row, base, figure)
        return None if ratio is None else 1 / ratio.value

    def share_of_rounds(self, row: Row, base: str | None = None, figure: str = "time_ms") -> Ratio | None:
        """The row's figure, ``time_ms`` or ``cpu_ms``, over the base's in the same round: the median, and quartiles.

        Where turns were no rounds it is what :meth:`ratio` gives, the other way round.

        Example:
            >>> rows = [Row("copy", {}, time_ms=2.0, rounds_ms=[1, 2, 4]), Row("kao_kv", {}, rounds_ms=[2, 4, 4])]
            >>> Comparison("operators", "copy", rows).share_of_rounds(rows[1])
            Ratio(value=2.0, low=1.5, high=2.0)
        """
        if row.shares and figure in row.shares:
            lower, median, upper = row.shares[figure]
            return Ratio(median, lower, upper)
        name = {"time_ms": "rounds_ms", "cpu_ms": "cpu_rounds_ms"}[figure]
        other = self.find(base or self.base, row)
        own, theirs = getattr(row, name), getattr(other, name, [])
        if own and len(own) == len(theirs):
            lower, median, upper = quartiles([x / max(y, 1e-9) for x, y in zip(own, theirs, strict=True)])
            return Ratio(median, lower, upper)
        ratio = self.ratio(row, base, figure)
        if ratio is None or ratio.low is None or ratio.high is None:
            return None
        return Ratio(1 / ratio.value, 1 / ratio.high, 1 / ratio.low)

    def left_out(self, label: Callable[[Row], str], rows: Iterable[Row] | None = None) -> list[str]:
        """What was not measured, and why, as a note below a table; nothing where everything was."""
        found = [f"{label(row)} ({row.failed})" for row in (self.rows if rows is None else rows) if row.failed]
        return [f"Left out: {', '.join(found)}."] if found else []

    def to_json(self) -> dict[str, Any]:
        """One JSON object, which :func:`read_comparison` reads."""
        rows = [{k: value for k, value in asdict(row).items() if value not in (None, [], "")} for row in self.rows]
        head = {k: value for k, value in asdict(self).items() if k != "unfinished" or value}
        return {"schema": SCHEMA, **head, "rows": rows}


def compare(
    kind: str,
    candidates: Sequence[str],
    ways: Sequence[Way],
    prepare: Callable[[str, Way], Call],
    *,
    base: str,
    limit: Callable[[str, Way, Comparison], str] = lambda name, way, found: "",
    count: Callable[[str, Way], Mapping[str, Any]] = lambda name, way: {},
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    packages: Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
    seconds: float = 4.0,
    repeats: int = 1,
    track: Callable[[Sequence[Way]], Iterable[Way]] = iter,
    keep: Callable[[Comparison], None] = lambda found: None,
    **timing: Any,
) -> Comparison:
    """Measure candidates against each other: on each case, and for each way of running, they take turns.

    Args:
        kind: which table this is for.
        candidates: names, in the order of the rows.
        ways: cases with the way of running them; small cases first, where ``limit`` looks at earlier rows.
        prepare: gives the call of a candidate.
        base: the candidate that ratios are taken to.
        limit: why a candidate is left out, or ""; it may look at what was found so far.
        count: what is counted rather than measured: ``madd``, ``params``.
        device, dtype: of the calls.
        packages: whose versions matter, beside torch's.
        settings: how it was measured, for the JSON object.
        seconds: of timing for each way; every candidate runs a few times however long that takes.
        repeats: measure everything so often, one run after another: rows hold medians, and each run's time is a round.
        track: may wrap the loop over ways, in a progress bar for instance.
        keep: called with what was found so far after each way, for a run that may be cut short.
        timing: further arguments of :func:`kronattn.measure.time_calls`.

    Returns:
        A row for each way and candidate. A candidate that fails has a row that says why; the others go on.

    Example:
        >>> calls = {"sum": torch.sum, "product": lambda x: x @ x}
        >>> found = compare("example", list(calls), [Way({"size": 64})], base="sum", seconds=0.01,
        ...                 prepare=lambda name, way: Call(lambda: calls[name](torch.ones(64, 64))))
        >>> [(row.candidate, row.time_ms > 0) for row in found.rows]
        [('sum', True), ('product', True)]
    """
    device = torch.device(device)
    found = Comparison(
        kind=kind,
        base=base,
        settings={"dtype": str(dtype).removeprefix("torch."), **(settings or {})},
        environment=describe_environment(device, dtype, packages),
        command=" ".join(["kronattn", *sys.argv[1:]]),
    )

    def compare_on(way: Way, so_far: Comparison) -> list[Row]:
        rows = {name: Row(name, dict(way.case), way.work, way.how, **count(name, way)) for name in candidates}
        calls: dict[str, Call] = {}
        guards: dict[str, _Guard] = {}
        for name in candidates:
            reason = limit(name, way, so_far)
            if not reason:
                try:
                    calls[name] = prepare(name, way)
                    guards[name] = _Guard(calls[name].run)
                    continue
                except _EXPECTED as error:
                    reason = one_line(error)
            rows[name] = replace(rows[name], failed=reason)
        timings = time_calls(guards, device=device, seconds=seconds, **timing) if guards else {}
        for name, call in calls.items():
            once, clock = _Guard(call.once or call.run), timings[name]
            # What has not run yet allocates what libraries keep, a workspace for products, say.
            new = call.once is not None
            memory = peak_memory(once, device=device, warm_up=new) if device.type != "mps" else None
            median, lower, upper = (value * 1e3 / call.count for value in (clock.median, clock.lower, clock.upper))
            measured = replace(rows[name], time_ms=median, quartiles_ms=(lower, upper), memory_bytes=memory)
            failed = guards[name].failed or once.failed
            rows[name] = replace(rows[name], failed=failed) if failed else measured
        return list(rows.values())

    runs: list[list[Row]] = []
    for _ in range(repeats):
        run = replace(found, rows=[])
        runs.append(run.rows)
        for way in track(ways):
            run.rows += compare_on(way, run)
            keep(replace(found, rows=median_rows(runs), unfinished=True))
    found.rows = median_rows(runs)
    return found


class _Guard:
    """A call that remembers its first error, and does nothing from then on: one that fails halfway stops nobody."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self.run, self.failed = run, ""

    def __call__(self) -> Any:
        if self.failed:
            return None
        try:
            return self.run()
        except _EXPECTED as error:
            self.failed = one_line(error)


def one_line(error: Exception) -> str:
    """What went wrong, in one line.

    >>> one_line(ValueError("two\\nlines"))
    'two lines'
    """
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    return " ".join(str(error).split())[:300] or type(error).__name__


def median_row(rows: Sequence[Row]) -> Row:
    """One candidate's rows of several runs as one; a run that failed is left out if another did not."""
    good = [row for row in rows if not row.failed and row.time_ms is not None]
    if not good:
        return rows[0]
    times = [row.time_ms for row in good if row.time_ms is not None]
    lower, upper = (statistics.median(row.quartiles_ms[at] for row in good if row.quartiles_ms) for at in (0, 1))
    row = replace(good[0], time_ms=statistics.median(times), quartiles_ms=(lower, upper), rounds_ms=times)
    cpu_times = [one.cpu_ms for one in good if one.cpu_ms is not None]
    return replace(row, cpu_ms=statistics.median(cpu_times), cpu_rounds_ms=cpu_times) if cpu_times else row


def median_rows(runs: Sequence[Sequence[Row]]) -> list[Row]:
    """Several runs as one, the last of which may be under way; a row that one run has stays as it is."""
    groups = [[run[at] for run in runs if at < len(run)] for at in range(len(runs[0]))]
    return [median_row(rows) if len(rows) > 1 else rows[0] for rows in groups]


def memory_budget(device: str | torch.device, most: int) -> int:
    """How many bytes a candidate may need: half of what a GPU has free; elsewhere ``most``, or half if that is less.

    >>> memory_budget("cpu", 1000)
    1000
    """
    device = torch.device(device)
    available = available_memory(device) if device.type != "mps" else None
    if available is None:
        return most
    return available // 2 if device.type == "cuda" else min(most, available // 2)


def read_comparison(*paths: str | Path) -> Comparison:
    """What :meth:`Comparison.to_json` wrote, from one file or from several of one machine.

    Example:
        >>> read_comparison("nowhere.json")
        Traceback (most recent call last):
        ...
        FileNotFoundError: there is no file nowhere.json
    """
    found = [_read(Path(path)) for path in paths]
    first = found[0]
    for path, other in zip(paths[1:], found[1:], strict=True):
        for name in ("kind", "base"):
            if getattr(other, name) != getattr(first, name):
                raise ValueError(
                    f"{path} is a comparison of {other.kind} over {other.base}, {paths[0]} one of {first.kind} over "
                    f"{first.base}: show them one by one"
                )
        for name in ("device", "torch", "threads"):
            own, theirs = first.environment.get(name), other.environment.get(name)
            if own != theirs:
                raise ValueError(f"{path} was measured with {name} {theirs}, {paths[0]} with {own}: not comparable")
    unfinished = any(one.unfinished for one in found)
    return replace(first, rows=[row for one in found for row in one.rows], unfinished=unfinished)


def _read(path: Path) -> Comparison:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        content = json.loads(path.read_text())
        schema = content.get("schema") if isinstance(content, dict) else None
    except ValueError:
        raise ValueError(f"{path} is not JSON") from None
    if schema != SCHEMA:
        said = f"has the schema {schema!r}" if schema else "names no schema"
        raise ValueError(f"{path} {said}, and this version reads {SCHEMA!r}")
    known = {entry.name for entry in fields(Row)}
    try:
        rows = [Row(**{name: value for name, value in row.items() if name in known}) for row in content["rows"]]
        head = {name: content[name] for name in _HEAD}
        for name, kind in _HEAD.items():
            _refuse_other(head[name], kind, name)
        for row in rows:
            _refuse_other(row.case, dict, "a row's case")
        return Comparison(rows=rows, **head, unfinished=content.get("unfinished", False))
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not whole: {error}") from None


def _refuse_other(value: Any, kind: type, name: str) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{name} is {value!r}")


_HEAD = {"kind": str, "base": str, "settings": dict, "environment": dict, "command": str}
