from typing import Any

from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer
from torch import nn

from kronattn.integrations.nnunet import with_context


class nnUNetTrainerKronecker(nnUNetTrainer):
    """nnU-Net's trainer, with Kronecker attention after the last two stages of its encoder."""

    @staticmethod
    def build_network_architecture(*arguments: Any, **options: Any) -> nn.Module:
        return with_context(nnUNetTrainer.build_network_architecture(*arguments, **options))
