"""``kronattn theorem``: Theorem 1 of the paper and the equations before it, checked."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kronattn.cli.options import Json, Picture, Quiet, show_tables
from kronattn.cli.output import progress, write_figure

__all__ = ["theorem"]


def theorem(
    height: Annotated[int, typer.Option(help="Rows of the feature maps, h.")] = 5,
    width: Annotated[int, typer.Option(help="Columns of the feature maps, w.")] = 7,
    samples: Annotated[int, typer.Option(help="Samples of each random matrix.")] = 20_000,
    confidence: Annotated[
        float, typer.Option(help="Probability that all sampled checks pass if the theorem is true.")
    ] = 0.999,
    seed: Annotated[int, typer.Option(help="Seed of the model's parameters and of the samples.")] = 0,
    quiet: Quiet = False,
    json: Json = False,
    output: Picture = None,
) -> None:
    """Check Theorem 1 and each equation before it: exactly where it can be, by sampling where not.

    Exits with 0 if all checks pass, with 1 if one does not.

    Example: kronattn theorem --height 6 --width 6 --output theorem.png
    """
    # Imported here, so that a sub-command loads what it needs and no more.
    from kronattn.distributions import check_theorem, draw_samples, draw_theorem, random_setting
    from kronattn.tables.theorem import theorem_table, to_json

    if not 0 < confidence < 1:
        raise ValueError(f"--confidence must be between 0 and 1, both excluded, got {confidence}")

    setting = random_setting(height, width, seed=seed)
    drawn = draw_samples(setting, samples, seed=seed, track=lambda blocks: progress(blocks, "Sampling"))
    checks = check_theorem(setting, drawn, confidence=confidence)
    if output is not None:
        write_figure(output, draw_theorem(setting, drawn))
    settings: dict[str, Any] = {
        "height": height,
        "width": width,
        "samples": samples,
        "confidence": confidence,
        "seed": seed,
        "output": None if output is None else str(output),
    }
    table = theorem_table(checks, confidence=confidence, samples=samples)
    show_tables([table], to_json(checks, settings) if json else None, figure=output)
    if not all(check.passed for check in checks):
        raise typer.Exit(1)
