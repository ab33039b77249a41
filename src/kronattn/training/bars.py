"""The progress bar of training: Lightning's own, but for how it counts."""

from __future__ import annotations

from lightning.pytorch.callbacks import RichProgressBar

__all__ = ["EpochBar"]


class EpochBar(RichProgressBar):
    """A progress bar that counts epochs from 1, as the history and the figures do."""

    def _get_train_description(self, current_epoch: int) -> str:
        last = self.trainer.max_epochs
        described = f"Epoch {current_epoch + 1}" + (f"/{last}" if last is not None and last > 0 else "")
        return f"{described:{len(self.validation_description)}}"
