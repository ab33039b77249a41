"""A study's runs: those that choose each layer's learning rate, and those that count."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from kronattn.study.settings import Layer, Part, Study
from kronattn.study.stages import FINAL, SWEEP
from kronattn.training.recipe import Recipe, recipe_yaml, without_places

__all__ = ["CannotChoose", "Run", "choose_rate", "plan_runs"]


class CannotChoose(ValueError):
    """No run that would choose a learning rate came to its end."""


@dataclass(frozen=True)
class Run:
    """One training of one layer. The learning rate of those that count is known once the sweep has chosen."""

    part: Part
    layer: Layer
    stage: str
    seed: int
    fold: int | None = None
    rate: float | None = None

    @property
    def place(self) -> tuple[str, str, int | None]:
        """What shares a choice of the learning rate."""
        shared = self.fold if self.part.sweep_folds == "each" or not self.part.folds else self.part.folds[0]
        return self.part.name, self.layer.name, shared

    @property
    def key(self) -> str:
        """What the run is called in results, without the learning rate that a sweep chose."""
        words = [self.part.name, self.layer.name, self.stage]
        words += [f"lr{self.rate:g}"] if self.stage == SWEEP else []
        words += [f"fold{self.fold}"] if self.fold is not None else []
        return "/".join([*words, f"seed{self.seed}"])

    def recipe(self, data: Path, rate: float | None) -> Recipe:
        """What is trained, with the data below ``data``; ``rate`` in the place of the recipe's learning rate."""
        base = self.part.base
        options = dict(base.model.options)
        if self.layer.options:
            options["context_options"] = dict(self.layer.options)
        settings = replace(base.data, path=str(data / self.part.path))
        if self.fold is not None:
            settings = replace(settings, images=replace(settings.images, fold=self.fold))
        return replace(
            base,
            model=replace(base.model, context=self.layer.context, options=options),
            optimiser=base.optimiser if rate is None else replace(base.optimiser, lr=rate),
            data=settings,
            seed=self.seed,
        )

    @property
    def options(self) -> dict[str, Any]:
        """For :func:`kronattn.training.run.train`: the test is for runs that count."""
        return {"figures_only": True, "test": "test" if self.stage == FINAL else None}


def fingerprint(recipe: Recipe) -> str:
    """What tells results of these settings from those of others, wherever the data lay."""
    return hashlib.sha256(recipe_yaml(without_places(recipe)).encode()).hexdigest()[:16]


def plan_runs(study: Study) -> list[Run]:
    """All runs, in the order in which they are worth most if the study is stopped: one data set after another, first
    those that choose, then all layers with the first seed, with the second, ..."""
    runs = []
    for part in study.parts:
        layers = [study.layers[name] for name in part.layers]
        folds: Sequence[int | None] = tuple(part.folds) or (None,)
        choosing = folds if part.sweep_folds == "each" else folds[:1]
        if len(part.learning_rates) > 1:
            runs += [
                Run(part, layer, SWEEP, seed, fold, rate)
                for seed in part.seeds_that_choose
                for fold in choosing
                for layer in layers
                for rate in part.learning_rates
            ]
        seeds = sorted({seed for layer in layers for seed in part.seeds_for(layer.name)})
        runs += [
            Run(part, layer, FINAL, seed, fold)
            for seed in seeds
            for fold in folds
            for layer in layers
            if seed in part.seeds_for(layer.name)
        ]
    return runs


def choose_rate(run: Run, sweep: Mapping[float, Sequence[float]]) -> float | None:
    """The learning rate of a run that counts: the best by validation; ``None`` for the recipe's own.

    Args:
        sweep: validation scores of the runs that choose, by learning rate; those that failed have none.

    One with which runs failed is taken only where all have such runs. Of equal ones the first is taken.
    """
    rates = run.part.learning_rates
    if not rates:
        return None
    if len(rates) == 1:
        return rates[0]
    finished = {rate: (len(scores), mean(scores)) for rate, scores in sweep.items() if scores}
    if not finished:
        raise CannotChoose(f"no run came to its end with any learning rate of {', '.join(f'{x:g}' for x in rates)}")
    return max(finished, key=lambda rate: finished[rate])
