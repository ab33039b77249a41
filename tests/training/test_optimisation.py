"""What the optimiser is built of, and the moving average beside it."""

from types import SimpleNamespace

import lightning as L
import pytest
import torch
from torch import nn

from kronattn import create_model
from kronattn.training.callbacks import MovingAverage
from kronattn.training.optimisation import build_optimiser
from kronattn.training.recipe import OptimiserSettings


class TestHeadFactor:
    def test_a_classifiers_last_layer(self):
        network = create_model("kanet_kv", width=0.25, num_classes=3)
        settings = OptimiserSettings(lr=0.1, head_factor=0.2, decay_vectors=False, weight_decay=1e-4)
        groups = build_optimiser(network, settings).param_groups
        slow = [parameter for group in groups if group["lr"] == pytest.approx(0.02) for parameter in group["params"]]
        assert {id(parameter) for parameter in slow} == {id(parameter) for parameter in network.classifier.parameters()}
        assert sum(len(group["params"]) for group in groups) == len(list(network.parameters()))
        assert [group["weight_decay"] for group in groups] == [1e-4, 0, 1e-4, 0]

    def test_a_segmenters_head(self):
        network = create_model("deeplabv2_kao_kv", backbone="resnet18", num_classes=3)
        settings = OptimiserSettings(lr=0.1, head_factor=10)
        fast = [group for group in build_optimiser(network, settings).param_groups if group["lr"] == pytest.approx(1)]
        assert [len(group["params"]) for group in fast] == [len(list(network.head.parameters()))]

    def test_no_head(self):
        with pytest.raises(ValueError, match="head_factor needs a network with a head; Linear shows none"):
            build_optimiser(nn.Linear(2, 3), OptimiserSettings(head_factor=2))


class TestMovingAverage:
    def average(self, decay: float, values: list[float], watcher: MovingAverage | None = None) -> nn.BatchNorm1d:
        module = L.LightningModule()
        module.network = network = nn.BatchNorm1d(1)
        watcher = watcher or MovingAverage(decay)
        watcher._latest_update_step = 0
        trainer = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("cpu")), global_step=0)
        watcher.setup(trainer, module, "fit")
        for value in values:
            trainer.global_step += 1
            nn.init.constant_(network.weight, value)
            network.num_batches_tracked += 1
            for _ in range(2):  # once a step, however often it is called
                watcher.on_train_batch_end(trainer, module, None, None, 0)
        return watcher._average_model.module.network

    def test_short_runs_forget_where_they_started(self):
        """From 0 to 1 after the first step: with the plain average, nine parts in ten were still the start's."""
        found = self.average(0.998, [0.0] + [1.0] * 100)
        assert found.weight.item() > 0.99
        assert found.num_batches_tracked == 101

    def test_first_step_is_all_there_is(self):
        assert self.average(0.9, [3.0]).weight.item() == 3.0

    def test_another_run_has_tensors_of_its_own(self):
        watcher = MovingAverage(0.9)
        self.average(0.9, [3.0], watcher)
        watcher._average_model = None
        assert self.average(0.9, [4.0], watcher).weight.item() == 4.0

    def test_long_runs_follow_the_decay(self):
        values = torch.linspace(0, 5, 400).tolist()
        expected = values[0]
        for count, value in enumerate(values[1:], start=1):
            decay = min(0.9, (1 + count) / (10 + count))
            expected = decay * expected + (1 - decay) * value
        assert self.average(0.9, values).weight.item() == pytest.approx(expected, rel=1e-5)
