"""What the studies in results/ say, for the README and for the guide's page "When does it help?"."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from stored import RESULTS, ROOT, STUDIES, decided, read

from kronattn.present import NOTHING, Cell, Column, Group, Table, tabulate, to_markdown
from kronattn.study.stages import FINAL
from kronattn.study.statistics import paired_difference
from kronattn.study.summary import summarise_study
from kronattn.study.tables import cost_table, overview_table, part_table
from kronattn.study.words import advice, findings

MEAN = "global_mean"


@dataclass(frozen=True)
class Answer:
    """A layer that helps on a data set, or none that does."""

    part: Mapping[str, Any]
    entry: Mapping[str, Any] | None
    costs: Mapping[str, Any]
    first: bool

    @property
    def name(self) -> str:
        return "none shown" if self.entry is None else f"`{self.entry['layer']}`"

    def gain(self, over: str) -> Cell | None:
        if self.entry is None:
            return None
        at = 3 + self.part["references"].index(over)
        row = next(row for row in part_table(self.part).rows if row[0].text == self.entry["layer"])
        return row[at]

    def price(self, device: str) -> str | None:
        """The network's time over that without the layer."""
        layers = self.costs.get(self.part["name"], {}).get(device, {}).get("layers", {})
        without = layers.get(self.part["references"][0]) or layers.get("none")
        if self.entry is None or without is None or self.entry["layer"] not in layers:
            return None
        return f"{layers[self.entry['layer']]['seconds'] / without['seconds']:.2f}"


def answers() -> list[Table]:
    """For each data set the layers that help, shown ones first: what each gains and costs."""
    parts = decided()
    devices = {kind: measured["name"] for _, costs in parts for one in costs.values() for kind, measured in one.items()}
    columns = {
        "Data and network": lambda answer: answer.part["title"] if answer.first else "",
        Column("Layers that helped (‡), or maybe did (†)", numeric=False): lambda answer: answer.name,
        "Gain over nothing, points": lambda answer: answer.gain(answer.part["references"][0]),
        "Gain over a mean": lambda answer: answer.gain(MEAN),
        **{f"Time, {name}": lambda answer, kind=kind: answer.price(kind) for kind, name in sorted(devices.items())},
    }
    note = (
        "Nothing: no layer; in KANet, its module with a layer that adds zero (`identity`). In brackets: 95% intervals. "
        "Time: a forward pass of the network, divided by that with nothing there."
    )
    rows = [answer for part, costs in parts for answer in answers_of(part, costs)]
    return [tabulate("", columns, rows, notes=[note])]


def answers_of(part: Mapping[str, Any], costs: Mapping[str, Any]) -> Iterator[Answer]:
    """Of one data set."""
    nothing = part["references"][0]

    def verdict(entry: Mapping[str, Any]) -> str:
        return entry["differences"].get(nothing, {}).get("verdict", "")

    # "none" has no skip connection in KANet: what it is behind by says nothing of a context layer.
    helping = [x for x in part["layers"] if verdict(x).endswith("better") and x["layer"] not in ("none", "identity")]
    helping.sort(key=lambda x: (verdict(x).startswith("maybe"), -x["differences"][nothing]["mean"]))
    for at, entry in enumerate(helping or [None]):
        yield Answer(part, entry, costs, first=at == 0)


def worth() -> list[Table]:
    """What each layer gains on each data set by the first study that decides it: a line for each data set, whose names
    are long, and a column for each layer that most of them have."""
    table = overview_table([part for part, _ in decided()])
    layers = [row for row in table.rows if sum(cell.text != NOTHING for cell in row[1:]) > len(row[1:]) / 2]
    lines = list(zip(table.columns, *layers, strict=True))[1:]
    columns = (Column("", numeric=False), *(Column(row[0].text) for row in layers))
    rows = [[Cell(title.title), *cells] for title, *cells in lines]
    return [Table("", columns, [Group("", rows)], table.notes)]


def studies() -> list[str | Table]:
    """Each study: one table of all its data sets; its rules, and what was found on each data set, to be opened."""
    shown: list[str | Table] = []
    for name in STUDIES:
        if not (RESULTS / f"{name}.json").exists():
            continue
        found = read(name)
        measured = [part for part in summarise_study(found) if part["runs"]]
        rules = "\n".join(f"- {rule}" for rule in found["study"]["rules"])
        shown += [f"## {found['study']['title']}", replace(overview_table(measured), title=""), done(found)]
        shown.append(folded("The rules, written before the runs where they do not say otherwise", rules))
        figure = ROOT / "docs" / "figures" / f"{name}.svg"
        if figure.exists():
            shown.append(folded("Figure", f"![What each layer gains, with 95% intervals](figures/{figure.name})"))
        for part in measured:
            sentences = "\n".join(f"- {sentence}" for sentence in findings(part))
            tables = [part_table(part), cost_table(part, found["costs"])]
            written = [to_markdown(replace(table, title="")) for table in tables]
            shown.append(folded(part["title"], "\n\n".join([f"**{advice(part)}**", sentences, *written])))
    return shown


def lost() -> list[Table]:
    """Forty epochs of Imagenette: for each layer the runs that learned less than any without Kronecker attention."""
    by_layer = finals("study-imagenette-longer")
    bound = lost_above(by_layer)

    def mean(runs: Iterator[Mapping[str, Any]]) -> str:
        scores = [run["test"] for run in runs]
        return f"{100 * statistics.fmean(scores):.2f}" if scores else NOTHING

    columns = {
        **losses(bound),
        "Their test top-1, %": lambda entry: mean(run for run in entry[1].values() if run["train_loss"] > bound),
        "That of the others": lambda entry: mean(run for run in entry[1].values() if run["train_loss"] <= bound),
    }
    return [tabulate("", columns, by_layer.items())]


def clipped() -> list[Table]:
    """The same with clipped gradients: none is lost, and what each layer gains over the same seeds without."""
    before, by_layer = finals("study-imagenette-longer"), finals("study-imagenette-clipped")

    def gained(entry: tuple[str, Mapping[int, Mapping[str, Any]]]) -> str:
        layer, runs = entry
        seeds = sorted(runs.keys() & before[layer].keys())
        found = paired_difference(*([one[seed]["test"] for seed in seeds] for one in (runs, before[layer])))
        return f"{100 * found.mean:+.2f} ({interval(found.low, found.high)}), {found.pairs} seeds"

    columns = {**losses(lost_above(before)), "Test top-1 minus unclipped, points": gained}
    return [tabulate("", columns, [entry for entry in by_layer.items() if entry[0] in before])]


def sample_norm() -> list[Table]:
    """What Kronecker attention gains by a norm of each sample, not of the batch, wherever it was tried."""
    layers, rows = ("kao_kv", "kao_qkv"), []
    for found in map(read, ("study-imagenette-clipped", "study-sample-norm")):
        found["study"]["references"] = layers
        rows += [part for part in summarise_study(found) if part["runs"]]

    def gain(layer: str) -> Callable[[Mapping[str, Any]], str]:
        def cell(part: Mapping[str, Any]) -> str:
            entry = next((entry for entry in part["layers"] if entry["layer"] == f"{layer}_sample"), None)
            if entry is None or layer not in entry["differences"]:
                return NOTHING
            found = entry["differences"][layer]
            gained = f"{100 * found['mean']:+.2f} ({interval(found['low'], found['high'])})"
            return f"{gained}, {found['pairs']} {part['paired_by']}s"

        return cell

    columns = {"": lambda part: part["title"], **{f"{layer.upper()}, points": gain(layer) for layer in layers}}
    return [tabulate("", columns, rows)]


def losses(bound: float) -> dict[str, Callable[[Any], str]]:
    """Columns that tell of a layer's runs how well they learned."""

    def reach(entry: tuple[str, Mapping[int, Mapping[str, Any]]]) -> str:
        found = [run["train_loss"] for run in entry[1].values()]
        return f"{min(found):.3f} to {max(found):.3f}"

    return {
        "Layer": lambda entry: f"`{entry[0]}`",
        "Runs": lambda entry: str(len(entry[1])),
        "Training loss": reach,
        f"Runs above {bound:.3f}": lambda entry: str(sum(run["train_loss"] > bound for run in entry[1].values())),
    }


def lost_above(by_layer: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> float:
    """The highest training loss of a run without Kronecker attention."""
    return max(
        run["train_loss"] for layer, runs in by_layer.items() if not layer.startswith("kao") for run in runs.values()
    )


def finals(name: str) -> dict[str, dict[int, Mapping[str, Any]]]:
    """A study's runs that count, by layer and seed."""
    by_layer: dict[str, dict[int, Mapping[str, Any]]] = {}
    for run in read(name)["runs"]:
        if run["stage"] == FINAL:
            by_layer.setdefault(run["layer"], {})[run["seed"]] = run
    return by_layer


def cpu_and_gpu() -> list[Table]:
    """The scores of runs that a CPU and a GPU have both done, one minus the other."""
    gpu = {run["key"]: run["test"] for run in read("study-controls-short")["runs"]}
    by_layer: dict[str, list[tuple[float, float]]] = {}
    for run in read("study-cpu-short")["runs"]:
        by_layer.setdefault(run["layer"], []).append((run["test"], gpu[run["key"]]))
    by_layer["both"] = [pair for pairs in by_layer.values() for pair in pairs]

    columns = {
        "": lambda row: row[0],
        "runs": lambda row: str(row[1].pairs),
        "difference, points": lambda row: f"{100 * row[1].mean:+.2f}",
        "95% interval": lambda row: interval(row[1].low, row[1].high),
    }
    rows = [(name, paired_difference(*zip(*pairs, strict=True))) for name, pairs in by_layer.items()]
    return [tabulate("", columns, rows)]


def interval(low: float | None, high: float | None) -> str:
    """In points; unknown with a single pair."""
    return NOTHING if low is None or high is None else f"{100 * low:+.2f} to {100 * high:+.2f}"


def done(found: Mapping[str, Any]) -> str:
    """How many runs, and on what."""
    devices = sorted({one["device"] for one in found["environments"] if one.get("device")})
    hours = sum(run["seconds"] for run in found["runs"]) / 3600
    return f"{len(found['runs'])} runs, {hours:.1f} hours in all, several at once, on {', '.join(devices)}."


def folded(title: str, content: str) -> str:
    """What readers open who want to know, in the guide and on the web page of a repository."""
    return f'<details markdown="1">\n<summary>{title}</summary>\n\n{content}\n\n</details>'
