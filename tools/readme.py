"""Writes the README's tables from the files in results/, between their markers.

Run `python tools/readme.py` after a measurement; `--check` only says whether the README is up to date.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "results"

OPERATORS = {
    "attn": "regular attention",
    "attn_pool": "regular, keys pooled 2×2",
    "attn_fused": "regular, fused (PyTorch's)",
    "kao_kv": "**KAO_KV**",
    "kao_qkv": "**KAO_QKV**, mean counted once",
    "kao_qkv_as_printed": "KAO_QKV as printed",
}


def headline() -> list[str]:
    """What either operator, and the network built on it, comes to: a line for each question."""
    cpu = {row["operator"]: row for row in _read("operators-cpu.json")["rows"] if row["grid"] == [56, 56]}
    gpu = _read("operators-h200.json")
    copies = {cost["operator"]: cost for cost in gpu["costs"] if cost["shape"] == [64, 64, 56, 56]}
    eager, compiled = _read("networks-h200.json"), _read("networks-h200-compiled.json")
    counted = {row["name"]: row for row in _read("networks.json")["rows"]}
    base = counted["mobilenetv2"]
    printed = {"kv": cpu["kao_kv"]["paper"], "qkv": cpu["kao_qkv_as_printed"]["paper"]}
    # Said below the table: until the form that counts the mean once is measured, its column has the printed form's.
    of_printed_form = "kao_qkv" not in cpu or any(
        _as_measured(found, "kanet_qkv") != "kanet_qkv" for found in (eager, compiled)
    )
    cpu.setdefault("kao_qkv", cpu["kao_qkv_as_printed"])

    def line(question: str, answer: Callable[[str], str]) -> str:
        return f"| {question} | {answer('kv')} | {answer('qkv')} |"

    def speed(found: dict[str, Any], how: str) -> Callable[[str], str]:
        return lambda mode: " / ".join(
            _ratio(found, _as_measured(found, f"kanet_{mode}"), work, how) for work in ("training", "inference")
        )

    heads = {
        (row["work"], row["head"]): row["speedup"] for row in _read("heads-h200.json")["rows"] if row["size"] == 513
    }
    flash = copies["attn_fused"]["forward_over_copy"]
    return [
        "| | KAO_KV, KANet_KV | KAO_QKV, KANet_QKV |",
        "|---|---:|---:|",
        line(
            "operator: multiply-adds at 56×56 positions, share of regular attention's",
            lambda mode: f"{cpu[f'kao_{mode}']['madd'] / cpu['attn']['madd']:.2%}",
        ),
        line(
            "operator: speed-up over materialised attention, CPU, 2 threads (in the paper)",
            lambda mode: f"{_three(cpu[f'kao_{mode}']['speedup'])}×{_printed(printed[mode], 'speedup')}",
        ),
        line(
            "operator: speed-up over PyTorch's fused attention, CPU, 2 threads",
            lambda mode: f"{_three(cpu[f'kao_{mode}']['speedup_over_fused'])}×",
        ),
        line(
            f"operator: time divided by that of `x.clone()`, GPU, x (64, 64, 56, 56); flash attention: {flash:.1f}",
            lambda mode: f"{copies[f'kao_{mode}']['forward_over_copy']:.1f}",
        ),
        line(
            f"network: multiply-adds at 224×224; MobileNetV2: {base['madd'] / 1e6:.1f}m",
            lambda mode: f"{counted[f'kanet_{mode}']['madd'] / 1e6:.1f}m",
        ),
        line(
            "network: images a second over torchvision's MobileNetV2, GPU, eager, training / inference",
            speed(eager, "eager"),
        ),
        line("network: the same, both compiled", speed(compiled, "compiled")),
        line(
            "segmentation head: speed-up over regular attention's, 513×513 images, GPU, training / inference",
            lambda mode: " / ".join(f"{heads[work, f'kao_{mode}']:.1f}×" for work in ("training", "inference")),
        ),
        "",
        f"{_environment(_read('operators-cpu.json'))} {_environment(gpu)}",
        *(["KAO_QKV's speeds were measured with the equation as printed."] if of_printed_form else []),
    ]


def networks() -> list[str]:
    """One line for each network of Table 1's family: cost, the printed cost, and speed where it was measured."""
    counted = {row["name"]: row for row in _read("networks.json")["rows"]}
    lines = [
        "| | parameters (paper) | MAdd (paper) | images a second over torchvision's mobilenet_v2: CPU | GPU inference "
        "| GPU training | both compiled: inference | training |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    cpu, gpu, compiled = (_read(f"networks-{name}.json") for name in ("cpu-batch16", "h200", "h200-compiled"))
    names = ("mobilenetv2", "mobilenetv2_kao", "kanet_without_kao", "kanet_kv", "kanet_qkv", "kanet_qkv_as_printed")
    for name in names:
        lines.append(
            f"| `{name}` | {counted_beside_printed(counted[name])} "
            f"| {_ratio(cpu, name, 'inference')} | {_ratio(gpu, name, 'inference')} "
            f"| {_ratio(gpu, name, 'training')} | {_ratio(compiled, name, 'inference', 'compiled')} "
            f"| {_ratio(compiled, name, 'training', 'compiled')} |"
        )
    sizes = (
        f"CPU: batch {cpu['settings']['batch']}, float32, {cpu['environment']['threads']} threads. "
        f"GPU: batch {gpu['settings']['batch']}, bfloat16, channels-last; eager, and with torch.compile."
    )
    return [*lines, "", f"{sizes} {_environment(cpu)} {_environment(gpu)}"]


def counted_beside_printed(row: dict[str, Any]) -> str:
    """Two cells of a network's row: parameters and multiply-adds, with the paper's in brackets where it has them."""

    def cell(ours: int, key: str) -> str:
        return f"{ours:,}" + (f" ({row['paper'][key] / 1e6:g}m)" if row["paper"] else "")

    return f"{cell(row['params_without_bn'], 'params')} | {cell(row['madd'], 'madd')}"


def kernels() -> list[str]:
    """One line for each shape: the kernels and PyTorch's own ways, in copies of the input."""
    found = _read("operators-h200.json")
    costs = {(tuple(cost["shape"]), cost["operator"]): cost for cost in found["costs"]}
    lines = [
        "| N, C, h, w | KAO_KV | KAO_QKV | KAO_KV, torch backend | flash attention | KAO_KV, with backward | KAO_QKV |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for shape in dict.fromkeys(shape for shape, _ in costs):
        if shape[0] == 8:
            continue  # so small that a copy is nothing but its launch
        cells = [
            f"{costs[shape, operator][f'{work}_over_copy']:,.1f}"
            for operator, work in (
                ("kao_kv", "forward"),
                ("kao_qkv", "forward"),
                ("kao_kv_torch", "forward"),
                ("attn_fused", "forward"),
                ("kao_kv", "training"),
                ("kao_qkv", "training"),
            )
        ]
        lines.append(f"| {', '.join(map(str, shape))} | {' | '.join(cells)} |")
    return [*lines, "", _environment(found)]


def imagenette() -> list[str]:
    """Seven networks, one recipe."""
    return comparison("imagenette.json", ("score", "parameters", "MAdd", "images a second"))


def camvid() -> list[str]:
    """Four heads, one recipe."""
    return comparison("camvid.json", ("score", "pixel accuracy", "images a second", "peak memory"))


TABLES = {"headline": headline, "imagenette": imagenette, "camvid": camvid}

# What may be told of a network, from its row in what `kronattn compare` found.
_TOLD: dict[str, Callable[[dict[str, Any]], str]] = {
    "pixel accuracy": lambda row: f"{100 * row['pixel_accuracy']:.1f}%",
    "over the first": lambda row: _difference(row["difference"]),
    "parameters": lambda row: f"{row['parameters']:,}",
    "MAdd": lambda row: f"{row['madd'] / 1e9:.2f}g" if row["madd"] >= 1e9 else f"{row['madd'] / 1e6:.1f}m",
    "peak memory": lambda row: f"{row['peak_bytes'] / 1e9:.2f} GB",
    "images a second": lambda row: f"{row['images_per_second']:,.0f}",
    "waiting for data": lambda row: f"{row['waiting_for_data']:.1%}",
}


def table(heads: Sequence[str], rows: Mapping[str, Sequence[str]]) -> list[str]:
    """A line for each network, by name, and figures to the right of it."""
    return [
        f"| | {' | '.join(heads)} |",
        "|---|" + "---:|" * len(heads),
        *(f"| `{name}` | {' | '.join(cells)} |" for name, cells in rows.items()),
    ]


def comparison(name: str, told: Sequence[str]) -> list[str]:
    """What `kronattn compare` found, a line for each network; "score" is the first thing to tell."""
    found = _read(name)
    lines = table(
        [found["label"] if what == "score" else what for what in told],
        {
            row["model"]: [score(found, row["model"]) if what == "score" else _TOLD[what](row) for what in told]
            for row in found["summary"]
        },
    )
    return [*lines, "", f"Seeds: {min(row['runs'] for row in found['summary'])}. {_environment(found)}"]


def _difference(found: dict[str, Any] | None) -> str:
    if found is None:
        return ""
    interval = "" if found["low"] is None else f" ({100 * found['low']:+.1f} to {100 * found['high']:+.1f})"
    return f"{100 * found['mean']:+.2f}{interval}"


def score(found: dict[str, Any], model: str) -> str:
    """A network's mean and standard deviation over its seeds, in percent."""
    row = next(row for row in found["summary"] if row["model"] == model)
    spread = "" if row["std"] is None else f"\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}{100 * row['std']:.1f}"
    return f"{100 * row['mean']:.1f}{spread}%"


def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / name).read_text())
    return found


def _printed(paper: dict[str, Any], key: str) -> str:
    return f" ({str(paper[key]).replace('$', '')})" if key in paper else ""


def _three(value: float) -> str:
    """Three significant digits and no exponent."""
    return f"{float(f'{value:.3g}'):,.10g}"


def _ratio(found: dict[str, Any], network: str, work: str, how: str = "eager") -> str:
    for row in found["rows"]:
        if (row["network"], row["work"], row["how"]) == (network, work, how):
            return f"{row['ratio']:.2f}"
    return "–"


def _as_measured(found: dict[str, Any], network: str) -> str:
    """The network's name, or that of its printed form where a file has no other; which one, results/README.md tells."""
    measured = {row["network"] for row in found["rows"]}
    return network if network in measured else f"{network}_as_printed"


def _environment(found: dict[str, Any]) -> str:
    environment = found["environment"]
    return f"{environment['device']}, torch {environment['torch'].split('+')[0]}, {environment['date']}."


def rendered(text: str) -> str:
    """The README with every marked table written anew."""
    for name, table in TABLES.items():
        block = f"<!-- {name} -->\n\n" + "\n".join(table()) + f"\n\n<!-- /{name} -->"
        text, count = re.subn(rf"<!-- {name} -->.*?<!-- /{name} -->", lambda _: block, text, flags=re.DOTALL)  # noqa: B023
        if count != 1:
            raise SystemExit(f"README.md has {count} tables marked {name!r}, expected one")
    return text


def main() -> int:
    """Rewrite the README, or with --check tell whether that would change it."""
    before = README.read_text()
    after = rendered(before)
    if "--check" in sys.argv[1:]:
        if after != before:
            print("README.md is not what results/ say: run python tools/readme.py", file=sys.stderr)
        return int(after != before)
    README.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
