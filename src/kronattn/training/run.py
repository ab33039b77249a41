"""A training run, from a recipe to a folder with everything it left."""

from __future__ import annotations

import csv
import io
import json
import logging
import os
import warnings
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, LearningRateMonitor, ModelCheckpoint
from torch import nn

from kronattn.atomic import replacing, write_atomically
from kronattn.measure import count_madd, describe_environment
from kronattn.models.files import Description, build_model, read_weights, save_model
from kronattn.models.weights import load_weights, unpack
from kronattn.nn import synchronise_coefficient_norms
from kronattn.training.callbacks import Fetching, History, MovingAverage, Speed, StopWhenDiverging
from kronattn.training.card import model_card
from kronattn.training.checkpoints import WholeCheckpoints, check_resumable
from kronattn.training.compiling import DECODED, compile_mode, keep_compiled_code, steps_on_device
from kronattn.training.data import Track, TrainingData
from kronattn.training.errors import explained
from kronattn.training.figures import draw_curves
from kronattn.training.freezing import FreezeBackbone
from kronattn.training.interruption import interruptible
from kronattn.training.learner import Learner
from kronattn.training.progress import Progress, progress_callback
from kronattn.training.recipe import Recipe, recipe_yaml
from kronattn.training.start import start_from
from kronattn.training.tasks import TASKS
from kronattn.training.tensorboard import TensorBoardCurves

__all__ = ["quiet", "read_result", "run_folder", "train"]

CONFIG, HISTORY, RESULT, CURVES = "config.yaml", "history.csv", "result.json", "curves.png"
WEIGHTS, LAST_WEIGHTS, CARD = "weights.safetensors", "weights-last.safetensors", "README.md"
LAST, BEST = "last.ckpt", "best.ckpt"
_WRITTEN = (CONFIG, HISTORY, RESULT, CURVES, WEIGHTS, LAST_WEIGHTS, CARD, LAST, BEST)


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
    progress: Progress = None,
    track: Track = lambda items, description: items,
    callbacks: Sequence[Callback] = (),
    data_module: type[TrainingData] | None = None,
    decoded: Path | None = None,
    store: MutableMapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Train a network after a recipe.

    Args:
        recipe: what to do.
        folder: where the run's files go; :func:`run_folder`'s by default.
        resume: continue a run that was interrupted; a finished one is returned as it is.
        progress: show a progress bar, or print a line for each epoch.
        track: wraps the decoding of images, in a progress bar for instance.
        callbacks: further ones.
        data_module: another way of preparing the data than the task's.
        decoded: a folder for decoded images, within the recipe's cache by default.
        store: decoded datasets, for the next run in this process to use again.

    Returns:
        The run's figures, which also go into ``result.json``.
    """
    folder = folder or run_folder(recipe)
    last = _prepare(folder, recipe, resume)
    if last is not None and (result := read_result(folder)) is not None:
        return result
    quiet()
    if recipe.cache is not None:
        keep_compiled_code(Path(recipe.cache))
        decoded = decoded or Path(recipe.cache) / DECODED
    L.seed_everything(recipe.seed, workers=True, verbose=False)
    task = TASKS[recipe.task]
    data = (data_module or task.data)(
        recipe.data,
        recipe.batch_size // (recipe.devices * recipe.nodes),
        seed=recipe.seed,
        channels_last=recipe.channels_last,
        track=track,
        cache=decoded,
        store=store,
    )
    description = task.describe(recipe, data)
    network = _build_network(recipe, description)
    module = task.module(network, recipe, description)
    history = History(lambda rows: write_atomically(folder / HISTORY, _csv(rows)))
    speed = Speed()
    checkpoints = WholeCheckpoints()
    watching = [history, speed, *progress_callback(progress, history, speed), *callbacks]
    trainer = _trainer(recipe, folder, f"val/{task.score}", watching, checkpoints)
    # Where steps are counted, Lightning takes the epoch that a checkpoint was written after for one that is still going
    # on: it would end it once more, and train on a batch too many where it was not validated.
    trainer.fit_loop._iteration_based_training = lambda: False  # type: ignore[method-assign]
    if trainer.world_size > 1 and recipe.sync_batch_norm:
        synchronise_coefficient_norms(network)
    if (mode := compile_mode(recipe)) is not None:
        network.compile(dynamic=False, mode=None if mode == "default" else mode)
    module.steps_on_device = data.prepared_in_step = steps_on_device(recipe, trainer.strategy.root_device)
    try:
        with interruptible(trainer):
            trainer.fit(module, data, ckpt_path=last, weights_only=True)
    except RuntimeError as error:
        raise explained(error, recipe, (folder / LAST).exists()) or error from None
    finally:
        # Checkpoints are written by a thread, which an interrupted run has to wait for as well.
        checkpoints.finish()
    late = f"val/{task.score}" not in history.rows[-1]
    if late:
        # The last step was not the end of an epoch that is validated.
        history.rows[-1] |= trainer.validate(module, data, verbose=False)[0]
    if not trainer.is_global_zero:
        return {}
    if late:
        _keep_if_best(folder, history.rows, f"val/{task.score}")
    return _finish(recipe, folder, module, history.rows, speed.results() | _skipped(data))


def _prepare(folder: Path, recipe: Recipe, resume: bool) -> Path | None:
    """Make the run's folder, or find the checkpoint to go on from."""
    last = folder / LAST
    if folder.is_file():
        raise NotADirectoryError(f"--output {folder} is a file; give the run's folder")
    if last.exists():
        if not resume:
            raise FileExistsError(f"{folder} holds a run already: --resume continues it, --output takes another folder")
        check_resumable(last, recipe.model.name)
    folder.mkdir(parents=True, exist_ok=True)
    for unfinished in (path for name in _WRITTEN for path in folder.glob(f".{name}.*")):
        # Of a process that was killed while it wrote.
        unfinished.unlink()
    write_atomically(folder / CONFIG, recipe_yaml(recipe))
    return last if last.exists() else None


def _build_network(recipe: Recipe, description: Description) -> nn.Module:
    network = build_model(description.model, description.options)
    if recipe.model.weights is not None:
        start_from(network, recipe.model.weights)
    return network.to(memory_format=torch.channels_last) if recipe.channels_last else network


def _keep_if_best(folder: Path, rows: list[dict[str, float]], score: str) -> None:
    """Make the last checkpoint the best as well, where a validation after training found it so."""
    if rows[-1][score] > max((row[score] for row in rows[:-1] if score in row), default=float("-inf")):
        with replacing(folder / BEST) as temporary:
            temporary.unlink()
            os.link(folder / LAST, temporary)


def _trainer(
    recipe: Recipe, folder: Path, score: str, callbacks: list[Callback], checkpoints: WholeCheckpoints
) -> L.Trainer:
    several = recipe.devices * recipe.nodes > 1
    watching: list[Callback] = [StopWhenDiverging(), LearningRateMonitor("step")]
    if recipe.ema is not None:
        watching.append(MovingAverage(recipe.ema))
    if recipe.freeze_epochs:
        watching.append(FreezeBackbone(recipe.freeze_epochs))
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
        logger=TensorBoardCurves(folder, name="", version=""),
        plugins=[checkpoints],
        profiler=Fetching(),
        # On the CPU PyTorch has no synchronised form of the ordinary norms; the coefficients' have one of their own.
        sync_batchnorm=several and recipe.sync_batch_norm and torch.cuda.is_available() and recipe.accelerator != "cpu",
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        benchmark=not recipe.deterministic,
        deterministic=recipe.deterministic,
        enable_progress_bar=False,
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
    # The weights that are kept under the plain name are those that validated best; what ran to the end is beside them.
    best_epoch = unpack(folder / BEST)["epoch"] + 1
    best = next(row for row in rows if row["epoch"] == best_epoch)
    result: dict[str, Any] = {
        "task": recipe.task,
        "data": recipe.data.name,
        "model": recipe.model.label,
        "seed": recipe.seed,
        "epochs": len(rows),
        **{name.removeprefix("val/"): rows[-1][name] for name in rows[-1] if name.startswith("val/")},
        f"best_{task.score}": best[f"val/{task.score}"],
        "best_epoch": int(best["epoch"]),
        "train_loss": rows[-1]["train/loss"],
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
        "madd": count_madd(counted, torch.zeros(1, 3, description.size, description.size)),
        "size": description.size,
        **extra,
        "environment": describe_environment(device),
    }
    write_atomically(folder / HISTORY, _csv(rows))
    # From their checkpoints: a run that was resumed with nothing left to train has not taken its moving average.
    for checkpoint, weights in ((LAST, LAST_WEIGHTS), (BEST, WEIGHTS)):
        load_weights(counted, read_weights(folder / checkpoint)[0])
        save_model(folder / weights, counted, description)
    figures = {name.removeprefix("val/"): value for name, value in best.items() if name.startswith("val/")}
    write_atomically(folder / CARD, model_card(description, recipe, result | figures))
    figure = draw_curves(
        rows, task.score, task.label, title=f"{recipe.model.name} on {recipe.data.name}, seed {recipe.seed}"
    )
    with replacing(folder / CURVES) as temporary:
        figure.savefig(temporary, format="png", dpi=150)
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
