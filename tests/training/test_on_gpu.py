"""Captured training on a GPU: the same bits as uncaptured training, and as a run that was interrupted."""

import csv
import logging
import subprocess
import sys

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from safetensors.torch import load_file
from torch import nn

from kronattn.training import graphs
from kronattn.training.device_step import DeviceStep
from kronattn.training.graphs import WARM_UP, Captured
from kronattn.training.host_copies import HostCopies
from kronattn.training.optimisation import build_optimiser
from kronattn.training.recipe import OptimiserSettings, load_recipe
from kronattn.training.run import train
from kronattn.training.sampling import seed_draws
from tests.data.segmentation_folders import write_folder

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

GPU = torch.device("cuda", 0)
# Four steps an epoch, all but the first three of them repetitions of a graph.
SETTINGS = ("accelerator=gpu", "batch_size=4", "epochs=4", "channels_last=true", "data.images.jitter=0.3")


@pytest.fixture(autouse=True)
def _as_it_was():
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = False


@pytest.fixture
def captures(monkeypatch):
    """How many graphs are captured."""
    made = []
    real = graphs._capture
    monkeypatch.setattr(graphs, "_capture", lambda function, places: made.append(1) or real(function, places))
    return made


def weights(folder):
    return load_file(folder / "weights.safetensors")


def same_bits(one, other) -> bool:
    first, second = weights(one), weights(other)
    return all(torch.equal(first[name], second[name]) for name in first)


class Stop(Callback):
    """Ends a run in the middle of its third epoch."""

    def on_train_batch_start(self, trainer, module, batch, index):
        if trainer.current_epoch == 2 and index == 2:
            raise SystemExit


@pytest.mark.parametrize(
    "settings",
    [
        ("precision=bf16-mixed",),
        ("model.name=kanet_qkv", "precision=bf16-mixed"),
        ("model.name=mobilenetv2", "optimiser.nesterov=true", "optimiser.clip=1.0"),
        ("optimiser.name=adamw", "optimiser.lr=0.001", "data.images.mixup=0.2", "data.images.cutmix=1.0"),
    ],
    ids=["kv", "qkv", "clipped", "adamw and mixing"],
)
def test_captured_or_not_the_bits_are_the_same(recipe_file, tmp_path, captures, monkeypatch, caplog, settings):
    recipe = load_recipe(recipe_file, [*SETTINGS, "deterministic=true", *settings])
    with caplog.at_level(logging.WARNING, "kronattn"):
        train(recipe, folder=tmp_path / "captured")
    assert captures == [1]
    assert not [line for line in caplog.messages if "CUDA graphs" in line]
    with pytest.raises(SystemExit):
        train(recipe, folder=tmp_path / "cut", callbacks=[Stop()])
    train(recipe, folder=tmp_path / "cut", resume=True)
    assert captures == [1, 1, 1]
    monkeypatch.setattr(graphs, "KINDS_AT_MOST", 0)
    train(recipe, folder=tmp_path / "as it is")
    assert captures == [1, 1, 1]
    assert same_bits(tmp_path / "captured", tmp_path / "as it is")
    assert same_bits(tmp_path / "captured", tmp_path / "cut")
    histories = [(tmp_path / name / "history.csv").read_text() for name in ("captured", "cut", "as it is")]
    assert histories[0] == histories[1] == histories[2]


def test_lightnings_own_steps_learn_the_same(recipe_file, tmp_path, captures):
    """Other kernels of the optimiser, another order of sums: the figures agree, the bits do not."""
    for name, how in (("captured", "auto"), ("lightning", "false")):
        recipe = load_recipe(recipe_file, [*SETTINGS, "model.options.drop_rate=0.2", f"compile={how}"])
        train(recipe, folder=tmp_path / name)
    assert captures == [1]
    histories = [list(csv.DictReader((tmp_path / name / "history.csv").open())) for name in ("captured", "lightning")]
    for one, other in zip(*histories, strict=True):
        assert float(one["train/loss"]) == pytest.approx(float(other["train/loss"]), rel=0.1)
        assert one["lr"] == other["lr"]


@pytest.mark.parametrize("in_memory", ["yes", "no"])
def test_from_worker_processes_too(recipe_file, tmp_path, captures, in_memory):
    settings = ("deterministic=true", f"data.in_memory={in_memory}", "data.workers=2")
    recipe = load_recipe(recipe_file, [*SETTINGS, *settings])
    for name in ("a", "b"):
        result = train(recipe, folder=tmp_path / name)
    assert captures == [1, 1]
    assert same_bits(tmp_path / "a", tmp_path / "b")
    assert 0 <= result["waiting_for_data"] <= 1


def test_segmenters(tmp_path, captures):
    write_folder(tmp_path / "data", {"train": 10, "val": 2})
    (tmp_path / "data" / "classes.txt").write_text("road\nsky\ntree\n")
    settings = [
        "data.name=folder",
        f"data.path={tmp_path / 'data'}",
        "model.options={backbone: resnet18, output_stride: 8}",
        "data.images.crop=65",
        "batch_size=2",
        "epochs=2",
    ]
    recipe = load_recipe("camvid/deeplabv2_kao_kv", [*settings, "deterministic=true"])
    for name in ("a", "b"):
        result = train(recipe, folder=tmp_path / name)
    assert captures == [1, 1]
    assert same_bits(tmp_path / "a", tmp_path / "b")
    assert 0 <= result["mean_iou"] <= 1


class TestCaptured:
    def test_draws_follow_from_the_seed_and_change(self):
        def function(x):
            return x + torch.rand_like(x) + torch.nn.functional.dropout(torch.ones_like(x))

        captured, found, expected = Captured(function, GPU), [], []
        for seed in range(WARM_UP + 4):
            seed_draws(seed, GPU)
            found.append(captured(torch.zeros(100, device=GPU)))
        for seed in range(WARM_UP + 4):
            seed_draws(seed, GPU)
            expected.append(function(torch.zeros(100, device=GPU)))
        assert captured.captured
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        assert len({float(one.sum()) for one in found}) == len(found)

    def test_a_function_that_waits_goes_on_as_it_is(self, captures, caplog):
        captured = Captured(lambda x: x * float(x.sum()), GPU)
        with caplog.at_level(logging.WARNING, "kronattn"):
            outputs = [captured(torch.full((2,), float(n), device=GPU)).tolist() for n in range(WARM_UP + 3)]
        assert outputs == [[2.0 * n * n] * 2 for n in range(WARM_UP + 3)]
        assert not captures
        (line,) = caplog.messages
        assert "test_on_gpu.py" in line
        assert "makes the host wait for the GPU" in line

    def test_a_capture_that_fails_is_survived_or_explained(self):
        """In a process of its own: what a failed capture leaves behind would be the other tests' problem."""
        script = """
import torch
from kronattn.training import graphs
graphs._watched = lambda function, inputs, device: (graphs._on_side_stream(function, inputs, device), None)
captured = graphs.Captured(lambda x: x * float(x.sum()), torch.device("cuda", 0))
try:
    print([captured(torch.full((2,), float(n), device="cuda")).tolist() for n in range(6)])
    print(len(torch.rand(3, device="cuda")))
except graphs.CannotGoOn as error:
    print("explained:", error)
"""
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
        assert "training without CUDA graphs" in done.stderr
        assert "[50.0, 50.0]]\n3\n" in done.stdout or "explained: " in done.stdout


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_learning_rates_and_shares_reach_the_graph(name):
    """Against the same steps without a graph, with rates and shares that change with every step."""

    def trained(capture: bool):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)).to(GPU)
        average = [torch.zeros_like(p) for p in network.parameters()]
        settings = OptimiserSettings(name=name, lr=0.1, momentum=0.9, nesterov=True)
        optimiser = build_optimiser(network, settings, capturable=True)

        @torch.no_grad()
        def blend(share):
            for kept, parameter in zip(average, network.parameters(), strict=True):
                kept.mul_(1 - share).add_(parameter * share)

        step = DeviceStep(
            lambda batch: batch,
            lambda batch: {"loss": (network(batch[0]) - batch[1]).square().mean()},
            optimiser,
            device=GPU,
            blend=blend,
        )
        run = Captured(step, GPU) if capture else step
        losses = []
        for index in range(WARM_UP + 6):
            torch.manual_seed(index)
            optimiser.param_groups[0]["lr"] = 0.01 * (1 + index % 4)
            step.set_numbers(1 / (1 + index))
            losses.append(run(torch.randn(32, 8, device=GPU), torch.randn(32, 4, device=GPU))[0])
        assert isinstance(optimiser.param_groups[0]["lr"], float)
        return torch.stack(losses), average

    (losses, average), (expected, other) = trained(True), trained(False)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    for one, same in zip(average, other, strict=True):
        torch.testing.assert_close(one, same, rtol=1e-5, atol=1e-6)


def test_copies_are_of_the_moment_and_keep_their_layout():
    weight = torch.randn(8, 4, 3, 3, device=GPU).to(memory_format=torch.channels_last)
    state = {"weight": weight, "twice": weight, "count": torch.tensor(7, device=GPU), "half": weight[:, ::2].bfloat16()}
    expected = {name: tensor.cpu() for name, tensor in state.items()}
    copies = HostCopies()
    for _ in range(2):
        found, wait = copies(state)
        kept = weight.clone()
        weight.zero_()
        wait()
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor)
        assert found["weight"].stride() == weight.stride()
        assert not found["weight"].is_cuda
        weight.copy_(kept)
