"""A training run, from a recipe to a folder with everything it left."""

from __future__ import annotations

import csv
import io
import json
import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, LearningRateMonitor, ModelCheckpoint, RichProgressBar
from lightning.pytorch.loggers import TensorBoardLogger
from torch import nn

from kronattn.atomic import write_atomically
from kronattn.measure import count_madd, describe_environment
from kronattn.models.files import Description, build_model, read_weights, save_model
from kronattn.nn import synchronise_coefficient_norms
from kronattn.training.callbacks import History, MovingAverage, Speed, StopWhenDiverging
from kronattn.training.card import model_card
from kronattn.training.checkpoints import WholeCheckpoints, check_resumable
from kronattn.training.data import Track, TrainingData
from kronattn.training.figures import draw_curves
from kronattn.training.learner import Learner
from kronattn.training.recipe import Recipe, recipe_yaml
from kronattn.training.tasks import TASKS

__all__ = ["quiet", "read_result", "run_folder", "train"]

CONFIG, HISTORY, RESULT, CURVES = "config.yaml", "history.csv", "result.json", "curves.png"
# Where networks keep what depends on the number of classes: ours, timm's, the segmenters'.
_CLASSIFIERS = ("classifier.", "fc.", "head.")
WEIGHTS, CARD, LAST, BEST = "weights.safetensors", "README.md", "last.ckpt", "best.ckpt"


def run_folder(recipe: Recipe, name: str = "run") -> Path:
    """Where a run's files go: what the recipe says, or a name made of recipe, network and seed."""
    model = recipe.model.label.replace("/", "-")
    return Path(recipe.output or f"runs/{name}-{model}-seed{recipe.seed}")


def read_result(folder: Path) -> dict[str, Any] | None:
    """The figures of a finished run; ``None`` where there is none."""
    path = folder / RESULT
    return json.loads(path.read_text()) if path.exists() else None


def train(
    recipe: Recipe,
    *,
    folder: Path | None = None,
    resume: bool = False,
    progress: bool = False,
    track: Track = lambda items, description: items,
    callbacks: Sequence[Callback] = (),
    data_module: type[TrainingData] | None = None,
) -> dict[str, Any]:
    """Train a network after a recipe.

    Args:
        recipe: what to do.
        folder: where the run's files go; :func:`run_folder`'s by default.
        resume: continue a run that was interrupted; a finished one is returned as it is.
        progress: show a progress bar.
        track: wraps the decoding of images, in a progress bar for instance.
        callbacks: further ones.
        data_module: another way of preparing the data than the task's.

    Returns:
        The run's figures, which also go into ``result.json``.
    """
    folder = folder or run_folder(recipe)
    last = _prepare(folder, recipe, resume)
    if last is not None and (result := read_result(folder)) is not None:
        return result
    quiet()
    L.seed_everything(recipe.seed, workers=True, verbose=False)
    task = TASKS[recipe.task]
    data = (data_module or task.data)(
        recipe.data,
        recipe.batch_size // (recipe.devices * recipe.nodes),
        seed=recipe.seed,
        channels_last=recipe.channels_last,
        track=track,
    )
    description = task.describe(recipe, data)
    network = _build_network(recipe, description)
    module = task.module(network, recipe, description)
    history = History(lambda rows: write_atomically(folder / HISTORY, _csv(rows)))
    speed = Speed()
    trainer = _trainer(recipe, folder, f"val/{task.score}", [history, speed, *callbacks], progress)
    if trainer.world_size > 1 and recipe.sync_batch_norm:
        synchronise_coefficient_norms(network)
    if recipe.compile:
        network.compile(dynamic=False, mode=None if recipe.compile is True else recipe.compile)
    trainer.fit(module, data, ckpt_path=last, weights_only=True)
    if trainer.interrupted:
        raise KeyboardInterrupt
    if f"val/{task.score}" not in history.rows[-1]:
        # The last step was not the end of an epoch that is validated.
        history.rows[-1] |= trainer.validate(module, data, verbose=False)[0]
    if not trainer.is_global_zero:
        return {}
    return _finish(recipe, folder, module, history.rows, speed.results() | _skipped(data))


def _prepare(folder: Path, recipe: Recipe, resume: bool) -> Path | None:
    """Make the run's folder, or find the checkpoint to go on from."""
    last = folder / LAST
    if last.exists():
        if not resume:
            raise FileExistsError(f"{folder} holds a run already: --resume continues it, --output takes another folder")
        check_resumable(last, recipe.model.name)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / CONFIG, recipe_yaml(recipe))
    return last if last.exists() else None


def _build_network(recipe: Recipe, description: Description) -> nn.Module:
    network = build_model(description.model, description.options)
    if recipe.model.weights is not None:
        _start_from(network, Path(recipe.model.weights))
    return network.to(memory_format=torch.channels_last) if recipe.channels_last else network


def _start_from(network: nn.Module, path: Path) -> None:
    """Take a file's weights; those of a classifier for other classes are left out."""
    state, _ = read_weights(path)
    own = network.state_dict()
    misfits = [name for name in own if name not in state or state[name].shape != own[name].shape]
    if any(not name.startswith(_CLASSIFIERS) for name in misfits):
        raise ValueError(f"{path} does not fit the network: {misfits[0]} is missing or of another shape")
    network.load_state_dict({name: state[name] for name in own if name not in misfits}, strict=False)


def _trainer(recipe: Recipe, folder: Path, score: str, callbacks: list[Callback], progress: bool) -> L.Trainer:
    several = recipe.devices * recipe.nodes > 1
    watching: list[Callback] = [StopWhenDiverging(), LearningRateMonitor("step")]
    if recipe.ema is not None:
        watching.append(MovingAverage(recipe.ema))
    if progress:
        watching.append(RichProgressBar(refresh_rate=5))
    # Lightning's own save_last follows the best alone.
    keeping = {"save_on_train_epoch_end": True, "enable_version_counter": False}
    best = ModelCheckpoint(folder, Path(BEST).stem, monitor=score, mode="max", **keeping)  # type: ignore[arg-type]
    last = ModelCheckpoint(folder, Path(LAST).stem, **keeping)  # type: ignore[arg-type]
    return L.Trainer(
        accelerator=recipe.accelerator,
        devices=recipe.devices,
        num_nodes=recipe.nodes,
        strategy="ddp" if several else "auto",
        precision=recipe.precision,
        max_epochs=-1 if recipe.iterations else recipe.epochs,
        max_steps=recipe.iterations or -1,
        check_val_every_n_epoch=recipe.validate_every,
        gradient_clip_val=recipe.optimiser.clip,
        callbacks=[*watching, *callbacks, best, last],
        logger=TensorBoardLogger(folder, name="", version=""),
        plugins=[WholeCheckpoints()],
        # On the CPU PyTorch has no synchronised form of the ordinary norms; the coefficients' have one of their own.
        sync_batchnorm=several and recipe.sync_batch_norm and torch.cuda.is_available() and recipe.accelerator != "cpu",
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        benchmark=True,
        enable_progress_bar=progress,
        enable_model_summary=False,
    )


def _finish(
    recipe: Recipe, folder: Path, module: Learner, rows: list[dict[str, float]], extra: dict[str, Any]
) -> dict[str, Any]:
    """Write what a finished run leaves: weights, model card, curves and figures, these last."""
    network, task, description = module.network, TASKS[recipe.task], module.description
    network.to("cpu")
    device = module.trainer.strategy.root_device
    counted = build_model(recipe.model.name, description.options).eval()
    result: dict[str, Any] = {
        "task": recipe.task,
        "data": recipe.data.name,
        "model": recipe.model.label,
        "seed": recipe.seed,
        "epochs": len(rows),
        **{name.removeprefix("val/"): rows[-1][name] for name in rows[-1] if name.startswith("val/")},
        f"best_{task.score}": max(row[f"val/{task.score}"] for row in rows if f"val/{task.score}" in row),
        "train_loss": rows[-1]["train/loss"],
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
        "madd": count_madd(counted, torch.zeros(1, 3, description.size, description.size)),
        "size": description.size,
        **extra,
        "environment": describe_environment(device),
    }
    write_atomically(folder / HISTORY, _csv(rows))
    save_model(folder / WEIGHTS, network, description)
    write_atomically(folder / CARD, model_card(description, recipe, result))
    figure = draw_curves(
        rows, task.score, task.label, title=f"{recipe.model.name} on {recipe.data.name}, seed {recipe.seed}"
    )
    figure.savefig(folder / CURVES, dpi=150)
    write_atomically(folder / RESULT, json.dumps(result, indent=2) + "\n")
    return result


def _skipped(data: TrainingData) -> dict[str, Any]:
    bad = data.bad_images()
    return {"skipped_images": len(bad), "skipped": bad[:20]} if bad else {}


def _csv(rows: list[dict[str, float]]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row))
    stream = io.StringIO()
    writer = csv.DictWriter(stream, names, restval="")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()


def quiet() -> None:
    """Lightning's advice is for those who write against it; a recipe has settled these questions."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="lightning.*")
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
