"""Fills the tables of the README and of the guide from the files in results/, between their markers.

Run `python tools/fill.py` after a measurement; `--check` only says whether the pages are up to date.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from goals import goal_tables
from stored import ROOT, compared, read, row_of
from study_pages import answers, clipped, cpu_and_gpu, lost, sample_norm, studies, worth

from kronattn.bench.operators import over_copy
from kronattn.bench.shown import tables
from kronattn.measure import Comparison, Row, Way
from kronattn.present import NOTHING, Cell, Column, Table, round_significant, tabulate, to_markdown
from kronattn.tables.networks import from_json, network_tables
from kronattn.tables.operators.table import printed


def headline() -> list[Table]:
    """What either operator, and the network built on it, comes to: a line for each question."""
    cpu, gpu, heads = (compared(name) for name in ("operators-cpu", "operators-h200", "heads-513-h200"))
    networks = {
        "eager": compared("networks-eager-h200"),
        "compiled": compared("stages-networks-h200"),
        "graphs": compared("once-graphs-h200"),
    }
    counted = {row["name"]: row for row in read("networks")["rows"]}
    at56 = Way({"batch": 8, "channels": 8, "grid": [56, 56]})
    copies = Way({"batch": 64, "channels": 64, "grid": [56, 56]}, how="graphs")
    at513 = {"size": 513, "batch": 8, "channels": 2048, "stride": 8, "num_classes": 21}

    def operator(mode: str) -> Row:
        return row_of(cpu, measured_form(cpu, f"kao_{mode}"), at56)

    def network(mode: str, work: str, how: str) -> str:
        case = {"batch": 256 if how == "graphs" else 512, "size": 224}
        found = networks[how]
        return f"{value_of(found.ratio(row_of(found, f'kanet_{mode}', Way(case, work, how)))):.2f}"

    def in_copies(name: str) -> str:
        return f"{over_copy(gpu, row_of(gpu, name, copies)):.1f}"

    def both(ratio: Callable[[str], str]) -> str:
        return " / ".join(ratio(work) for work in ("training", "inference"))

    def head(mode: str, work: str, how: str) -> str:
        ratio = heads.ratio(row_of(heads, f"kao_{mode}", Way(at513, work, how)))
        return f"{value_of(ratio):.1f}×"

    def over_regular(mode: str) -> str:
        in_paper = replace(operator(mode), candidate={"kv": "kao_kv", "qkv": "kao_qkv_as_printed"}[mode])
        return f"{round_significant(value_of(cpu.ratio(operator(mode))))}× ({printed(in_paper, 'speedup')})"

    flash = in_copies("attn_fused")
    lines: dict[str, Callable[[str], str]] = {
        "operator: multiply-adds at 56×56 positions, share of regular attention's": lambda mode: (
            f"{cpu.share(operator(mode), figure='madd'):.2%}"
        ),
        "operator: speed-up over materialised attention, CPU, 2 threads (in the paper)": over_regular,
        "operator: speed-up over PyTorch's fused attention, CPU, 2 threads": lambda mode: (
            f"{round_significant(value_of(cpu.ratio(operator(mode), 'attn_fused')))}×"
        ),
        f"operator: time divided by that of `x.clone()`, GPU, x (64, 64, 56, 56); flash attention: {flash}": (
            lambda mode: in_copies(f"kao_{mode}")
        ),
        f"network: multiply-adds at 224×224; MobileNetV2: {counted['mobilenetv2']['madd'] / 1e6:.1f}m": lambda mode: (
            f"{counted[f'kanet_{mode}']['madd'] / 1e6:.1f}m"
        ),
        "network: images a second over torchvision's MobileNetV2, GPU, eager, training / inference": lambda mode: both(
            lambda work: network(mode, work, "eager")
        ),
        "network: the same, both compiled": lambda mode: both(lambda work: network(mode, work, "compiled")),
        "network: the same, both eager as CUDA graphs": lambda mode: both(lambda work: network(mode, work, "graphs")),
        "segmentation head: speed-up over regular attention's, 513×513 images, GPU, eager, training / inference": (
            lambda mode: both(lambda work: head(mode, work, "eager"))
        ),
        "segmentation head: the same, both as CUDA graphs": lambda mode: both(lambda work: head(mode, work, "graphs")),
    }
    columns = {
        "": lambda line: line[0],
        "KAO_KV, KANet_KV": lambda line: line[1]("kv"),
        "KAO_QKV, KANet_QKV": lambda line: line[1]("qkv"),
    }
    notes = [f"{environment(cpu)} {environment(gpu)}"]
    if measured_form(cpu, "kao_qkv") != "kao_qkv":
        notes.append("The operator KAO_QKV was measured as printed.")
    return [tabulate("", columns, lines.items(), notes=notes)]


def networks() -> list[Table]:
    """One line for each network of Table 1's family: cost, the printed cost, and speed where it was measured."""
    counted = {row["name"]: row for row in read("networks")["rows"]}
    cpu, gpu, compiled = (compared(f"networks-{name}") for name in ("cpu-batch16", "h200", "h200-compiled"))
    sizes = (
        f"CPU: batch {cpu.rows[0].case['batch']}, float32, {cpu.environment['threads']} threads. "
        f"GPU: batch {gpu.rows[0].case['batch']}, bfloat16, channels-last; eager, and with torch.compile."
    )
    return [
        tabulate(
            "",
            {
                "": lambda name: f"`{name}`",
                "parameters (paper)": lambda name: counted_cell(counted[name], "params_without_bn", "params"),
                "MAdd (paper)": lambda name: counted_cell(counted[name], "madd", "madd"),
                "images a second over torchvision's mobilenet_v2: CPU": lambda name: speed(cpu, name, "inference"),
                "GPU inference": lambda name: speed(gpu, name, "inference"),
                "GPU training": lambda name: speed(gpu, name, "training"),
                "both compiled: inference": lambda name: speed(compiled, name, "inference"),
                "training": lambda name: speed(compiled, name, "training"),
            },
            ("mobilenetv2", "mobilenetv2_kao", "kanet_without_kao", "kanet_kv", "kanet_qkv", "kanet_qkv_as_printed"),
            notes=[f"{sizes} {environment(cpu)} {environment(gpu)}"],
        )
    ]


def kernels() -> list[Table]:
    """One line for each shape: the kernels and PyTorch's own ways, in copies of the input."""
    found = compared("operators-h200")
    heads = {
        "KAO_KV": ("kao_kv", "inference"),
        "KAO_QKV": ("kao_qkv", "inference"),
        "KAO_KV, torch backend": ("kao_kv_torch", "inference"),
        "flash attention": ("attn_fused", "inference"),
        "KAO_KV, with backward": ("kao_kv", "training"),
        "KAO_QKV, with backward": ("kao_qkv", "training"),
    }

    def copies(name: str, work: str) -> Callable[[Row], str]:
        return lambda row: f"{over_copy(found, row_of(found, name, Way(row.case, work, 'graphs'))):,.1f}"

    def shape(row: Row) -> str:
        return ", ".join(map(str, (row.case["batch"], row.case["channels"], *row.case["grid"])))

    # At batch 8 a copy is nothing but its launch.
    rows = [row for row in found.rows if (row.candidate, row.work, row.how) == ("copy", "inference", "graphs")]
    columns = {"N, C, h, w": shape} | {title: copies(*what) for title, what in heads.items()}
    return [tabulate("", columns, [row for row in rows if row.case["batch"] != 8], notes=[environment(found)])]


def command(name: str, at: int = 0) -> Callable[[], list[Table]]:
    """A table as its command shows it: what stands below is where it was measured, as the page says the rest."""

    def make() -> list[Table]:
        found = compared(name)
        about = f"Threads: {found.environment['threads']}. " if "cpu" in name else ""
        return [replace(tables(found)[at], title="", notes=[about + environment(found)])]

    return make


def counts() -> list[Table]:
    """Tables 3 to 5."""
    return [replace(table, notes=table.notes[:-1]) for table in network_tables(from_json(read("networks")))]


def exports() -> list[Table]:
    """The largest difference at each size, for each network."""
    found = read("export-check")
    sizes = [one["size"] for one in found["rows"][0]["differences"]]

    def difference(at: int) -> Callable[[dict[str, Any]], str]:
        return lambda row: f"{row['differences'][at]['largest']:.1e}"

    columns = {
        "": lambda row: f"`{row['network']}`",
        **{f"{height} × {width}": difference(at) for at, (height, width) in enumerate(sizes)},
        "largest output": lambda row: f"{max(one['largest_output'] for one in row['differences']):.2f}",
        "MB": lambda row: str(row["megabytes"]),
    }
    versions = found["environment"]
    note = f"torch {versions['torch'].split('+')[0]}, onnxruntime {versions['onnxruntime']}."
    return [tabulate("", columns, found["rows"], notes=[note])]


def converters() -> list[Table]:
    """How far each converter's result is from PyTorch, for each packaged network."""
    found = read("converters")
    cells = {(row["network"], row["converter"]): row["largest"] for row in found["rows"]}
    versions = {row["converter"]: row["versions"] for row in found["rows"]}

    def largest(converter: str) -> Callable[[str], str]:
        return lambda network: f"{cells[network, converter]:.1e}"

    columns = {"": lambda network: f"`{network}`"} | {converter: largest(converter) for converter in versions}
    listed = ", ".join(f"{name} {version}" for one in versions.values() for name, version in one.items())
    note = f"{listed}, torch {found['environment']['torch'].split('+')[0]}."
    return [tabulate("", columns, dict.fromkeys(network for network, _ in cells), notes=[note])]


def graphs() -> list[Table]:
    """Training compiled, without and with CUDA graphs."""
    found = read("training-graphs-h200")
    columns = {
        "": lambda row: f"`{row['model']}`",
        Column("`compile`", numeric=False): lambda row: f"`{str(row['compile']).lower()}`",
        "images a second": lambda row: f"{row['images_per_second']:,.0f}",
        "waiting for data": lambda row: f"{row['waiting_for_data']:.1%}",
    }
    return [tabulate("", columns, found, notes=[environment(found[0])])]


# What may be told of a network, from its row in what `kronattn compare` found.
TOLD: dict[str, Callable[[dict[str, Any]], str]] = {
    "pixel accuracy": lambda row: f"{100 * row['pixel_accuracy']:.1f}%",
    "over the first": lambda row: difference(row["difference"]),
    "parameters": lambda row: f"{row['parameters']:,}",
    "MAdd": lambda row: f"{row['madd'] / 1e9:.2f}g" if row["madd"] >= 1e9 else f"{row['madd'] / 1e6:.1f}m",
    "peak memory": lambda row: f"{row['peak_bytes'] / 1e9:.2f} GB",
    "images a second": lambda row: f"{row['images_per_second']:,.0f}",
    "waiting for data": lambda row: f"{row['waiting_for_data']:.1%}",
}


def trained(name: str, *told: str) -> Callable[[], list[Table]]:
    """What `kronattn compare` found, a line for each network: its score, and what else is to be told."""

    def make() -> list[Table]:
        found = read(name)
        columns = {"": lambda row: f"`{row['model']}`", found["label"]: score} | {what: TOLD[what] for what in told}
        seeds = f"Seeds: {min(row['runs'] for row in found['summary'])}. {environment(found)}"
        return [tabulate("", columns, found["summary"], notes=[seeds])]

    return make


def score(row: dict[str, Any]) -> str:
    """A network's mean and standard deviation over its seeds, in percent."""
    spread = "" if row["std"] is None else f"\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}{100 * row['std']:.1f}"
    return f"{100 * row['mean']:.1f}{spread}%"


def difference(found: dict[str, Any] | None) -> str:
    """To the first network, with its interval, in points."""
    if found is None:
        return ""
    interval = "" if found["low"] is None else f" ({100 * found['low']:+.1f} to {100 * found['high']:+.1f})"
    return f"{100 * found['mean']:+.2f}{interval}"


def evaluated(name: str, **told: tuple[str, str]) -> Callable[[], list[Table]]:
    """What `kronattn evaluate` found: by key, a heading and a format."""

    def cell(key: str, form: str) -> Callable[[dict[str, Any]], str]:
        return lambda row: format(row[key], form)

    columns = {"": lambda row: f"`{row['model']}`"} | {title: cell(key, form) for key, (title, form) in told.items()}
    return lambda: [tabulate("", columns, read(name))]


def int8() -> list[Table]:
    """The packaged networks in 8 bits."""
    columns = {
        "": lambda row: f"`{row['model']}`",
        "float32": lambda row: f"{row['accuracy']['pytorch']:.2%}",
        "8 bits": lambda row: f"{row['accuracy']['int8']:.2%}",
        "MB": lambda row: f"{row['bytes'] / 1e6:.1f}",
        "images": lambda row: f"{row['accuracy_images']:,}",
    }
    return [tabulate("", columns, read("export-int8"))]


# Whole batches of 128 of Imagenette's 9,469 training images.
IMAGENETTE_EPOCH = 9469 // 128 * 128


def where_time_goes() -> list[Table]:
    """A whole run of kanet_kv on Imagenette, from the command to its weights: what took how long, before and now."""
    found = read("training-h200")
    runs = [found["before"], found["whole"]]

    def parts(run: Mapping[str, Any]) -> dict[str, float]:
        first, others = run["seconds_to_first_epoch"], run["seconds_of_the_other_epochs"]
        count = len(run["images_per_second_of_epochs"]) - 1
        steps = count * IMAGENETTE_EPOCH / run["images_per_second"]
        return {
            "start to the first epoch's end: imports, decoding, compiling, capturing": first,
            f"steps of the {count} other epochs": steps,
            "between them: validation, checkpoints, logs": others - steps,
            "last files": run["seconds_to_weights"] - first - others,
            "**command to weights**": run["seconds_to_weights"],
        }

    before, now = map(parts, runs)
    columns = {
        "": lambda name: name,
        "before, s": lambda name: f"{before[name]:.1f}",
        "now, s": lambda name: f"{now[name]:.1f}",
    }
    return [tabulate("", columns, list(now))]


TABLES: dict[str, Mapping[str, Callable[[], Sequence[str | Table]]]] = {
    "README.md": {
        "headline": headline,
        "worth": worth,
    },
    "docs/concepts.md": {"mean-once": trained("mean-once-h200", "over the first")},
    "docs/tables.md": {"table2": command("operators-cpu"), "networks": counts},
    "docs/use.md": {"int8": int8, "exports": exports, "converters": converters, "latency": command("export-cpu")},
    "docs/kernels.md": {"kernels": kernels},
    "docs/networks.md": {"speed": networks},
    "docs/insert.md": {"insert": command("insert-cpu")},
    "docs/training.md": {
        "imagenette": trained(
            "imagenette", "over the first", "parameters", "MAdd", "images a second", "waiting for data"
        ),
        "graphs": graphs,
        "pretrained": evaluated(
            "pretrained",
            top1=("top-1", ".2%"),
            top5=("top-5", ".2%"),
            calibration_error=("calibration error", ".1%"),
            images=("images", ","),
        ),
    },
    "docs/when.md": {
        "answers": answers,
        "lost": lost,
        "clipped": clipped,
        "sample-norm": sample_norm,
        "study": studies,
    },
    "results/README.md": {
        "goals": goal_tables,
        "where-time-goes": where_time_goes,
        "cpu-and-gpu": cpu_and_gpu,
    },
    "docs/segmentation.md": {
        "camvid": trained("camvid", "over the first", "pixel accuracy", "MAdd", "peak memory", "images a second"),
        "camvid-test": evaluated(
            "camvid-test",
            mean_iou=("mean IoU", ".1%"),
            pixel_accuracy=("pixel accuracy", ".1%"),
            images=("images", ""),
        ),
        "heads": command("heads-513-h200"),
        "heads-before": command("heads-h200"),
    },
}


def value_of(ratio: Any) -> float:
    """A ratio that has to be there."""
    return ratio.value


def measured_form(found: Comparison, name: str) -> str:
    """A candidate's name, or that of its printed form where a file has no other."""
    return name if any(row.candidate == name for row in found.measured) else f"{name}_as_printed"


def speed(found: Comparison, network: str, work: str) -> str:
    """Images a second over the base's."""
    row = found.find(network, Way(found.rows[0].case, work, found.rows[0].how))
    return NOTHING if row is None else f"{value_of(found.ratio(row)):.2f}"


def counted_cell(row: dict[str, Any], figure: str, paper: str) -> Cell:
    """A count beside the paper's, in millions."""
    return Cell(f"{row[figure]:,}", f"{row['paper'][paper] / 1e6:g}m" if row["paper"] else "")


def environment(found: Any) -> str:
    """Where and when a file was measured."""
    about = found.environment if isinstance(found, Comparison) else found["environment"]
    return f"{about['device']}, torch {about['torch'].split('+')[0]}, {about['date']}."


def filled(page: Path, marked: Mapping[str, Callable[[], Sequence[str | Table]]]) -> str:
    """A page with every marked table written anew, and text between them."""
    text = page.read_text()
    for name, make in marked.items():
        content = "\n\n".join(part if isinstance(part, str) else to_markdown(part) for part in make())
        parts = re.split(rf"<!-- {name} -->.*?<!-- /{name} -->", text, flags=re.DOTALL)
        if len(parts) != 2:
            raise SystemExit(f"{page.name} has {len(parts) - 1} tables marked {name!r}, expected one")
        text = f"<!-- {name} -->\n\n{content}\n\n<!-- /{name} -->".join(parts)
    return text


def main() -> int:
    """Rewrite the pages, or with --check tell whether that would change them."""
    stale = []
    for name, marked in TABLES.items():
        page = ROOT / name
        after = filled(page, marked)
        if after != page.read_text():
            stale.append(name)
            if "--check" not in sys.argv[1:]:
                page.write_text(after)
    if stale and "--check" in sys.argv[1:]:
        print(f"{', '.join(stale)} not what results/ say: run python tools/fill.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
