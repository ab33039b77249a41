"""Exports every network in full, with dynamic sizes, and writes how far ONNX is from PyTorch into results/.

Takes minutes, most of them inside PyTorch's exporter: the tests export the same networks with fewer modules.
Run `python tools/check_exports.py` with the package and its extra [export] installed.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

import kronattn
from kronattn.export import export_network
from kronattn.measure import describe_environment
from kronattn.models.files import Description

OUTPUT = Path(__file__).resolve().parent.parent / "results" / "export-check.json"


def check(name: str) -> dict[str, object]:
    """One network, its batch norms settled so that outputs are of ordinary size."""
    torch.manual_seed(0)
    options = {} if name.startswith("deeplab") else {"num_classes": 10}
    model = kronattn.create_model(name, **options).train()
    with torch.no_grad():
        for _ in range(12):
            model(torch.randn(4, 3, 64, 64))
    start = time.perf_counter()
    exported = export_network(model, Description(name, options))
    differences = [
        {"size": list(one.size), "largest": one.absolute, "largest_output": one.outputs} for one in exported.differences
    ]
    print(f"{name}: {exported.largest}, {time.perf_counter() - start:.0f} s", file=sys.stderr)
    return {"network": name, "megabytes": round(len(exported.content) / 1e6, 1), "differences": differences}


def main() -> int:
    """Check all networks, or those named, and write the file."""
    import onnx
    import onnxruntime

    rows = [check(name) for name in sys.argv[1:] or kronattn.list_models()]
    versions = {"onnx": onnx.__version__, "onnxruntime": onnxruntime.__version__}
    OUTPUT.write_text(json.dumps({"rows": rows, "environment": describe_environment() | versions}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
