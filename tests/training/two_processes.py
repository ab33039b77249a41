"""Steps of runs whose network has no batch norm but the coefficients'; started by test_distributed.py."""

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from lightning.pytorch.callbacks import Callback
from torch import nn

from kronattn.models import KANet
from kronattn.training import run
from kronattn.training.recipe import load_recipe


class InFloat64(KANet):
    """Float64 leaves no doubt about what differs."""

    def forward(self, x):
        return super().forward(x.double())


def build(name, options):
    return InFloat64(name, norm_layer=lambda channels: nn.GroupNorm(1, channels), **options).double()


class KeepGradients(Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_before_optimizer_step(self, trainer, module, optimizer):
        if trainer.global_step == 0 and trainer.is_global_zero:
            torch.save({name: p.grad.clone() for name, p in module.named_parameters()}, self.folder / "gradients.pt")


def keep_gradients(path: Path, folder: Path, settings: Sequence[str]) -> None:
    """Train after a recipe, in this process or as one of several, and keep the gradients of the first step."""
    folder.mkdir(exist_ok=True)
    run.train(load_recipe(path, settings), folder=folder, callbacks=[KeepGradients(folder)])


if __name__ == "__main__":
    run.build_model = build
    recipe, shared, *runs = sys.argv[1:]
    for folder, settings in zip(runs[::2], runs[1::2], strict=True):
        keep_gradients(Path(recipe), Path(folder), [*shared.split(), *settings.split()])
