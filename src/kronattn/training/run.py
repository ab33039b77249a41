"""A training run, from a recipe to a folder with everything it left."""

from __future__ import annotations

import csv
import io
import json
import logging
import warnings
from collections.abc import Mapping, MutableMapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_only
from torch import nn

from kronattn.atomic import link_atomically, write_atomically
from kronattn.data.decoded import Track, untracked
from kronattn.measure import count_madd, describe_environment
from kronattn.models.files import Description, build_model, read_weights, save_model
from kronattn.models.weights import load_weights, unpack
from kronattn.nn import synchronise_coefficient_norms
from kronattn.present import figure_bytes
from kronattn.tasks import Task, find_task
from kronattn.training.callbacks import Fetching, History, MovingAverage, Speed, StopWhenDiverging
from kronattn.training.card import model_card
from kronattn.training.checkpoints import WholeCheckpoints, check_resumable
from kronattn.training.compiling import DECODED, compile_mode, keep_compiled_code, steps_on_device
from kronattn.training.data import TrainingData, load_data_module
from kronattn.training.errors import explained, one_line_of
from kronattn.training.figures import draw_curves
from kronattn.training.folder import (
    BEST,
    CARD,
    CONFIG,
    CURVES,
    HISTORY,
    LAST,
    LAST_WEIGHTS,
    RESULT,
    WEIGHTS,
    WRITTEN,
    check_same_settings,
    read_result,
    refuse_foreign_files,
    run_folder,
)
from kronattn.training.freezing import FreezeBackbone
from kronattn.training.interruption import interruptible
from kronattn.training.progress import Progress, progress_callback
from kronattn.training.recipe import Recipe, recipe_yaml
from kronattn.training.start import start_from
from kronattn.training.task_module import TaskModule
from kronattn.training.tensorboard import TensorBoardCurves

__all__ = ["describe", "quiet", "train"]


def train(
    recipe: Recipe,
    *,
    folder: Path | None = None,
    resume: bool = False,
    progress: Progress = None,
    track: Track = untracked,
    callbacks: Sequence[Callback] = (),
    data_module: type[TrainingData] | None = None,
    decoded: Path | None = None,
    store: MutableMapping[str, Any] | None = None,
    figures_only: bool = False,
    test: str | None = None,
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
        figures_only: leave out weights, checkpoints, curves and card, which take a short run as long as training does;
            such a run cannot be resumed.
        test: a split on which the network is examined once, after training; its scores are the result's ``"test"``.

    Returns:
        The run's figures, which also go into ``result.json``.
    """
    folder = folder or run_folder(recipe)
    last = _checkpoint(folder, resume)
    if (last is not None or figures_only) and (result := read_result(folder)) is not None:
        check_same_settings(folder, recipe)
        return result
    if last is not None:
        check_resumable(last, recipe.model)
    elif _is_first_process():
        refuse_foreign_files(folder)
    quiet()
    if recipe.cache is not None:
        keep_compiled_code(Path(recipe.cache))
        decoded = decoded or Path(recipe.cache) / DECODED
    L.seed_everything(recipe.seed, workers=True, verbose=False)
    task = find_task(recipe.task)
    build_data = partial(
        data_module or load_data_module(task),
        recipe.data,
        recipe.batch_size // (recipe.devices * recipe.nodes),
        seed=recipe.seed,
        channels_last=recipe.channels_last,
        track=track,
        cache=decoded,
        store=store,
    )
    data = build_data()
    description = describe(recipe, task, data)
    if test is not None:
        data.split(test)  # what is wrong with it is said before training
    network = _build_network(recipe, description)
    module = TaskModule(network, recipe, description)
    history = History(lambda rows: write_atomically(folder / HISTORY, _csv(rows)))
    speed = Speed()
    checkpoints = WholeCheckpoints()
    watching = [history, speed, *progress_callback(progress, history, speed), *callbacks]
    try:
        trainer = _trainer(recipe, folder, f"val/{task.score}", watching, None if figures_only else checkpoints)
    except MisconfigurationException as error:
        where = f"accelerator {recipe.accelerator!r} with devices {recipe.devices} cannot be used here"
        raise ValueError(f"{where}: {one_line_of(error)}") from None
    # Where steps are counted, Lightning takes the epoch that a checkpoint was written after for one that is still going
    # on: it would end it once more, and train on a batch too many where it was not validated.
    trainer.fit_loop._iteration_based_training = lambda: False  # type: ignore[method-assign]
    if trainer.world_size > 1 and recipe.sync_batch_norm:
        synchronise_coefficient_norms(network)
    if (mode := compile_mode(recipe)) is not None:
        network.compile(dynamic=False, mode=None if mode == "default" else mode)
    _begin(folder, recipe)
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
    extra: dict[str, Any] = speed.results()
    if bad := data.bad_images():
        extra |= {"skipped_images": len(bad), "skipped": bad[:20]}
    if test is not None:
        scores = trainer.validate(module, build_data(split=test), verbose=False)[0]
        extra["test"] = {"split": test, **_validated(scores)}
    if not trainer.is_global_zero:
        return {}
    if late and not figures_only:
        _keep_if_best(folder, history.rows, f"val/{task.score}")
    return _finish(recipe, folder, module, history.rows, extra, figures_only)


def _checkpoint(folder: Path, resume: bool) -> Path | None:
    """The checkpoint to go on from, if the folder has one."""
    last = folder / LAST
    if folder.is_file():
        raise NotADirectoryError(f"--output {folder} is a file; give the run's folder")
    if not last.exists():
        return None
    if not resume:
        raise FileExistsError(f"{folder} holds a run already: --resume continues it, --output takes another folder")
    return last


def _begin(folder: Path, recipe: Recipe) -> None:
    """Make the run's folder, now that nothing is wrong with recipe and data, and write the recipe into it."""
    folder.mkdir(parents=True, exist_ok=True)
    if _is_first_process():
        # One process of several: what looks unfinished may be what another is about to finish.
        for unfinished in (path for name in WRITTEN for path in folder.glob(f".{name}.*")):
            # Of a process that was killed while it wrote.
            unfinished.unlink()
        write_atomically(folder / CONFIG, recipe_yaml(recipe))


def _is_first_process() -> bool:
    return rank_zero_only.rank == 0  # type: ignore[attr-defined]


def describe(recipe: Recipe, task: Task, data: TrainingData) -> Description:
    """What a trained network needs to be used."""
    classes, images = data.class_names(), recipe.data.images
    if len(classes) < 2:
        raise ValueError(f"{recipe.data.path} has a single class, {classes[0]}: there must be two or more")
    return Description(
        model=recipe.model.name,
        options={**recipe.model.all_options, "num_classes": len(classes)},
        classes=classes,
        mean=list(images.mean),
        std=list(images.std),
        task=recipe.task,
        data=recipe.data.name,
        **task.describe(data),
    )


def _build_network(recipe: Recipe, description: Description) -> nn.Module:
    network = build_model(description.model, description.options)
    if recipe.model.weights is not None:
        start_from(network, recipe.model.weights)
    if not recipe.channels_last:
        return network
    volumes = len(description.shape) == 4
    return network.to(memory_format=torch.channels_last_3d if volumes else torch.channels_last)


def _keep_if_best(folder: Path, rows: list[dict[str, float]], score: str) -> None:
    """Make the last checkpoint the best as well, where a validation after training found it so."""
    if rows[-1][score] > max((row[score] for row in rows[:-1] if score in row), default=float("-inf")):
        link_atomically(folder / LAST, folder / BEST)


def _trainer(
    recipe: Recipe, folder: Path, score: str, callbacks: list[Callback], checkpoints: WholeCheckpoints | None
) -> L.Trainer:
    """Without ``checkpoints`` there are no curves of TensorBoard's either."""
    several = recipe.devices * recipe.nodes > 1
    watching: list[Callback] = [StopWhenDiverging()]
    if recipe.ema is not None:
        watching.append(MovingAverage(recipe.ema))
    if recipe.freeze_epochs:
        watching.append(FreezeBackbone(recipe.freeze_epochs))
    # Lightning's own save_last follows the best alone.
    keeping: dict[str, Any] = {"save_on_train_epoch_end": True, "enable_version_counter": False}
    writing: list[Callback] = []
    if checkpoints is not None:
        watching.append(LearningRateMonitor("step"))
        writing.append(ModelCheckpoint(folder, Path(BEST).stem, monitor=score, mode="max", **keeping))
        writing.append(ModelCheckpoint(folder, Path(LAST).stem, **keeping))
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
        callbacks=[*watching, *callbacks, *writing],
        logger=TensorBoardCurves(folder, name="", version="") if checkpoints else False,
        enable_checkpointing=checkpoints is not None,
        plugins=[checkpoints] if checkpoints else [],
        profiler=Fetching(),
        # On the CPU PyTorch has no synchronised form of the ordinary norms; the coefficients' have one of their own.
        sync_batchnorm=several and recipe.sync_batch_norm and torch.cuda.is_available() and recipe.accelerator != "cpu",
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        # cuDNN's trials of every convolution took a cold start from 46 to 78 s on an NVIDIA H200, and bought nothing:
        # kanet_kv trained 15,060 images a second without them and 14,480 with them.
        benchmark=False,
        deterministic=recipe.deterministic,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def _finish(
    recipe: Recipe,
    folder: Path,
    module: TaskModule,
    rows: list[dict[str, float]],
    extra: dict[str, Any],
    figures_only: bool,
) -> dict[str, Any]:
    """Write what a finished run leaves: weights, model card, curves and figures, these last."""
    network, task, description = module.network, module.task, module.description
    network.to("cpu")
    device = module.trainer.strategy.root_device
    counted = build_model(recipe.model.name, description.options).eval()
    # The weights that are kept under the plain name are those that validated best; what ran to the end is beside them.
    if figures_only:
        best = max((row for row in rows if f"val/{task.score}" in row), key=lambda row: row[f"val/{task.score}"])
    else:
        best_epoch = unpack(folder / BEST)["epoch"] + 1
        best = next(row for row in rows if row["epoch"] == best_epoch)
    result: dict[str, Any] = {
        "task": recipe.task,
        "data": recipe.data.name,
        "model": recipe.model.label,
        "seed": recipe.seed,
        "epochs": len(rows),
        **_validated(rows[-1]),
        f"best_{task.score}": best[f"val/{task.score}"],
        "best_epoch": int(best["epoch"]),
        "train_loss": rows[-1]["train/loss"],
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
        "madd": count_madd(counted, task.example(description)),
        "size": description.size,
        **extra,
        "environment": describe_environment(device),
    }
    write_atomically(folder / HISTORY, _csv(rows))
    if not figures_only:
        # From their checkpoints: a run that was resumed with nothing left to train has not taken its moving average.
        for checkpoint, weights in ((LAST, LAST_WEIGHTS), (BEST, WEIGHTS)):
            load_weights(counted, read_weights(folder / checkpoint)[0])
            save_model(folder / weights, counted, description)
        write_atomically(folder / CARD, model_card(description, recipe, result | _validated(best)))
        title = f"{recipe.model.name} on {recipe.data.name}, seed {recipe.seed}"
        write_atomically(folder / CURVES, figure_bytes(draw_curves(rows, task.score, task.label, title), "png"))
    write_atomically(folder / RESULT, json.dumps(result, indent=2) + "\n")
    return result


def _validated(row: Mapping[str, float]) -> dict[str, float]:
    """What the validation of an epoch found."""
    return {name.removeprefix("val/"): value for name, value in row.items() if name.startswith("val/")}


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
