"""``kronattn study``: data sets × context layers × seeds, from a file of rules to tables and figures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kronattn.cli.options import TakeTurns, figure_file, listed, output_file, show_tables
from kronattn.cli.output import be_quiet, check_writable, print_json, progress, say, write_atomically, write_figure
from kronattn.extras import require_library

__all__ = ["study"]


def study(
    file: str = typer.Argument(..., help="The study: a YAML file, or the name of one of ours.", metavar="STUDY"),
    data: Path = typer.Option(..., help="The folder that the study's data lie in."),
    output: Annotated[
        Path | None,
        output_file(
            "--output",
            "-o",
            help="The JSON file, which it goes on from. Default: results/STUDY.json.",
            suffixes=(".json",),
        ),
    ] = None,
    page: Path | None = typer.Option(None, help="The page of tables and figures. Default: beside the JSON, .html."),
    folder: Path | None = typer.Option(None, help="For the runs' logs and histories. Default: runs/study-STUDY."),
    taken: str = typer.Option("", "--from", help="Comma-separated JSON files to take runs from, of any study."),
    only: str = typer.Option("", help="Comma-separated data sets of the study. Default: all."),
    jobs: int = typer.Option(1, min=1, help="Processes that train side by side on the device."),
    take_turns: TakeTurns = False,
    minutes: float | None = typer.Option(
        None, min=0, help="Begin no run that would not end by then; 0 writes the page of what is there."
    ),
    retry: bool = typer.Option(False, "--retry", help="Do runs again that failed."),
    cost: bool = typer.Option(False, "--cost", help="Measure each layer's time and memory here, and train nothing."),
    prepare: Path | None = typer.Option(
        None, help="Write the data into this folder, scaled as the study says, and do nothing else."
    ),
    figure: Annotated[
        Path | None, figure_file("--figure", help="Draw what each layer gains into this file, .png or .svg.")
    ] = None,
    quiet: bool = typer.Option(
        False, "--quiet", "-q", callback=be_quiet, help="No progress bar, and no line for each run; failures are told."
    ),
    json: bool = typer.Option(False, "--json", help="Print one JSON object instead of the tables."),
) -> None:
    """Train each context layer on each data set with each seed, by the rules of the study's file.

    Every run is written to the JSON file as it ends: stopped and started again, the study goes on where it was. The
    exit code is 1 where a run failed.

    Example: kronattn study context --data data --jobs 8 --output results/context.json
    """
    import torch

    from kronattn.study.figures import draw_gains
    from kronattn.study.page import study_page
    from kronattn.study.prepare import prepare_data
    from kronattn.study.records import Records
    from kronattn.study.run import Progress, run_study
    from kronattn.study.settings import load_study
    from kronattn.study.summary import summarise_study
    from kronattn.study.tables import cost_table, part_table

    whole = load_study(file)
    chosen = whole.chosen(listed(only))
    if not data.is_dir():
        raise FileNotFoundError(f"--data {data} is not a folder: give the one that holds {chosen.parts[0].path}")
    if prepare is not None:
        check_writable(prepare / "data.tar", "--prepare")
        written = prepare_data(chosen, data, prepare, track=progress)
        if json:
            print_json({"written": [str(path) for path in written]})
        else:
            say(*(f"{path}: {path.stat().st_size / 1e6:.1f} MB" for path in written))
        return
    require_library("matplotlib.figure", "the study's page")
    target = check_writable(output or Path(f"results/{whole.name}.json"))
    shown = check_writable(page or target.with_suffix(".html"), "--page")
    place = folder or Path(f"runs/study-{whole.name}")
    check_writable(place / "log.txt", "--folder")
    _check_different({"--output": target, "--page": shown, "--figure": figure})
    records = Records(whole, target, [Path(name) for name in listed(taken)])

    before = dict(records.runs)

    def report(one: Progress) -> None:
        record = one.record
        if quiet and not record["failure"]:
            return
        score = record["failure"] or " ".join(
            f"{name} {100 * record[name]:.2f}%" for name in ("validation", "test") if record[name] is not None
        )
        rate = f" lr {record['lr']:g}"
        typer.echo(f"[{one.done}/{one.total}] {one.run.key}{rate}: {score} ({record['seconds']:.0f} s)", err=True)

    missing = 0
    if cost:
        # Not before: Lightning, which it reads the data with, takes seconds to import, and other processes train.
        from kronattn.study.costs import measure_costs

        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        for name, measured in measure_costs(chosen, data, device).items():
            records.costs.setdefault(name, {}).update(measured)
    else:
        missing = run_study(
            chosen,
            data,
            records,
            place,
            jobs=jobs,
            take_turns=take_turns,
            minutes=minutes,
            retry=retry,
            on_run=report,
        )
    records.write()
    found = records.as_dict()
    write_atomically(shown, study_page(found))
    summary = summarise_study(found)
    measured = [part for part in summary if part["runs"]]
    if figure is not None:
        if any(entry["differences"] for part in measured for entry in part["layers"]):
            write_figure(figure, draw_gains(measured, whole.references))
        else:
            typer.echo(f"No figure {figure}: there is nothing yet to compare with {whole.references[0]}", err=True)
    if json:
        print_json({"summary": summary, "missing": missing, "output": str(target), "page": str(shown)})
    else:
        show_tables(table for part in measured for table in (part_table(part), cost_table(part, found["costs"])))
        rest = f", {missing} runs are still to be done: the same command goes on" if missing else ""
        say(f"Results: {target}, page: {shown}{rest}")
    if any(run["failure"] for key, run in records.runs.items() if run is not before.get(key)):
        raise typer.Exit(1)


def _check_different(files: dict[str, Path | None]) -> None:
    """Refuse options of which one would write over what another wrote."""
    taken: dict[Path, str] = {}
    for option, path in files.items():
        if path is not None and (other := taken.setdefault(path.resolve(), option)) != option:
            raise ValueError(f"{option} {path} is where {other} goes: give another file")
