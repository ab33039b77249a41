"""A whole step as one function of tensors: the same arithmetic as Lightning's loop, and runs that use it."""

import csv
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from kronattn.training import graphs
from kronattn.training import run as run_module
from kronattn.training.data import TrainingData
from kronattn.training.device_step import DeviceStep
from kronattn.training.recipe import load_recipe
from kronattn.training.run import train
from kronattn.training.task_module import TaskModule
from tests.data.segmentation_folders import write_folder

CPU = torch.device("cpu")


def step_of(network: nn.Module, optimiser, **options) -> DeviceStep:
    def losses(batch):
        x, y = batch
        outputs = network(x)
        return {"loss": (outputs - y).square().mean(), "size": outputs.detach().abs().mean()}

    return DeviceStep(lambda batch: batch, losses, optimiser, device=CPU, **options)


def network_and_batch():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2))
    return network, (torch.randn(6, 4), torch.randn(6, 2))


class TestOneStep:
    def test_is_forward_backward_and_optimiser(self):
        network, (x, y) = network_and_batch()
        other, _ = network_and_batch()
        optimiser = torch.optim.SGD(network.parameters(), lr=0.25, momentum=0.9)
        step = step_of(network, optimiser)
        plain = torch.optim.SGD(other.parameters(), lr=0.25, momentum=0.9)
        for _ in range(3):
            step.set_numbers(0.0)
            figures = step(x, y)
            loss = (other(x) - y).square().mean()
            plain.zero_grad()
            loss.backward()
            plain.step()
            assert torch.equal(figures[step.figures.index("loss")], loss.detach())
        assert step.figures == ("loss", "size")
        one, same = network.state_dict(), other.state_dict()
        assert all(torch.equal(one[name], same[name]) for name in one)

    def test_learning_rates_are_those_of_the_moment(self):
        network, batch = network_and_batch()
        optimiser = torch.optim.SGD(network.parameters(), lr=0.0)
        step = step_of(network, optimiser)
        before = network[0].weight.clone()
        step.set_numbers(0.0)
        step(*batch)
        assert torch.equal(network[0].weight, before)
        optimiser.param_groups[0]["lr"] = 0.5
        step.set_numbers(0.0)
        step(*batch)
        assert not torch.equal(network[0].weight, before)
        # Schedules, logs and checkpoints see a number.
        assert optimiser.param_groups[0]["lr"] == 0.5

    def test_learning_rates_come_back_after_an_error(self):
        network, (x, y) = network_and_batch()
        optimiser = torch.optim.SGD(network.parameters(), lr=0.5)
        optimiser.step = lambda: 1 / 0
        with pytest.raises(ZeroDivisionError):
            step_of(network, optimiser)(x, y)
        assert optimiser.param_groups[0]["lr"] == 0.5

    def test_clipping(self):
        network, (x, y) = network_and_batch()
        before = torch.cat([p.detach().flatten() for p in network.parameters()])
        step = step_of(network, torch.optim.SGD(network.parameters(), lr=1.0), clip=0.01)
        step.set_numbers(0.0)
        step(x, y)
        moved = torch.cat([p.detach().flatten() for p in network.parameters()]) - before
        assert moved.norm() == pytest.approx(0.01, rel=1e-3)

    def test_half_precision_is_the_networks_alone(self):
        """Augmentation and losses see float32, whatever the caller has switched on."""
        seen = {}
        network, (x, y) = network_and_batch()

        def prepare(batch):
            seen["prepared"] = (batch[0] @ batch[0].T).dtype
            return batch

        def losses(batch):
            outputs = network(batch[0])
            seen["network"] = outputs.dtype
            return {"loss": outputs.float().square().mean()}

        optimiser = torch.optim.SGD(network.parameters(), lr=0.1)
        step = DeviceStep(prepare, losses, optimiser, device=CPU, precision="bf16-mixed")
        with torch.autocast("cpu", torch.bfloat16):
            step(x, y)
        assert seen == {"prepared": torch.float32, "network": torch.bfloat16}

    def test_the_share_reaches_the_moving_average(self):
        network, (x, y) = network_and_batch()
        shares = []
        step = step_of(network, torch.optim.SGD(network.parameters(), lr=0.1), blend=lambda s: shares.append(s.item()))
        for share in (1.0, 0.25):
            step.set_numbers(share)
            step(x, y)
        assert shares == [1.0, 0.25]


@pytest.fixture
def on_device(monkeypatch):
    """As on a GPU: whole steps, and data that lies on the device; nothing is captured on a CPU."""

    def switch(steps: bool = True, data: bool = True) -> None:
        monkeypatch.setattr(run_module, "steps_on_device", lambda recipe, device: steps)
        monkeypatch.setattr(
            TrainingData, "gathers_on_device", lambda self, dataset: data and hasattr(dataset, "gather")
        )

    return switch


def weights(folder):
    return load_file(folder / "weights.safetensors")


@pytest.mark.parametrize(
    "settings",
    [(), ("optimiser.name=adamw", "optimiser.lr=0.001", "optimiser.clip=0.5"), ("precision=bf16-mixed",)],
)
def test_a_run_is_lightnings(recipe_file, tmp_path, on_device, settings):
    """Both loops take the same steps: the same order, the same draws, the same averages."""
    recipe = load_recipe(recipe_file, [*settings, "epochs=2", "data.images.jitter=0.3"])
    train(recipe, folder=tmp_path / "lightning")
    on_device()
    train(recipe, folder=tmp_path / "whole")
    one, other = weights(tmp_path / "lightning"), weights(tmp_path / "whole")
    # The moving average is summed in another order, and learning rates are rounded to float32.
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-3, atol=1e-4)
    histories = [list(csv.DictReader((tmp_path / name / "history.csv").open())) for name in ("lightning", "whole")]
    for row, same in zip(*histories, strict=True):
        assert float(row["train/loss"]) == pytest.approx(float(same["train/loss"]), rel=1e-3)
        assert row["lr"] == same["lr"]
        assert float(row["val/loss"]) == pytest.approx(float(same["val/loss"]), rel=1e-2)


def test_where_the_data_lies_makes_no_difference(recipe, tmp_path, on_device):
    for name, data in (("device", True), ("host", False)):
        on_device(data=data)
        train(replace(recipe, epochs=2), folder=tmp_path / name)
    one, other = weights(tmp_path / "device"), weights(tmp_path / "host")
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_lightnings_steps_take_data_from_the_device_too(recipe, tmp_path, on_device):
    for name, data in (("device", True), ("host", False)):
        on_device(steps=False, data=data)
        train(replace(recipe, epochs=2), folder=tmp_path / name)
    one, other = weights(tmp_path / "device"), weights(tmp_path / "host")
    assert all(torch.equal(one[name], other[name]) for name in one)


class Repeated:
    """What a CUDA graph does, on a CPU: the same function on the same tensors, its output at the same place."""

    def __init__(self, function, places):
        self.function, self.places = function, places
        self.output = torch.zeros(2)

    def replay(self):
        self.output.copy_(self.function(*self.places))


def test_a_captured_run(recipe, tmp_path, on_device, monkeypatch):
    """Numbers of samples, learning rates, shares and draws all reach the steps that are repeated."""
    on_device()
    monkeypatch.setattr(TaskModule, "_captures", lambda self: True)
    monkeypatch.setattr(graphs, "_on_side_stream", lambda function, inputs, device: function(*inputs))
    monkeypatch.setattr(graphs, "_watched", lambda function, inputs, device: (function(*inputs), None))
    made = []

    def capture(function, places):
        made.append(Repeated(function, places))
        return made[-1], made[-1].output

    monkeypatch.setattr(graphs, "_capture", capture)
    train(replace(recipe, batch_size=4), folder=tmp_path / "captured")
    assert len(made) == 1
    monkeypatch.setattr(graphs, "KINDS_AT_MOST", 0)
    train(replace(recipe, batch_size=4), folder=tmp_path / "as it is")
    assert len(made) == 1
    one, other = weights(tmp_path / "captured"), weights(tmp_path / "as it is")
    assert all(torch.equal(one[name], other[name]) for name in one)
    histories = [(tmp_path / name / "history.csv").read_text() for name in ("captured", "as it is")]
    assert histories[0] == histories[1]


@pytest.mark.parametrize("optimiser", ["sgd", "adamw"])
def test_resumed_runs_end_with_the_same_bits(recipe_file, tmp_path, on_device, optimiser):
    on_device()
    recipe = load_recipe(
        recipe_file, [f"optimiser.name={optimiser}", "data.images.cutmix=1.0", "data.images.mixup=0.2"]
    )
    train(recipe, folder=tmp_path / "whole")
    from lightning.pytorch.callbacks import Callback

    class Stop(Callback):
        def on_train_batch_start(self, trainer, module, batch, index):
            if trainer.current_epoch == 1 and index == 1:
                raise SystemExit

    with pytest.raises(SystemExit):
        train(recipe, folder=tmp_path / "cut", callbacks=[Stop()])
    train(recipe, folder=tmp_path / "cut", resume=True)
    one, other = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_checkpoint_goes_from_one_loop_to_the_other(recipe_file, tmp_path, on_device):
    """From a GPU to a CPU and back: which kernels an optimiser has is this run's choice, not the checkpoint's."""
    recipe = load_recipe(recipe_file, ["optimiser.name=adamw", "epochs=2"])
    from lightning.pytorch.callbacks import Callback

    class Stop(Callback):
        def on_train_epoch_start(self, trainer, module):
            if trainer.current_epoch == 1:
                raise SystemExit

    with pytest.raises(SystemExit):
        train(recipe, folder=tmp_path / "run", callbacks=[Stop()])
    written = torch.load(tmp_path / "run" / "last.ckpt", weights_only=True)
    for group in written["optimizer_states"][0]["param_groups"]:
        group["fused"], group["capturable"] = True, True
    torch.save(written, tmp_path / "run" / "last.ckpt")
    on_device()
    assert train(recipe, folder=tmp_path / "run", resume=True)["epochs"] == 2


def test_segmenters(tmp_path, on_device, monkeypatch):
    write_folder(tmp_path / "data", {"train": 6, "val": 2})
    (tmp_path / "data" / "classes.txt").write_text("road\nsky\ntree\n")
    recipe = load_recipe(
        "camvid/deeplabv2_kao_kv",
        [
            "data.name=folder",
            f"data.path={tmp_path / 'data'}",
            "model.options={backbone: kanet_kv, backbone_options: {width: 0.25}}",
            "data.images.crop=33",
            "batch_size=2",
            "epochs=2",
            "precision=32-true",
            "accelerator=cpu",
            "data.workers=0",
        ],
    )
    monkeypatch.setattr(TrainingData, "fits_on_device", lambda self, needed: True)
    on_device()
    for name in ("a", "b"):
        result = train(recipe, folder=tmp_path / name)
    assert 0 <= result["mean_iou"] <= 1
    one, other = weights(tmp_path / "a"), weights(tmp_path / "b")
    assert all(torch.equal(one[name], other[name]) for name in one)
    # Examined as ever: images at their own size, one by one.
    from kronattn.training.evaluation import evaluate

    monkeypatch.undo()
    found = evaluate(tmp_path / "a" / "weights.safetensors", str(tmp_path / "data"), accelerator="cpu").figures
    assert found["mean_iou"] == pytest.approx(result["mean_iou"], abs=1e-6)
