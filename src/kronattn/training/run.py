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
from kronattn.training.classifier import Classifier
from kronattn.training.data import ImageData, Track
from kronattn.training.figures import draw_curves
from kronattn.training.recipe import Recipe, recipe_yaml

__all__ = ["quiet", "read_result", "run_folder", "train"]

CONFIG, HISTORY, RESULT, CURVES = "config.yaml", "history.csv", "result.json", "curves.png"
WEIGHTS, CARD, LAST, BEST = "weights.safetensors", "README.md", "last.ckpt", "best.ckpt"


def run_folder(recipe: Recipe, name: str = "run") -> Path:
    """Where a run's files go: what the recipe says, or a name made of recipe, network and seed."""
    model = recipe.model.name.replace("/", "-")
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
    command: str = "",
    progress: bool = False,
    track: Track = lambda items, description: items,
    callbacks: Sequence[Callback] = (),
    images: type[ImageData] = ImageData,
) -> dict[str, Any]:
    """Train a network after a recipe.

    Args:
        recipe: what to do.
        folder: where the run's files go; :func:`run_folder`'s by default.
        resume: continue a run that was interrupted; a finished one is returned as it is.
        command: the command line, for the model card.
        progress: show a progress bar.
        track: wraps the decoding of images, in a progress bar for instance.
        callbacks: further ones.
        images: another way of preparing the data.

    Returns:
        The run's figures, which also go into ``result.json``.
    """
    folder = folder or run_folder(recipe)
    last = _prepare(folder, recipe, resume)
    if last is not None and (result := read_result(folder)) is not None:
        return result
    quiet()
    L.seed_everything(recipe.seed, workers=True, verbose=False)
    data = images(
        recipe.data,
        recipe.batch_size // (recipe.devices * recipe.nodes),
        seed=recipe.seed,
        channels_last=recipe.channels_last,
        track=track,
    )
    description = _describe(recipe, data.split("train").classes)
    network = _build_network(recipe, description)
    module = Classifier(network, recipe, description)
    history = History(lambda rows: write_atomically(folder / HISTORY, _csv(rows)))
    speed = Speed()
    trainer = _trainer(recipe, folder, [history, speed, *callbacks], progress)
    if trainer.world_size > 1 and recipe.sync_batch_norm:
        synchronise_coefficient_norms(network)
    if recipe.compile:
        network.compile(dynamic=False)
    trainer.fit(module, data, ckpt_path=last, weights_only=True)
    if not trainer.is_global_zero:
        return {}
    if trainer.interrupted:
        raise KeyboardInterrupt
    return _finish(recipe, folder, module, history.rows, speed.results() | _skipped(data), command)


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


def _describe(recipe: Recipe, classes: Sequence[str]) -> Description:
    images = recipe.data.images
    return Description(
        model=recipe.model.name,
        options={**recipe.model.options, "num_classes": len(classes)},
        classes=list(classes),
        mean=list(images.mean),
        std=list(images.std),
        resize=images.evaluated_resize,
        size=images.evaluated_size,
        task=recipe.task,
        data=recipe.data.name,
    )


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
    if any(not name.startswith(("classifier.", "fc.", "head.fc.")) for name in misfits):
        raise ValueError(f"{path} does not fit the network: {misfits[0]} is missing or of another shape")
    network.load_state_dict({name: state[name] for name in own if name not in misfits}, strict=False)


def _trainer(recipe: Recipe, folder: Path, callbacks: list[Callback], progress: bool) -> L.Trainer:
    several = recipe.devices * recipe.nodes > 1
    watching: list[Callback] = [StopWhenDiverging(), LearningRateMonitor("step")]
    if recipe.ema is not None:
        watching.append(MovingAverage(recipe.ema))
    if progress:
        watching.append(RichProgressBar(refresh_rate=5))
    # Lightning's own save_last follows the best alone.
    keeping = {"save_on_train_epoch_end": True, "enable_version_counter": False}
    best = ModelCheckpoint(folder, Path(BEST).stem, monitor="val/top1", mode="max", **keeping)  # type: ignore[arg-type]
    last = ModelCheckpoint(folder, Path(LAST).stem, **keeping)  # type: ignore[arg-type]
    return L.Trainer(
        accelerator=recipe.accelerator,
        devices=recipe.devices,
        num_nodes=recipe.nodes,
        strategy="ddp" if several else "auto",
        precision=recipe.precision,
        max_epochs=recipe.epochs,
        gradient_clip_val=recipe.optimiser.clip,
        callbacks=[*watching, *callbacks, best, last],
        logger=TensorBoardLogger(folder, name="", version=""),
        plugins=[WholeCheckpoints()],
        # On the CPU PyTorch has no synchronised form of the ordinary norms; the coefficients' have one of their own.
        sync_batchnorm=several and recipe.sync_batch_norm and torch.cuda.is_available() and recipe.accelerator != "cpu",
        use_distributed_sampler=False,
        reload_dataloaders_every_n_epochs=1,
        num_sanity_val_steps=0,
        benchmark=True,
        enable_progress_bar=progress,
        enable_model_summary=False,
    )


def _finish(
    recipe: Recipe, folder: Path, module: Classifier, rows: list[dict[str, float]], extra: dict[str, Any], command: str
) -> dict[str, Any]:
    """Write what a finished run leaves: weights, model card, curves and figures, these last."""
    network = module.network
    network.to("cpu")
    device = module.trainer.strategy.root_device
    size = recipe.data.images.evaluated_size
    result: dict[str, Any] = {
        "task": recipe.task,
        "data": recipe.data.name,
        "model": recipe.model.name,
        "seed": recipe.seed,
        "epochs": recipe.epochs,
        **{name.removeprefix("val/"): rows[-1][name] for name in rows[-1] if name.startswith("val/")},
        "best_top1": max(row["val/top1"] for row in rows),
        "train_loss": rows[-1]["train/loss"],
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
        "madd": count_madd(
            build_model(recipe.model.name, module.description.options).eval(), torch.zeros(1, 3, size, size)
        ),
        "size": size,
        **extra,
        "environment": describe_environment(device),
    }
    save_model(folder / WEIGHTS, network, module.description)
    write_atomically(folder / CARD, model_card(module.description, recipe, result, command))
    figure = draw_curves(rows, title=f"{recipe.model.name} on {recipe.data.name}, seed {recipe.seed}")
    figure.savefig(folder / CURVES, dpi=150)
    write_atomically(folder / RESULT, json.dumps(result, indent=2) + "\n")
    return result


def _skipped(data: ImageData) -> dict[str, Any]:
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
