"""Figures for TensorBoard: Lightning's logger, without a file that nobody needs."""

from __future__ import annotations

from lightning.pytorch.loggers import TensorBoardLogger

__all__ = ["TensorBoardCurves"]


class TensorBoardCurves(TensorBoardLogger):
    """Without the empty hparams.yaml: a run's config.yaml has everything."""

    def save(self) -> None:
        if self._experiment is not None:
            self._experiment.flush()
