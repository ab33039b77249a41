"""A run that stops in the middle of its third epoch and waits to be killed; started by test_run.py."""

import sys
import time
from pathlib import Path

import torch
from lightning.pytorch.callbacks import Callback

from kronattn.training.recipe import load_recipe
from kronattn.training.run import train


class WaitInTheMiddle(Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.current_epoch == 2:
            (self.folder / "reached").touch()
            time.sleep(300)


if __name__ == "__main__":
    torch.set_num_threads(1)
    path, folder, *settings = sys.argv[1:]
    train(load_recipe(path, settings), folder=Path(folder), callbacks=[WaitInTheMiddle(Path(folder))])
