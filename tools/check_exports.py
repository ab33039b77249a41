"""Writes how far other runtimes are from PyTorch: python tools/check_exports.py networks, or converters.

`networks` exports every network in full, with dynamic sizes, into results/export-check.json: minutes, most of them in
PyTorch's exporter (the tests export the same networks with fewer modules). `converters` converts the packaged networks
with those that are installed of openvino, onnxslim, onnxsim, and pnnx with ncnn, into results/converters.json.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from typing import Any

import numpy as np
import torch

import kronattn
from kronattn.export import export_network, rewritten
from kronattn.export.runtime import run_onnx
from kronattn.measure import describe_environment
from kronattn.models.files import Description, load_model
from kronattn.models.registry import packaged_names

RESULTS = Path(__file__).resolve().parent.parent / "results"


def check_network(name: str) -> dict[str, object]:
    """One network, its batch norms settled so that outputs are of ordinary size."""
    torch.manual_seed(0)
    options = {} if name.startswith("deeplab") else {"num_classes": 10}
    model = kronattn.create_model(name, **options).train()
    with torch.no_grad():
        for _ in range(12):
            model(torch.randn(4, 3, 64, 64))
    start = time.perf_counter()
    exported = export_network(model, Description(name, options))
    differences = [one.to_json() for one in exported.differences]
    print(f"{name}: {exported.largest}, {time.perf_counter() - start:.0f} s", file=sys.stderr)
    return {"network": name, "megabytes": round(len(exported.content) / 1e6, 1), "differences": differences}


def openvino(path: Path, images: np.ndarray) -> np.ndarray:
    import openvino

    compiled = openvino.Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return compiled(images)[0]


def onnxslim(path: Path, images: np.ndarray) -> np.ndarray:
    import onnxslim

    return run_onnx(onnxslim.slim(str(path)).SerializeToString())(torch.from_numpy(images)).numpy()


def onnxsim(path: Path, images: np.ndarray) -> np.ndarray:
    import onnx
    import onnxsim

    simplified, same = onnxsim.simplify(onnx.load(path))
    if not same:
        raise RuntimeError("onnxsim's own check failed")
    return run_onnx(simplified.SerializeToString())(torch.from_numpy(images)).numpy()


def ncnn(path: Path, images: np.ndarray) -> np.ndarray:
    """By way of the module: pnnx reads ONNX too, but loses the axes of a mean there and is then far off."""
    import ncnn
    import pnnx

    model, _ = load_model(path.stem)
    with chdir(path.parent), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pnnx.export(rewritten(model), f"{path.stem}.pt", torch.from_numpy(images), fp16=False)
    net = ncnn.Net()
    net.opt.use_fp16_storage = net.opt.use_fp16_packed = net.opt.use_fp16_arithmetic = False
    net.load_param(str(path.with_suffix(".ncnn.param")))
    net.load_model(str(path.with_suffix(".ncnn.bin")))
    extractor = net.create_extractor()
    extractor.input("in0", ncnn.Mat(images[0]).clone())
    failed, output = extractor.extract("out0")
    if failed:
        raise RuntimeError("ncnn could not run the network")
    return np.array(output)[None]


# What brings each, and how it is run.
CONVERTERS: dict[str, tuple[tuple[str, ...], Callable[[Path, np.ndarray], np.ndarray]]] = {
    "OpenVINO": (("openvino",), openvino),
    "onnxslim": (("onnxslim",), onnxslim),
    "onnxsim": (("onnxsim",), onnxsim),
    "ncnn": (("pnnx", "ncnn"), ncnn),
}


def check_converters(name: str) -> list[dict[str, Any]]:
    """One network, as `kronattn export NAME` writes it, through each converter."""
    model, description = load_model(name)
    exported = export_network(model, description, dynamic=False)
    images = torch.randn(1, 3, description.size, description.size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(images).numpy()
    rows = []
    for converter, (packages, run) in CONVERTERS.items():
        try:
            versions = {package: importlib.metadata.version(package) for package in packages}
        except importlib.metadata.PackageNotFoundError as missing:
            print(f"{converter} left out: {missing} is not installed", file=sys.stderr)
            continue
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"{name}.onnx"
            path.write_bytes(exported.content)
            largest = float(np.abs(run(path, images.numpy()) - expected).max())
        rows.append({"network": name, "converter": converter, "versions": versions, "largest": largest})
        print(f"{name} in {converter}: {largest:.1e}", file=sys.stderr)
    return [row | {"largest_output": float(np.abs(expected).max())} for row in rows]


def main() -> int:
    """Check what is asked for, and write its file."""
    if sys.argv[1:] == ["networks"]:
        rows: list[Any] = [check_network(name) for name in kronattn.list_models()]
        target, packages = "export-check.json", ["onnx", "onnxruntime"]
    elif sys.argv[1:] == ["converters"]:
        rows = [row for name in packaged_names() for row in check_converters(name)]
        target, packages = "converters.json", []
    else:
        raise SystemExit(__doc__)
    found = {"rows": rows, "environment": describe_environment(packages=packages)}
    (RESULTS / target).write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
