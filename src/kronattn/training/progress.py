"""What is shown and logged while a network trains: Lightning's own, but for two habits."""

from __future__ import annotations

from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.loggers import TensorBoardLogger

__all__ = ["EpochBar", "TensorBoardCurves"]


class EpochBar(RichProgressBar):
    """A progress bar that counts epochs from 1, as the history and the figures do."""

    def _get_train_description(self, current_epoch: int) -> str:
        last = self.trainer.max_epochs
        described = f"Epoch {current_epoch + 1}" + (f"/{last}" if last is not None and last > 0 else "")
        return f"{described:{len(self.validation_description)}}"


class TensorBoardCurves(TensorBoardLogger):
    """Without the empty hparams.yaml: a run's config.yaml has everything."""

    def save(self) -> None:
        if self._experiment is not None:
            self._experiment.flush()
