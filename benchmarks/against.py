"""This tree against another by turns in one run: python benchmarks/against.py OTHER_SRC results/stages-h200.json.

OTHER_SRC is the ``src`` folder of another checkout (``git worktree add``, ``git archive``), or "-" for none. Every
candidate, a tree with a network or a head, has a process of its own; they get ready at the same time and then take
turns, one at a time, in rounds. The file has every round's seconds; medians with the spread of the rounds' ratios are
printed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1] / "src"
BASES = {"network": "torchvision", "head": "attn"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("other")
    parser.add_argument("output", type=Path)
    parser.add_argument("--how", default="eager,compiled,graphs", help="of the networks")
    parser.add_argument("--works", default="inference,training")
    parser.add_argument("--networks", default="torchvision,kanet_kv,kanet_qkv")
    parser.add_argument("--heads", default="attn,attn_fused,kao_kv,kao_qkv")
    parser.add_argument("--batch", type=int, default=256, help="of the networks")
    parser.add_argument("--size", type=int, default=513, help="of the images whose features the heads read")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.3, help="of one turn")
    given = parser.parse_args()
    trees = {"here": HERE} | ({} if given.other == "-" else {"other": Path(given.other).resolve()})
    rows: list[dict[str, Any]] = []
    works = given.works.split(",")
    networks: list[tuple[str, ...]] = [
        ("network", *case) for case in product(given.networks.split(","), works, given.how.split(","))
    ]
    heads: list[tuple[str, ...]] = (
        [("head", *case, "eager") for case in product(given.heads.split(","), works)] if given.heads else []
    )
    for how in dict.fromkeys(case[3] for case in networks + heads):
        for kind in ("network", "head"):
            cases = [case for case in networks + heads if case[0] == kind and case[3] == how]
            rows += _by_turns(cases, trees, given) if cases else []
            _write(given.output, rows, given)
    _show(rows)


def _by_turns(cases: list[tuple[str, ...]], trees: dict[str, Path], given: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of the cases that got ready, in both trees; the base of a kind is the same code in both, and runs in one."""
    workers = {}
    for case in cases:
        for tree, source in trees.items():
            if tree == "other" and case[1] == BASES[case[0]]:
                continue
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")])}
            command = [sys.executable, __file__, "--work", *case, str(given.batch), str(given.size), str(given.seconds)]
            workers[tree, case] = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
    ready = {key: worker for key, worker in workers.items() if _answer(worker) == "ready"}
    for key in workers.keys() - ready.keys():
        print(f"{key} failed", file=sys.stderr)
    times: dict[Any, list[float]] = {key: [] for key in ready}
    for _ in range(given.rounds):
        for key, worker in ready.items():
            assert worker.stdin is not None
            worker.stdin.write("go\n")
            worker.stdin.flush()
            times[key].append(float(_answer(worker)))
    for worker in workers.values():
        worker.kill()
    return [{"tree": tree, "case": list(case), "seconds": found} for (tree, case), found in times.items()]


def _answer(worker: subprocess.Popen[str]) -> str:
    assert worker.stdout is not None
    for line in worker.stdout:
        if line.startswith("> "):
            return line[2:].strip()
    return "ended"


def _write(path: Path, rows: list[dict[str, Any]], given: argparse.Namespace) -> None:
    import torch
    import triton

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    environment = {"gpu": gpu, "torch": torch.__version__, "triton": triton.__version__}
    command = " ".join(["python", "benchmarks/against.py", *sys.argv[1:]])
    found = {"command": command, "environment": environment, "batch": given.batch, "size": given.size, "rows": rows}
    path.write_text(json.dumps(found, indent=1) + "\n")


def _show(rows: list[dict[str, Any]]) -> None:
    times = {(row["tree"], *row["case"]): row["seconds"] for row in rows}
    for (tree, kind, name, work, how), seconds in times.items():
        if tree != "here":
            continue
        line = f"{kind} {name}, {work}, {how}: {1e3 * statistics.median(seconds):.2f} ms"
        for label, other in (
            ("other", ("other", kind, name, work, how)),
            ("base", ("here", kind, BASES[kind], work, how)),
        ):
            if other in times and other != (tree, kind, name, work, how):
                ratios = sorted(b / a for a, b in zip(seconds, times[other], strict=True))
                line += f"; over {label} {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        print(line)


def _work(kind: str, name: str, work: str, how: str, batch: str, size: str, seconds: str) -> None:
    """A process: gets ready, then runs for some seconds at each line that it reads, and tells the time of one call."""
    import torch

    call = _network(name, work, how, int(batch)) if kind == "network" else _head(name, work, int(size))
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    print("> ready", flush=True)
    for _ in sys.stdin:
        call()
        torch.cuda.synchronize()
        start, count = time.perf_counter(), 0
        while time.perf_counter() - start < float(seconds):
            call()
            count += 1
            if count % 4 == 0:
                torch.cuda.synchronize()
        torch.cuda.synchronize()
        print(f"> {(time.perf_counter() - start) / count}", flush=True)


def _network(name: str, work: str, how: str, batch: int) -> Any:
    import torch
    import torchvision

    import kronattn

    torch.manual_seed(0)
    model = torchvision.models.mobilenet_v2() if name == "torchvision" else kronattn.create_model(name)
    model = model.cuda().to(memory_format=torch.channels_last).train(work == "training")
    x = torch.randn(batch, 3, 224, 224, device="cuda").to(memory_format=torch.channels_last)
    run = torch.compile(model) if how == "compiled" else model

    def call() -> Any:
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=how != "graphs"):
            y = run(x)
        y.float().square().mean().backward()
        for p in model.parameters():
            p.grad = None

    def infer() -> Any:
        with torch.inference_mode(how != "graphs"), torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            return run(x)

    chosen = call if work == "training" else infer
    return _captured(chosen) if how == "graphs" else chosen


def _captured(call: Any) -> Any:
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        kept = call()
    return lambda kept=kept: graph.replay()


def _head(name: str, work: str, size: int) -> Any:
    import torch

    from kronattn.nn import DenseSegmentationHead, KroneckerSegmentationHead

    torch.manual_seed(0)
    positions = -(-size // 8)
    if name == "attn":
        from kronattn.tables.segmentation.candidates import MaterialisedSegmentationHead  # of this tree alone

        head: torch.nn.Module = MaterialisedSegmentationHead(2048, 21)
    elif name == "attn_fused":
        head = DenseSegmentationHead(2048, 21)
    else:
        head = KroneckerSegmentationHead(2048, 21, name.removeprefix("kao_"))
    head = head.cuda().to(torch.bfloat16).train(work == "training")
    x = torch.randn(8, 2048, positions, positions, device="cuda", dtype=torch.bfloat16)
    x = x.to(memory_format=torch.channels_last).requires_grad_(work == "training")

    def call() -> Any:
        if work == "inference":
            with torch.inference_mode():
                return head(x)
        y = head(x)
        y.backward(y)
        x.grad = None
        for p in head.parameters():
            p.grad = None
        return None

    return call


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        _work(*sys.argv[2:])
    else:
        main()
