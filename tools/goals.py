"""The goals of results/README.md beside what the files in results/ say of them. What misses its aim is set in bold."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stored import compared, decided, read, row_of

from kronattn.measure import Comparison, Way
from kronattn.present import Column, Table, tabulate
from kronattn.study.summary import summarise_study

# The number that is judged, and how it is written.
Figure = tuple[float, str]
# What is measured, its aim in words, and the figures.
Goal = tuple[str, str, list[Figure]]

MODES = ("kv", "qkv")
MEAN = "global_mean"
# Studies of layers with gates beside a mean.
GATED = ("study-camvid-small", "study-gate-mean")
SHAPES = ((512, 32, 28), (512, 64, 14), (512, 96, 14), (64, 64, 56))
ALL_SHAPES = (*SHAPES, (512, 160, 7), (16, 64, 128), (4, 64, 512))


def goal_tables() -> list[Table]:
    """One table: operators, networks and heads on a GPU, training and what was learned, then one image on a CPU."""
    columns = {
        "": lambda goal: goal[0],
        Column("aim", numeric=False): lambda goal: goal[1],
        Column("measured", numeric=False): lambda goal: ", ".join(
            written(figure, goal[1], at) for at, figure in enumerate(goal[2])
        ),
    }
    goals = [*operators(), *networks(), *heads(), *stages(), *mean_once(), *training(), *evidence(), *latency()]
    return [tabulate("", columns, goals)]


def written(figure: Figure, aim: str, at: int) -> str:
    """A figure, in bold where it misses its aim; an aim may have a number for each figure."""
    value, text = figure
    kind, numbers = re.match(r"(at most|at least|within|under) ([\d., ]+)", aim).groups()  # type: ignore[union-attr]
    bounds = [float(number.replace(",", "")) for number in re.split(r", ", numbers.strip())]
    bound = bounds[min(at, len(bounds) - 1)] / (100 if "%" in aim else 1)
    missed = value < bound if kind == "at least" else value > bound
    return f"**{text}**" if missed else text


def operators() -> Iterator[Goal]:
    """Kronecker attention beside a copy of its input and beside flash attention."""
    found = compared("operators-h200")

    def copies(mode: str, shape: tuple[int, int, int], work: str = "inference") -> Figure:
        row = row_of(found, f"kao_{mode}", Way(operator_case(shape), work, "graphs"))
        copy = row_of(found, "copy", Way(operator_case(shape), "inference", "graphs"))
        rounds = [own / theirs for own, theirs in zip(row.rounds_ms, copy.rounds_ms, strict=True)]
        return spread((row.time_ms or 0) / (copy.time_ms or 1), min(rounds), max(rounds))

    def over_flash(mode: str, shape: tuple[int, int, int], how: str) -> Figure:
        return over(found, f"kao_{mode}", Way(operator_case(shape), how=how), "attn_fused")

    for mode, aim in (("qkv", "at most 1.5"), ("kv", "at most 2.0")):
        yield (
            f"KAO_{mode.upper()} forward over a copy of x: {listed(SHAPES)}",
            aim,
            [copies(mode, shape) for shape in SHAPES],
        )
    for mode in ("qkv", "kv"):
        figures = [copies(mode, shape, "training") for shape in SHAPES]
        yield f"KAO_{mode.upper()} forward and backward, the same shapes", "at most 5", figures
    for shape, aim in (((16, 64, 128), "at most 2.0"), ((4, 64, 512), "at most 3.0")):
        figures = [copies(mode, shape) for mode in MODES]
        yield f"forward at ({shape[0]}, {shape[1]}, {shape[2]}²): KAO_KV, KAO_QKV", aim, figures
    large = [over_flash("qkv", shape, "graphs") for shape in ((64, 64, 56), (16, 64, 128))]
    yield "KAO_QKV over flash attention: (64, 64, 56²), (16, 64, 128²)", "at least 20, 70", large
    small = [over_flash(mode, (8, 8, 56), "eager") for mode in MODES]
    yield "eager call at (8, 8, 56²) over flash attention: KAO_KV, KAO_QKV", "at least 2", small
    way = Way(operator_case((64, 64, 56)), how="graphs")
    memory = [found.share(row_of(found, f"kao_{mode}", way), "copy", "memory_bytes") or 0 for mode in MODES]
    yield "memory beyond input and output at (64, 64, 56²), of x", "under 5%", [percent(one - 1) for one in memory]


def networks() -> Iterator[Goal]:
    """Networks over torchvision's, before attention ran in three stages."""
    case = {"batch": 512, "size": 224}
    for name, how in (("networks-h200", "eager"), ("networks-h200-compiled", "compiled")):
        found = compared(name)
        for work in ("training", "inference"):
            names = ("kanet_kv", "kanet_qkv_as_printed")
            figures = [over(found, network, Way(case, work, how)) for network in names]
            what = f"kanet_kv, kanet_qkv as printed over torchvision's mobilenet_v2: {work}, {how}"
            yield f"before the three stages, {what}", "at least 1.0", figures


def heads() -> Iterator[Goal]:
    """Segmentation heads, before attention ran in three stages."""
    found = compared("heads-h200")
    for work in ("inference", "training"):
        figures = [over(found, f"kao_{mode}", Way(head_case(513), work)) for mode in MODES]
        what = f"KAO_KV and KAO_QKV heads over the regular head at 513²: {work}"
        yield f"before the three stages, {what}", "at least 5", figures
    for work in ("inference", "training"):
        rows = [row_of(found, f"kao_{mode}", Way(head_case(1025), work)) for mode in MODES]
        shares = [percent(found.share(row, "attn", "memory_bytes") or 0) for row in rows]
        yield f"their memory beyond the features at 1025², of the regular head's: {work}", "under 10%", shares


def stages() -> Iterator[Goal]:
    """The same since attention runs in three stages, and over the tree before."""
    found, since = compared("networks-eager-h200"), "since the three stages, kanet_kv and kanet_qkv"
    works = ("training", "inference")
    case = {"batch": 512, "size": 224}
    for work in works:
        figures = [over(found, f"kanet_{mode}", Way(case, work)) for mode in MODES]
        yield f"{since} over torchvision's, eager: {work}", "at least 1.2", figures
    found = compared("stages-networks-h200")
    for how, batch in (("graphs", 256), ("compiled", 512)):
        for work in works:
            way = Way({"batch": batch, "size": 224}, work, how)
            figures = [over(found, f"kanet_{mode}", way, f"kanet_{mode} (old)") for mode in MODES]
            yield f"{since} over the tree before, {how}: {work}", "at least 0.97", figures
    found = compared("heads-513-h200")
    for how in ("graphs", "eager"):
        for work in reversed(works):
            figures = [over(found, f"kao_{mode}", Way(head_case(513), work, how)) for mode in MODES]
            what = f"KAO heads since the three stages over the regular head at 513², {how}: {work}"
            yield what, "at least 5", figures
    found, before = compared("operators-h200"), compared("operators-before-h200")
    for mode in MODES:
        for work in reversed(works):
            figures = [slower(found, before, f"kao_{mode}", shape, work) for shape in ALL_SHAPES]
            what = f"KAO_{mode.upper()} by itself, {work}, time over the tree before: {listed(ALL_SHAPES)}"
            yield what, "at most 1.15", figures


def slower(found: Comparison, before: Comparison, name: str, shape: tuple[int, int, int], work: str) -> Figure:
    """The time of an operator by itself, over its time before."""
    way = Way(operator_case(shape), work, "graphs")
    new, old = (row_of(one, name, way).time_ms or 0 for one in (found, before))
    return spread(new / old, None, None)


def mean_once() -> Iterator[Goal]:
    """What it costs a network to count the mean once."""
    what, aim = "kanet_qkv over kanet_qkv_as_printed", "at least 0.98"
    for names, work, how, batch in (
        (("once-graphs-h200",), "training", "graphs", 256),
        (("once-graphs-h200",), "inference", "graphs", 256),
        (("once-compiled-h200",), "training", "compiled", 512),
        # The code of inference is the same in both.
        (("once-compiled-before-h200", "once-compiled-h200"), "inference", "compiled", 512),
    ):
        way = Way({"batch": batch, "size": 224}, work, how)
        figures = [over(found, "kanet_qkv", way, "kanet_qkv_as_printed") for found in map(compared, names)]
        yield f"{what}, {how}: {work}{', two runs' if len(names) > 1 else ''}", aim, figures


def training() -> Iterator[Goal]:
    """How long training takes, how good it is, and what it waits for."""
    whole, compare, many, camvid = (read("training-h200")[part] for part in ("whole", "compare", "many", "camvid"))
    seconds, first = whole["seconds_to_weights"], whole["seconds_to_first_epoch"]
    what = "kanet_kv, 60 epochs of Imagenette, nothing compiled before, command to weights (to the first epoch's end)"
    yield what, "at most 90 s", [(seconds, f"{seconds:.0f} s ({first:.0f} s)")]
    speed = whole["images_per_second"]
    yield "its images a second from the second epoch on", "at least 12,000", [(speed, f"{speed:,.0f}")]
    yield "time that it waits for data", "under 5%", [percent(whole["waiting_for_data"])]
    speed, plain = (camvid[way]["images_per_second"] for way in ("auto", "false"))
    what = f"DeepLabV2 with KAO_KV on CamVid, 80 epochs: images a second ({plain:,.0f} without graphs)"
    yield what, "at least 1,000", [(speed, f"{speed:,.0f}")]
    what = (
        f"`compare`, 4 networks × 5 seeds of {compare['epochs']} epochs at 160 px, {compare['jobs']} at once; "
        f"a study's {many['runs']} runs at 96 px, twelve at once: images a second, everything counted"
    )
    figures = [(one["images_per_second"], f"{one['images_per_second']:,.0f}") for one in (compare, many)]
    yield what, "at least 25,000", figures
    figures = [percent(one["gpu_busy_percent"] / 100) for one in (compare, many)]
    yield "how busy the GPU is meanwhile, start included", "at least 90%", figures
    step, way = compared("training-step-h200"), Way({"batch": 128, "size": 160}, "training", "graphs")
    figures = [over(step, f"kanet_{mode}", way, "mobilenetv2") for mode in MODES]
    yield "kanet_kv, kanet_qkv over mobilenetv2, a step of that size as a CUDA graph", "at least 0.97", figures
    digits = read("training-digits-cpu")["seconds"]
    ratio = statistics.median(digits["new"]) / statistics.median(digits["old"])
    least, most = (f"{end(digits['new']):.1f}" for end in (min, max))
    what = "`train --config digits` on two threads of a CPU, time over the tree before, three runs each"
    yield what, "at most 1.0", [(ratio, f"{ratio:.2f} ({least} to {most} s)")]
    older, once = ({row["model"]: row for row in read(name)["summary"]} for name in ("imagenette", "mean-once-h200"))
    figures = [(row["mean"], accuracy(row)) for row in (older["kanet_kv"], once["kanet_kv"])]
    yield "kanet_kv on Imagenette, top-1: with a lower rate for the classifier, without", "at least 90%", figures
    gap = 100 * (once["kanet_kv"]["mean"] - once["kanet_qkv"]["mean"])
    printed = accuracy(once["kanet_qkv_as_printed"])
    what = f"kanet_qkv there, without (as printed: {printed})"
    yield what, "within 0.5 of kanet_kv", [(gap, accuracy(once["kanet_qkv"]))]
    waits = [row["waiting_for_data"] for row in older.values()]
    text = f"{100 * min(waits):.1f} to {100 * max(waits):.1f}%"
    yield "time that training on Imagenette waits for data, seven networks", "at most 10%", [(max(waits), text)]
    loader = read("loader-h200")
    lost, least, most = (100 * (1 - share) for share in (loader["kept"], max(loader["pairs"]), min(loader["pairs"])))
    what = "what data takes off the images a second of kanet_kv's training there"
    yield what, "at most 10%", [(lost / 100, f"{lost:.1f}% ({least:.1f} to {most:.1f})")]
    graphs = [row["waiting_for_data"] for row in read("training-graphs-h200") if row["compile"] == "reduce-overhead"]
    what = "time that kanet_kv and mobilenetv2 wait for data with `compile=reduce-overhead`"
    yield what, "at most 10%", [percent(one) for one in graphs]


def latency() -> Iterator[Goal]:
    """One image on one and on two CPU threads: the middle of runs in new processes, the least and the most."""
    aims, package = {"eager": "at most 1.10"}, " with kronattn-cpu"

    def ratios(found: Comparison, candidate: str, way: Way, base: str, *, inverse: bool = False) -> Figure:
        rounds = (row_of(found, name, way).rounds_ms for name in (candidate, base))
        values = sorted(theirs / own if inverse else own / theirs for own, theirs in zip(*rounds, strict=True))
        least, middle, most = (
            f"{value:.{0 if inverse else 2}f}" for value in (values[0], statistics.median(values), values[-1])
        )
        return statistics.median(values), f"{middle} ({least} to {most})"

    for threads in ("1-thread", "2-threads"):
        found, where = compared(f"latency-repeated-{threads}"), threads.replace("-", " ")
        for how in ("eager", "eager-native", "fused", "fused-native", "compiled", "compiled-native", "onnxruntime"):
            way, plain = Way({"batch": 1, "size": 224}, how=how), how.removesuffix("-native")
            what = f"one image of 224² on {where} of a CPU over mobilenetv2, kanet_kv and kanet_qkv: {plain}"
            figures = [ratios(found, f"kanet_{mode}", way, found.base) for mode in MODES]
            yield what + package * (how != plain), aims.get(plain, "at most 1.05"), figures
        for how in ("operators", "operators-native"):
            way = Way({"batch": 8, "channels": 8, "grid": [56, 56]}, how=how)
            what = f"KAO_KV and KAO_QKV over PyTorch's fused attention at 8×8×56², {where} of a CPU"
            figures = [ratios(found, f"kao_{mode}", way, "fused attention", inverse=True) for mode in MODES]
            yield what + package * (how != "operators"), "at least 30, 400", figures


def operator_case(shape: tuple[int, int, int]) -> dict[str, Any]:
    """What operators are measured on."""
    batch, channels, side = shape
    return {"batch": batch, "channels": channels, "grid": [side, side]}


def evidence() -> Iterator[Goal]:
    """What Kronecker attention gains where the studies say so, in points."""
    parts = {part["title"]: part for part, _ in decided()}
    layers = {title: {entry["layer"]: entry for entry in part["layers"]} for title, part in parts.items()}
    kao = [f"kao_{mode}" for mode in MODES]

    def gain(title: str, layer: str, over: str) -> float:
        """Paired where the study pairs them; folds are complete, and their means differ by as much."""
        found = layers[title][layer]["differences"].get(over)
        return 100 * (found["mean"] if found else layers[title][layer]["mean"] - layers[title][over]["mean"])

    for epochs in ("14 epochs", "40 epochs", "40 epochs, clipped"):
        title = f"Imagenette, KANet, {epochs}"
        gains = [points(gain(title, layer, "none")) for layer in kao]
        yield f"{title}: KAO_KV and KAO_QKV over plain modules, points", "at least 0.5", gains
        found = [layers[title][layer]["differences"]["none"] for layer in ("global_mean", "attention", *kao)]
        widths = [points(50 * (one["high"] - one["low"])) for one in found]
        yield (
            "the same, to either side of a mean's gain, regular attention's, KAO_KV's and KAO_QKV's",
            "at most 0.4",
            widths,
        )
    for layer in kao:
        behind = [points(-gain(title, layer, "attention")) for title in parts]
        name = f"{layer.upper()} behind regular attention, points: {'; '.join(parts)}"
        yield name, "at most 0.3", behind
    four = [part for title, part in parts.items() if "Imagenette" not in title]
    for suffix, among, what in (("", four, ""), ("_gate", beside_a_mean(), " with a gate, in any study")):
        for layer in kao:
            ahead = sorted({part["name"].split("_")[0] for part in among if is_ahead(part, layer + suffix, MEAN)})
            name = f"{layer.upper()}{what}: of house fronts, CamVid, ESC-50 and hippocampus, those"
            figure = len(ahead), f"{len(ahead)} ({', '.join(ahead) or 'none'})"
            yield f"{name} with an interval above a mean", "at least 2", [figure]


def beside_a_mean() -> list[dict[str, Any]]:
    """Studies of layers with gates, each of them over a mean."""
    # The options were not compared with the mean of the same seeds, which another file has.
    options, others = read("study-options-short"), [run for run in read("study-short")["runs"] if run["layer"] == MEAN]
    for part in options["study"]["data"]:
        part["layers"].append(MEAN)
    options["study"]["references"], options["runs"] = [MEAN], [*options["runs"], *others]
    return [part for found in (options, *map(read, GATED)) for part in summarise_study(found)]


def is_ahead(part: Mapping[str, Any], layer: str, over: str) -> bool:
    """Whether a layer's interval is above zero on a data set."""
    entries = (entry for entry in part["layers"] if entry["layer"] == layer)
    return any(entry["differences"].get(over, {}).get("verdict", "").endswith("better") for entry in entries)


def listed(shapes: Sequence[tuple[int, int, int]]) -> str:
    """Shapes in words."""
    return ", ".join(f"({n}, {c}, {side}²)" for n, c, side in shapes)


def head_case(size: int) -> dict[str, int]:
    """What heads are measured on."""
    return {"size": size, "batch": 8, "channels": 2048, "stride": 8, "num_classes": 21}


def over(found: Comparison, candidate: str, way: Way, base: str | None = None) -> Figure:
    """A speed-up, with its spread where rounds were kept."""
    row = row_of(found, candidate, way)
    ratio = found.ratio(row, base)
    if ratio is None:
        raise SystemExit(f"results/ have no {base or found.base} on {way}")
    return spread(ratio.value, *((ratio.low, ratio.high) if row.rounds_ms else (None, None)))


def spread(value: float, low: float | None, high: float | None) -> Figure:
    """A ratio, and the least and the most over the rounds."""
    form = "{:.2f}" if value < 10 else "{:.1f}"
    return value, form.format(value) + ("" if low is None else f" ({form.format(low)} to {form.format(high)})")


def points(value: float) -> Figure:
    """Points of a score."""
    return value, f"{value:.2f}"


def percent(share: float) -> Figure:
    """A share."""
    return share, f"{100 * share:.1f}%"


def accuracy(row: dict[str, Any]) -> str:
    """Mean and standard deviation over the seeds."""
    return f"{100 * row['mean']:.2f} ± {100 * row['std']:.2f}%"
