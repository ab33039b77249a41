"""Writes the guide's tables from the files in results/, between their markers.

Run `python tools/docs_tables.py` after a measurement; `--check` only says whether the guide is up to date.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import readme

DOCS = readme.ROOT / "docs"

EXAMPLES = {
    "timm_resnet": "ResNet-18, 224²",
    "unet_block": "U-Net block, 64 to 32 channels, 128²",
    "video_block": "video block, 32 channels, 8 × 56²",
}


def table2() -> list[str]:
    """Every operator at the paper's three sizes, the paper's values in brackets."""
    found = _read("operators-cpu.json")
    lines = [
        "| | operator | MAdd | saved | memory | time | over regular |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in found["rows"]:
        paper = row["paper"]
        if row["grid"] not in ([14, 14], [28, 28], [56, 56]):
            continue
        printed = {key: f" ({value.replace('$', '')})" for key, value in (paper or {}).items()}
        lines.append(
            f"| {row['grid'][0]}² | {readme.OPERATORS[row['operator']]} | {row['madd']:,}{printed.get('madd', '')} "
            f"| {row['cost_saving']:.2%}{printed.get('cost_saving', '')} "
            f"| {row['memory_bytes'] / 1e6:,.1f} MB{printed.get('memory', '')} "
            f"| {readme._three(row['time_ms'])} ms{printed.get('time', '')} "
            f"| {readme._three(row['speedup'])}×{printed.get('speedup', '')} |"
        )
    return [*lines, "", readme._environment(found)]


def networks() -> list[str]:
    """Tables 3 to 5: a table each, with a note for each figure that differs from the printed one."""
    lines: list[str] = []
    for number in (3, 4, 5):
        rows = [row for row in _read("networks.json")["rows"] if row["table"] == number]
        lines += [
            f"**Table {number}**",
            "",
            "| | top-1 on ImageNet (paper) | parameters | MAdd |",
            "|---|---:|---:|---:|",
        ]
        notes = []
        for row in rows:
            mark = ""
            if row["note"]:
                notes.append(row["note"])
                mark = f" [{len(notes)}]"
            top1 = f"{row['paper']['top1']:.3f}" if row["paper"] else "–"
            lines.append(f"| `{row['name']}`{mark} | {top1} | {readme.counted_beside_printed(row)} |")
        lines += ["", *(f"[{at}] {note}\n" for at, note in enumerate(notes, 1))]
    return lines[:-1] if not lines[-1] else lines


def exports() -> list[str]:
    """The largest difference at each size, for each network."""
    found = _read("export-check.json")
    sizes = [one["size"] for one in found["rows"][0]["differences"]]
    heads = " | ".join(f"{height} × {width}" for height, width in sizes)
    lines = [f"| | {heads} | largest output | MB |", "|---|" + "---:|" * (len(sizes) + 2)]
    for row in found["rows"]:
        cells = " | ".join(f"{one['largest']:.1e}" for one in row["differences"])
        largest = max(one["largest_output"] for one in row["differences"])
        lines.append(f"| `{row['network']}` | {cells} | {largest:.2f} | {row['megabytes']} |")
    versions = found["environment"]
    return [*lines, "", f"torch {versions['torch'].split('+')[0]}, onnxruntime {versions['onnxruntime']}."]


def converters() -> list[str]:
    """How far each converter's result is from PyTorch, for each packaged network."""
    found = _read("converters.json")
    cells = {(row["network"], row["converter"]): row["largest"] for row in found["rows"]}
    versions = {row["converter"]: row["versions"] for row in found["rows"]}
    lines = ["| | " + " | ".join(versions) + " |", "|---|" + "---:|" * len(versions)]
    for network in dict.fromkeys(network for network, _ in cells):
        lines.append(f"| `{network}` | " + " | ".join(f"{cells[network, one]:.1e}" for one in versions) + " |")
    listed = ", ".join(f"{name} {version}" for one in versions.values() for name, version in one.items())
    return [*lines, "", f"{listed}, torch {found['environment']['torch'].split('+')[0]}."]


def latency() -> list[str]:
    """Time over MobileNetV2's in the same runtime."""
    found = _read("export-cpu.json")
    rows = {(row["network"], row["runtime"]): row for row in found["rows"]}
    runtimes = list(dict.fromkeys(runtime for _, runtime in rows))
    lines = [f"| | {' | '.join(runtimes)} |", "|---|" + "---:|" * len(runtimes)]
    for name in dict.fromkeys(name for name, _ in rows):
        cells = (rows[name, runtime] for runtime in runtimes)
        lines.append(
            f"| `{name}` | "
            + " | ".join(f"{cell['over_base']:.2f} ({readme._three(cell['milliseconds'])} ms)" for cell in cells)
            + " |"
        )
    environment = found["environment"]
    return [*lines, "", f"Threads: {environment['threads']}. {readme._environment(found)}"]


def insert() -> list[str]:
    """What attention adds to each example."""
    found = _read("insert-cpu.json")
    lines = [
        "| | parameters | MAdd | inference | training |",
        "|---|---:|---:|---:|---:|",
    ]
    for row in found["rows"]:
        params, madd = (row[f"{what}_with"] / row[f"{what}_without"] for what in ("params", "madd"))
        lines.append(
            f"| {EXAMPLES[row['example']]} "
            f"| {params:.3f}× ({row['params_with']:,}) | {madd:.3f}× ({row['madd_with']:,}) "
            f"| {row['inference_ratio']:.2f}× ({readme._three(row['inference_ms']['with'])} ms) "
            f"| {row['training_ratio']:.2f}× ({readme._three(row['training_ms']['with'])} ms) |"
        )
    return [*lines, "", readme._environment(found)]


def imagenette() -> list[str]:
    """Seven networks, one recipe."""
    told = ("score", "over the first", "parameters", "MAdd", "images a second", "waiting for data")
    return readme.comparison("imagenette.json", told)


def graphs() -> list[str]:
    """Training compiled, without and with CUDA graphs."""
    found = _read("training-graphs-h200.json")
    return [
        "| | `compile` | images a second | waiting for data |",
        "|---|---|---:|---:|",
        *(
            f"| `{row['model']}` | `{str(row['compile']).lower()}` | {row['images_per_second']:,.0f} "
            f"| {row['waiting_for_data']:.1%} |"
            for row in found
        ),
        "",
        readme._environment(found[0]),
    ]


def camvid() -> list[str]:
    """Four heads, one recipe."""
    told = ("score", "over the first", "pixel accuracy", "MAdd", "peak memory", "images a second")
    return readme.comparison("camvid.json", told)


def camvid_test() -> list[str]:
    """The same heads on the test images, one seed."""
    return readme.table(
        ["mean IoU", "pixel accuracy", "images"],
        {
            row["model"]: [f"{row['mean_iou']:.1%}", f"{row['pixel_accuracy']:.1%}", str(row["images"])]
            for row in _read("camvid-test.json")
        },
    )


def pretrained() -> list[str]:
    """What comes with the package, examined."""
    shares = {"top1": ".2%", "top5": ".2%", "calibration_error": ".1%", "images": ","}
    return readme.table(
        ["top-1", "top-5", "calibration error", "images"],
        {row["model"]: [format(row[key], how) for key, how in shares.items()] for row in _read("pretrained.json")},
    )


def int8() -> list[str]:
    """The same in 8 bits."""

    def cells(row: dict[str, Any]) -> list[str]:
        accuracy = [f"{row['accuracy'][kind]:.2%}" for kind in ("pytorch", "int8")]
        return [*accuracy, f"{row['bytes'] / 1e6:.1f}", f"{row['accuracy_images']:,}"]

    rows = {row["model"]: cells(row) for row in _read("export-int8.json")}
    return readme.table(["float32", "8 bits", "MB", "images"], rows)


HEADS = {
    "aspp": "ASPP",
    "attn": "regular attention",
    "attn_fused": "regular, fused (PyTorch's)",
    "kao_kv": "**KAO_KV**",
    "kao_qkv": "**KAO_QKV**",
}


def heads() -> list[str]:
    """Time and memory of each head beyond the features."""
    found = _read("heads-h200.json")
    rows = {(row["size"], row["work"], row["head"]): row for row in found["rows"]}
    lines = [
        "| | head | inference | over regular | memory | training | over regular | memory |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for size in found["settings"]["sizes"]:
        for head, name in HEADS.items():
            cells = []
            for work in ("inference", "training"):
                row = rows[size, work, head]
                cells += [
                    f"{readme._three(row['time_ms'])} ms",
                    f"{row['speedup']:.1f}×",
                    f"{row['memory_bytes'] / 1e6:,.0f} MB ({row['memory_over_attn']:.1%})",
                ]
            lines.append(f"| {size}² | {name} | {' | '.join(cells)} |")
    return [*lines, "", readme._environment(found)]


TABLES = {
    "tables.md": {"table2": table2, "networks": networks},
    "use.md": {"int8": int8, "exports": exports, "converters": converters, "latency": latency},
    "kernels.md": {"kernels": readme.kernels},
    "networks.md": {"speed": readme.networks},
    "insert.md": {"insert": insert},
    "training.md": {"imagenette": imagenette, "graphs": graphs, "pretrained": pretrained},
    "segmentation.md": {"camvid": camvid, "camvid-test": camvid_test, "heads": heads},
}


def _read(name: str) -> Any:
    return json.loads((readme.RESULTS / name).read_text())


def rendered(page: Path) -> str:
    """A page with every marked table written anew."""
    text = page.read_text()
    for name, table in TABLES[page.name].items():
        block = f"<!-- {name} -->\n\n" + "\n".join(table()) + f"\n\n<!-- /{name} -->"
        pattern = rf"<!-- {name} -->.*?<!-- /{name} -->"
        parts = re.split(pattern, text, flags=re.DOTALL)
        if len(parts) != 2:
            raise SystemExit(f"{page.name} has {len(parts) - 1} tables marked {name!r}, expected one")
        text = block.join(parts)
    return text


def main() -> int:
    """Rewrite the pages, or with --check tell whether that would change them."""
    stale = []
    for name in TABLES:
        page = DOCS / name
        after = rendered(page)
        if after != page.read_text():
            stale.append(name)
            if "--check" not in sys.argv[1:]:
                page.write_text(after)
    if stale and "--check" in sys.argv[1:]:
        print(f"{', '.join(stale)} not what results/ say: run python tools/docs_tables.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
