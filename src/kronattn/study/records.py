"""A study's results: one JSON file that grows with every run, and that the study goes on from."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from threading import RLock
from typing import Any

from kronattn.atomic import write_atomically
from kronattn.study.plan import Run, plan_runs
from kronattn.study.settings import Study
from kronattn.study.stages import FINAL, SWEEP

__all__ = ["Records"]

_NUMBER = int | float
# What every run's record has, beside what is KEPT.
_RECORD: dict[str, Any] = {
    "key": str,
    "data": str,
    "layer": str,
    "stage": str,
    "seed": int,
    "fold": int | None,
    "lr": _NUMBER,
    "fingerprint": str,
    "validation": _NUMBER | None,
    "test": _NUMBER | None,
    "seconds": _NUMBER,
    "failure": str | None,
    "environment": int,
}
# Of a run's own figures, those that a study keeps.
KEPT = ("parameters", "madd", "train_loss", "images_per_second", "peak_bytes", "epochs", "jobs")


class Records:
    """Every run's figures by its key; written whenever one is added.

    Args:
        path: the JSON file; what it holds already is read.
        others: further files, of this study elsewhere or of one that it shares runs with: those that it plans, too,
            are taken over.
    """

    def __init__(self, study: Study, path: Path, others: Sequence[Path] = ()) -> None:
        self.path = path
        self._lock = RLock()
        self.runs: dict[str, dict[str, Any]] = {}
        self.costs: dict[str, Any] = {}
        self.environments: list[dict[str, Any]] = []
        self.study: dict[str, Any] = {
            "name": study.name,
            "title": study.title,
            "rules": list(study.rules),
            "references": list(study.references),
            "layers": {name: {"context": x.context, "options": dict(x.options)} for name, x in study.layers.items()},
            "data": [
                {
                    "name": part.name,
                    "title": part.label,
                    "caveat": part.caveat,
                    "layers": list(part.layers),
                    "score": part.score,
                    "score_label": part.task.label,
                    "folds": list(part.folds),
                    "learning_rates": list(part.learning_rates),
                    "planned": sum(len(part.seeds_for(name)) for name in part.layers) * max(1, len(part.folds)),
                }
                for part in study.parts
            ],
        }
        if path.exists():
            own = _read(path)
            if (name := own["study"].get("name")) != study.name:
                raise ValueError(
                    f"{path} holds the study {name!r}: give another --output, or take runs over with --from {path}"
                )
            self._take_over(own)
        planned = {run.key for run in plan_runs(study)}
        if unplanned := [key for key in self.runs if key not in planned]:
            raise ValueError(
                f"{path} holds {len(unplanned)} runs that the study does not plan now, such as {unplanned[0]}: give "
                f"another --output, and --from {path} takes over the rest"
            )
        self._read_from = " or ".join(map(str, [path, *others]))
        for file in others:
            self._take_over(_read(file), planned)

    def _take_over(self, found: Mapping[str, Any], planned: Collection[str] | None = None) -> None:
        for record in found["runs"]:
            if planned is not None and record["key"] not in planned:
                continue
            record["environment"] = self._environment(found["environments"][record["environment"]])
            known = self.runs.get(record["key"])
            # One that came to its end counts before one that failed.
            if known is None or known["failure"] is not None:
                self.runs[record["key"]] = record
        for part in self.study["data"]:
            # Those of one device were measured together: another file's do not come between them.
            if part["name"] in found["costs"]:
                self.costs[part["name"]] = found["costs"][part["name"]] | self.costs.get(part["name"], {})

    def _environment(self, described: dict[str, Any]) -> int:
        if described not in self.environments:
            self.environments.append(described)
        return self.environments.index(described)

    def get(self, run: Run, fingerprint: str | None = None) -> dict[str, Any] | None:
        """A run's record; with other settings than those of ``fingerprint`` it is an error."""
        with self._lock:
            record = self.runs.get(run.key)
        if record is not None and fingerprint is not None and record["fingerprint"] != fingerprint:
            raise ValueError(
                f"{self._read_from} holds {run.key} with other settings: give other files, or remove that run"
            )
        return record

    def sweep(self, run: Run) -> dict[float, list[float]]:
        """Validation scores of the runs that choose for ``run``, by learning rate."""
        found: dict[float, list[float]] = {rate: [] for rate in run.part.learning_rates}
        with self._lock:
            for record in self.runs.values():
                chooses = record["stage"] == SWEEP and record["failure"] is None and record["lr"] in found
                if chooses and (record["data"], record["layer"], record["fold"]) == run.place:
                    found[record["lr"]].append(record["validation"])
        return found

    def has_failed_sweep(self, run: Run) -> bool:
        """Whether one of those that choose for ``run`` failed."""
        with self._lock:
            return any(
                record["stage"] == SWEEP and record["failure"] is not None
                for record in self.runs.values()
                if (record["data"], record["layer"], record["fold"]) == run.place
            )

    def add(
        self,
        run: Run,
        fingerprint: str,
        rate: float,
        result: Mapping[str, Any] | None,
        *,
        failure: str | None = None,
        seconds: float = 0.0,
    ) -> None:
        """Keep a run's figures, or why there are none, and write the file."""
        result = result or {}
        score = run.part.score
        with self._lock:
            self.runs[run.key] = {
                "key": run.key,
                "data": run.part.name,
                "layer": run.layer.name,
                "stage": run.stage,
                "seed": run.seed,
                "fold": run.fold,
                "lr": rate,
                "fingerprint": fingerprint,
                "validation": result.get(score),
                "test": result.get("test", {}).get(score) if run.stage == FINAL else None,
                **{name: result.get(name) for name in KEPT},
                "seconds": round(seconds, 2),
                "failure": failure,
                "environment": self._environment(result.get("environment", {})),
            }
            self.write()

    def as_dict(self) -> dict[str, Any]:
        with self._lock:
            return {
                "study": self.study,
                "runs": list(self.runs.values()),
                "costs": self.costs,
                "environments": self.environments,
            }

    def write(self) -> None:
        with self._lock:
            write_atomically(self.path, json.dumps(self.as_dict(), indent=1) + "\n")


def _read(path: Path) -> dict[str, Any]:
    """What a file holds of a study's results, all of it or an error."""
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no file {path} of a study's results") from None
    except (ValueError, RecursionError):
        found = None
    if not _is_whole(found):
        raise ValueError(f"{path} does not hold a study's results: expected what kronattn study wrote")
    return dict(found)


def _is_whole(found: Any) -> bool:
    kinds = {"study": dict, "runs": list, "costs": dict, "environments": list}
    if not isinstance(found, dict) or not all(isinstance(found.get(name), kind) for name, kind in kinds.items()):
        return False
    entries = (*found["environments"], *found["costs"].values())
    return all(isinstance(one, dict) for one in entries) and all(
        _is_record(run) and 0 <= run["environment"] < len(found["environments"]) for run in found["runs"]
    )


def _is_record(run: Any) -> bool:
    if not isinstance(run, dict) or not all(name in run and isinstance(run[name], x) for name, x in _RECORD.items()):
        return False
    return all(run[name] is None or math.isfinite(run[name]) for name in ("validation", "test"))
