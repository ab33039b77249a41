"""Networks against torchvision's MobileNetV2 on a GPU: python benchmarks/networks.py results/networks-h200.json.

As ``kronattn bench networks``, for machines without the command's dependencies. Every network and kind of work has a
process of its own, so that all of them compile at the same time; then they take turns, one at a time, in rounds.
The file holds medians over the rounds with their quartiles, and beside them the ratios of every round. A network's name
may end in "@torch": then its attention runs on the torch backend.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import statistics
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from kronattn.bench.networks import BASE, Settings, Speed, _call, to_json
from kronattn.measure import peak_memory
from kronattn.ops import backends

WORKS = ("inference", "training")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--models", default="mobilenetv2,mobilenetv2_kao,kanet_without_kao,kanet_kv,kanet_qkv")
    parser.add_argument("--how", default="eager", choices=("eager", "compiled"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.2, help="of one turn")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--at-once", type=int, default=4, help="how many run their first step, about 20 GB, together")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--wait-for", type=Path, help="measure once this file exists")
    given = parser.parse_args()
    settings = Settings(torch.device(given.device), torch.bfloat16, given.batch, given.size, True, given.seconds)
    names = list(dict.fromkeys([BASE, *given.models.split(",")]))
    context = mp.get_context("spawn")
    few = context.Semaphore(given.at_once)
    pipes = {}
    for work in WORKS[::-1]:
        for name in names:
            ours, theirs = context.Pipe()
            arguments = (theirs, few, name, work, given.how, settings)
            context.Process(target=_work, args=arguments, daemon=True).start()
            theirs.close()
            pipes[work, name] = ours
    failed = {}
    for (work, name), pipe in pipes.items():
        answer = _ask(pipe, None)
        print(f"{name}, {work}: {answer}", file=sys.stderr, flush=True)
        if answer != "ready":
            failed[work, name] = answer
    while given.wait_for and not given.wait_for.exists():
        time.sleep(0.5)
    speeds, ratios = [], {}
    for work in WORKS:
        if (work, BASE) in failed:
            continue
        able = [name for name in names if (work, name) not in failed]
        rounds = [{name: _ask(pipes[work, name], given.seconds) for name in able} for _ in range(given.rounds)]
        base = statistics.median(times[BASE] for times in rounds)
        for name in able:
            times = sorted(times[name] for times in rounds)
            lower, median, upper = statistics.quantiles(times, n=4, method="inclusive")
            images = given.batch / median
            spread = given.batch / upper, given.batch / lower
            memory = _ask(pipes[work, name], "memory")
            speeds.append(Speed(name, work, given.how, images, spread, base / median, memory))
            ratios[f"{name}, {work}"] = sorted(times[BASE] / times[name] for times in rounds)
    found = to_json(speeds, settings)
    found["command"] = " ".join(["python", *sys.argv])
    found["ratios_of_rounds"] = ratios
    found["failed"] = {f"{name}, {work}": reason for (work, name), reason in failed.items()}
    given.output.write_text(json.dumps(found, indent=2) + "\n")
    for speed in speeds:
        low, *_, high = ratios[f"{speed.network}, {speed.work}"]
        print(
            f"{speed.network}, {speed.work}, {speed.how}: {speed.images_per_second:.0f} images/s, "
            f"{speed.ratio:.3f} ({low:.3f} to {high:.3f})"
        )
    if failed:
        sys.exit(1)


def _ask(pipe: Connection, question: Any) -> Any:
    """The answer of a process, or why there is none."""
    try:
        if question is not None:
            pipe.send(question)
        return pipe.recv()
    except (EOFError, OSError):
        return "its process has ended"


def _work(pipe: Connection, few: Any, name: str, work: str, how: str, settings: Settings) -> None:
    """Compile, say so, and answer until nobody asks: to a number of seconds with a step's seconds, else with bytes."""
    network, _, backend = name.partition("@")
    if backend:
        backends._AUTOMATIC = (backend,)
    cuda = settings.device.type == "cuda"
    try:
        call = _call(network, work, how, settings)
        with few, torch.inference_mode():
            for _ in range(3):
                call()
            _finish(cuda)
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {' '.join(str(error).split())[:500]}")
        return
    pipe.send("ready")
    with torch.inference_mode():
        while True:
            try:
                question = pipe.recv()
            except EOFError:
                return
            if question == "memory":
                pipe.send(peak_memory(call, device=settings.device))
            else:
                for _ in range(3):
                    call()  # the memory was given back, and caches hold another network's data
                once = _seconds(call, 1, cuda)
                pipe.send(_seconds(call, max(3, round(question / once)), cuda))
            _finish(cuda)


def _seconds(call: Any, repeats: int, cuda: bool) -> float:
    if cuda:
        torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(repeats):
        call()
    if cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - begun) / repeats


def _finish(cuda: bool) -> None:
    """Leave the memory to the others."""
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
