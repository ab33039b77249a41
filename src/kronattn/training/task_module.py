"""A network in training, whatever its task: loss, metrics, optimiser, schedule, and what its checkpoints say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from kronattn.models.files import DESCRIPTION_KEY, Description
from kronattn.tasks import find_task
from kronattn.training.callbacks import MovingAverage
from kronattn.training.device_step import DeviceStep
from kronattn.training.graphs import Captured
from kronattn.training.halving import in_parts
from kronattn.training.optimisation import build_optimiser, build_schedule
from kronattn.training.recipe import Recipe, recipe_yaml

__all__ = ["TaskModule"]


class TaskModule(L.LightningModule):
    """A network that learns its recipe's task; what its metrics find is logged as ``val/...``.

    With ``steps_on_device``, a training step is a :class:`DeviceStep`, which does everything from the batch that the
    loader gives to the moving average, captured as a CUDA graph on a GPU. Lightning still counts the steps, moves the
    schedule and calls the callbacks; its own backward and optimiser have nothing left to do.

    Args:
        network: what is trained.
        recipe: decides loss, optimiser and schedule.
        description: goes into every checkpoint, so that it can be used without the recipe.
    """

    def __init__(self, network: nn.Module, recipe: Recipe, description: Description) -> None:
        super().__init__()
        self.network = network
        self.recipe = recipe
        self.description = description
        self.task = find_task(recipe.task)
        self.metrics = self.task.metrics(description).clone(prefix="val/")
        self.steps_on_device = False
        self._recipe_text = ""
        self._step: tuple[DeviceStep, Callable[..., Tensor]] | None = None
        self._noted: list[Tensor] = []
        self._images: list[int] = []

    def losses(self, batch: tuple[Tensor, ...]) -> Mapping[str, Tensor]:
        """Images and targets to a training step's figures, scalars: ``"loss"`` and what is told beside it."""
        return self.task.losses(self.network, batch, self.recipe, self.description)

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        images, target = batch
        # Past the compiled call: the last batch, or every image, has a size of its own, and compiling for it would take
        # longer than it runs.
        output = in_parts(self.network.forward, images).float()
        self.metrics.update(self.task.predicted(output), target)
        loss = self.task.loss(output, target, self.description)
        self.log("val/loss", loss, on_epoch=True, batch_size=len(images), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.metrics.compute(), prog_bar=True)
        self.metrics.reset()

    def configure_optimizers(self) -> Any:
        optimiser = build_optimiser(self.network, self.recipe.optimiser, capturable=self._captures())
        # Lightning's own count would start the loaders' workers before a resumed run knows its epoch.
        per_epoch = self.trainer.datamodule.steps_per_epoch()  # type: ignore[attr-defined]
        epochs = self.recipe.iterations / per_epoch if self.recipe.iterations else self.recipe.epochs
        schedule = build_schedule(optimiser, self.recipe.schedule, epochs, per_epoch)
        return {"optimizer": optimiser, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def training_step(self, batch: tuple[Tensor, ...], index: int) -> Tensor:
        if self.steps_on_device:
            names, figures = self._step_on_device(batch)
            loss = figures[names.index("loss")]
        else:
            found = self.losses(batch)
            names, figures = tuple(found), torch.stack([figure.detach().float() for figure in found.values()])
            loss = found["loss"]
        self._note(len(batch[0]), names, figures)
        return loss

    def _step_on_device(self, batch: tuple[Tensor, ...]) -> tuple[tuple[str, ...], Tensor]:
        average = next((entry for entry in self.trainer.callbacks if isinstance(entry, MovingAverage)), None)  # type: ignore[attr-defined]
        if self._step is None:
            self._step = self._build_step(average)
        step, run = self._step
        step.set_numbers(average.share(self.trainer.global_step) if average else 0.0)
        figures = run(*batch)
        return step.figures, figures

    def _build_step(self, average: MovingAverage | None) -> tuple[DeviceStep, Callable[..., Tensor]]:
        """After the checkpoint of a resumed run has been read: tensors stay where they are from here on."""
        blend = None
        if average is not None:
            average.blended_in_step = True
            blend = partial(average.blend, self)
        step = DeviceStep(
            self.trainer.datamodule.prepare_training,  # type: ignore[attr-defined]
            self.losses,
            self.trainer.optimizers[0],
            device=self.device,
            precision=self.recipe.precision,
            clip=self.recipe.optimiser.clip,
            blend=blend,
        )
        return step, Captured(step, self.device) if self._captures() else step

    def _captures(self) -> bool:
        return self.steps_on_device and self.trainer.strategy.root_device.type == "cuda"

    def on_train_end(self) -> None:
        # What was captured holds memory on the device.
        self._step = None

    # With steps_on_device these three have been done when Lightning asks for them.

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if not self.steps_on_device:
            super().backward(loss, *args, **kwargs)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if not self.steps_on_device:
            super().optimizer_zero_grad(epoch, batch_idx, optimizer)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if self.steps_on_device:
            optimizer_closure()
        else:
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

    def _note(self, images: int, names: tuple[str, ...], figures: Tensor) -> None:
        """A training step's figures for so many images; their means over the epoch's are logged as ``train/...``.

        With the epoch's last step alone: Lightning's logging of every one takes the host a good part of a step's time,
        and to read one waits for the device.
        """
        self._images.append(images)
        self._noted.append(figures)
        if not (self.trainer.is_last_batch or self.trainer.global_step + 1 == self.trainer.max_steps):
            return
        every = torch.stack(self._noted)
        shares = every.new_tensor(self._images) / sum(self._images)
        means = (every * shares[:, None]).sum(0)
        for name, mean in zip(names, means, strict=True):
            self.log(f"train/{name}", mean, on_step=False, on_epoch=True, prog_bar=name == "loss")
        self._noted, self._images = [], []

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint[DESCRIPTION_KEY] = self.description.to_dict()
        # Written out once: it takes longer than all that is left for the host to do between two epochs.
        self._recipe_text = self._recipe_text or recipe_yaml(self.recipe)
        checkpoint["recipe"] = self._recipe_text

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # A checkpoint remembers which kernels the optimiser had; those of this run are decided here.
        for state in checkpoint.get("optimizer_states", []):
            for group in state["param_groups"]:
                group["fused"] = self._captures() or None
                if "capturable" in group:
                    group["capturable"] = self._captures()
