"""Training runs, from a recipe to the files they leave: what they keep, how they end, and what they survive."""

import csv
import json
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from safetensors.torch import load_file

from kronattn.models.files import load_model
from kronattn.models.weights import unpack
from kronattn.training import image_data
from kronattn.training.callbacks import Diverged
from kronattn.training.evaluation import evaluate
from kronattn.training.recipe import load_recipe
from kronattn.training.run import train
from tests.data.segmentation_folders import write_folder

RECIPES = Path(__file__).parents[2] / "recipes"


def with_settings(recipe_file: Path, *settings: str):
    return load_recipe(recipe_file, settings)


def same_weights(one: Path, other: Path) -> bool:
    first, second = (load_file(run / "weights-last.safetensors") for run in (one, other))
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_what_a_run_leaves(recipe, tmp_path, with_curves):
    result = train(recipe, folder=tmp_path / "run")
    run = tmp_path / "run"
    names = {path.name.split(".")[0] for path in run.iterdir()}
    assert names >= {"config", "last", "best", "history", "result", "curves", "weights", "README", "events"}
    assert json.loads((run / "result.json").read_text()) == result
    assert load_recipe(run / "config.yaml") == recipe
    rows = list(csv.DictReader((run / "history.csv").open()))
    assert [row["epoch"] for row in rows] == ["1", "2", "3"]
    assert float(rows[-1]["val/top1"]) == pytest.approx(result["top1"])
    assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")
    card = (run / "README.md").read_text()
    assert "kanet_kv" in card
    assert "kronattn train --config config.yaml" in card
    assert str(tmp_path) not in card
    assert "n01440764" in card
    assert result["images_per_second"] > 0
    assert 0 <= result["waiting_for_data"] < 1


def test_every_file_of_a_run_gives_the_same_network(recipe, tmp_path):
    result = train(recipe, folder=tmp_path / "run")
    path = recipe.data.path
    for name in ("weights-last.safetensors", "last.ckpt"):
        found = evaluate(tmp_path / "run" / name, path, accelerator="cpu").figures
        assert found["top1"] == pytest.approx(result["top1"])
        assert found["images"] == 6
        assert sum(entry["images"] for entry in found["classes"]) == 6
        assert 0 <= found["calibration_error"] <= 1
    network, description = load_model(tmp_path / "run" / "best.ckpt")
    assert description.classes == ["n01440764", "n02102040"]
    assert network(torch.zeros(1, 3, 32, 32)).shape == (1, 2)


def test_the_same_seed_gives_the_same_bits(recipe, tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        train(replace(recipe, seed=seed, epochs=2), folder=tmp_path / name)
    assert same_weights(tmp_path / "a", tmp_path / "b")
    assert not same_weights(tmp_path / "a", tmp_path / "c")


def test_images_from_files_give_the_bits_of_images_in_memory(recipe_file, tmp_path):
    for in_memory in ("yes", "no"):
        settings = (f"data.in_memory={in_memory}", "data.workers=0", "epochs=2")
        train(with_settings(recipe_file, *settings), folder=tmp_path / in_memory)
    assert same_weights(tmp_path / "yes", tmp_path / "no")


class Sending(Callback):
    """Where processes that load data are not forked (the rule from Python 3.14 on), what they need is sent to them."""

    def on_train_batch_end(self, trainer, *_) -> None:
        for loader in (trainer.train_dataloader, trainer.val_dataloaders):
            self.sent = pickle.loads(pickle.dumps((loader.dataset, loader.collate_fn)))


def test_processes_that_load_data_can_be_sent_what_they_need(recipe_file, tmp_path):
    write_folder(tmp_path / "masks", {"train": 2, "val": 2})
    (tmp_path / "masks" / "classes.txt").write_text("a\nb\nc\n")
    small = (
        f"data={{name: folder, path: {tmp_path / 'masks'}, images: {{crop: 33}}, in_memory: 'no', workers: 0}}",
        "model.options={backbone: kanet_kv, backbone_options: {width: 0.25}}",
        "batch_size=2",
        "iterations=1",
        "precision=32-true",
        "accelerator=cpu",
    )
    classifier = with_settings(recipe_file, "data.in_memory=no", "data.workers=0", "epochs=1")
    for name, recipe in (("classifier", classifier), ("segmenter", load_recipe("voc/deeplabv2_kao_kv", small))):
        sending = Sending()
        train(recipe, folder=tmp_path / name, callbacks=[sending])
        dataset, collate = sending.sent
        images, _ = collate([dataset[0], dataset[1]])
        assert images.shape[0] == 2


def test_a_config_that_a_run_used_repeats_it(recipe, tmp_path):
    train(replace(recipe, epochs=2), folder=tmp_path / "a")
    train(load_recipe(tmp_path / "a" / "config.yaml"), folder=tmp_path / "b")
    assert same_weights(tmp_path / "a", tmp_path / "b")


# The soak kills runs of both kinds at any moment.
@pytest.mark.parametrize("in_memory", [pytest.param("yes", marks=pytest.mark.slow), "no"])
def test_killed_and_resumed(recipe_file, tmp_path, in_memory):
    """SIGKILL in the middle of an epoch; the resumed run ends with the same weights, bit for bit."""
    settings = (f"data.in_memory={in_memory}", "data.workers=1", "epochs=4")
    recipe = with_settings(recipe_file, *settings)
    train(recipe, folder=tmp_path / "whole")
    command = [sys.executable, "-m", "tests.training.killed", str(recipe_file), str(tmp_path / "killed"), *settings]
    process = subprocess.Popen(command, cwd=Path(__file__).parents[2])
    deadline = time.monotonic() + 240
    while not (tmp_path / "killed" / "reached").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (tmp_path / "killed" / "result.json").exists()
    for name in (".last.ckpt.abc", ".history.csv.abc", ".weights.safetensors.abc", ".curves.png.abc"):
        (tmp_path / "killed" / name).write_text("half of a file")
    result = train(recipe, folder=tmp_path / "killed", resume=True)
    assert same_weights(tmp_path / "whole", tmp_path / "killed")
    histories = [(tmp_path / name / "history.csv").read_text() for name in ("whole", "killed")]
    assert histories[0] == histories[1]
    assert not list((tmp_path / "killed").glob(".*"))
    assert result["top1"] == json.loads((tmp_path / "whole" / "result.json").read_text())["top1"]


@pytest.mark.parametrize("ema", [None, 0.9])
def test_killed_after_the_last_checkpoint(recipe, tmp_path, ema):
    """Found by the soak: there was nothing left to train, and so the moving average was not taken either."""
    recipe = replace(recipe, ema=ema, epochs=2)
    train(recipe, folder=tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "killed")
    for name in ("result.json", "weights.safetensors", "weights-last.safetensors", "README.md", "curves.png"):
        (tmp_path / "killed" / name).unlink()
    train(recipe, folder=tmp_path / "killed", resume=True)
    assert same_weights(tmp_path / "whole", tmp_path / "killed")
    for name in ("weights.safetensors", "history.csv"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "killed" / name).read_bytes()


def test_validation_now_and_then(recipe, tmp_path):
    """Every second epoch of five, and after the last one in any case."""
    result = train(replace(recipe, epochs=5, validate_every=2), folder=tmp_path / "run")
    rows = list(csv.DictReader((tmp_path / "run" / "history.csv").open()))
    assert [bool(row["val/top1"]) for row in rows] == [False, True, False, True, True]
    assert result["top1"] == pytest.approx(float(rows[-1]["val/top1"]))
    found = evaluate(tmp_path / "run" / "weights.safetensors", recipe.data.path, accelerator="cpu").figures
    assert found["top1"] == pytest.approx(result["best_top1"])
    assert (tmp_path / "run" / "best.ckpt").exists()


def test_a_finished_run_is_taken_as_it_is(recipe, tmp_path):
    first = train(replace(recipe, epochs=1), folder=tmp_path / "run")
    assert train(replace(recipe, epochs=1), folder=tmp_path / "run", resume=True) == first


def test_a_finished_run_is_not_taken_for_one_of_other_settings(recipe, tmp_path):
    folder = tmp_path / "run"
    train(replace(recipe, epochs=1), folder=folder)
    before = (folder / "config.yaml").read_text()
    wider = replace(recipe.model, options={**recipe.model.options, "width": 0.5})
    for other in (replace(recipe, epochs=5), replace(recipe, epochs=1, model=wider)):
        with pytest.raises(ValueError, match=r"run holds a run with other settings, those of .*config.yaml"):
            train(other, folder=folder, resume=True)
    assert (folder / "config.yaml").read_text() == before
    # Data may have been moved, and how it is read is the machine's.
    data = replace(recipe.data, path="elsewhere", workers=2, in_memory="yes")
    moved = replace(recipe, epochs=1, data=data, threads=3, accelerator="auto")
    assert train(moved, folder=folder, resume=True)["epochs"] == 1
    (folder / "result.json").write_text('{"top1": ')
    with pytest.raises(ValueError, match=r"result.json is no JSON, or cut short: remove it"):
        train(replace(recipe, epochs=1), folder=folder, resume=True)


def test_a_checkpoint_of_other_options(recipe, tmp_path):
    folder = tmp_path / "run"
    train(replace(recipe, epochs=1), folder=folder)
    (folder / "result.json").unlink()
    before = (folder / "config.yaml").read_text()
    wider = replace(recipe.model, options={**recipe.model.options, "width": 0.5})
    with pytest.raises(ValueError, match=r"last.ckpt is of a network with the options .*0.25.*, but .*0.5"):
        train(replace(recipe, model=wider), folder=folder, resume=True)
    assert (folder / "config.yaml").read_text() == before


@pytest.mark.parametrize("cut", [0, 3000, 5000])
def test_a_checkpoint_that_is_cut_short(recipe, tmp_path, cut):
    folder = tmp_path / "run"
    train(replace(recipe, epochs=1), folder=folder)
    (folder / "result.json").unlink()
    (folder / "last.ckpt").write_bytes((folder / "last.ckpt").read_bytes()[:cut])
    with pytest.raises(ValueError, match=r"last.ckpt is not a PyTorch file, or a broken one"):
        train(replace(recipe, epochs=1), folder=folder, resume=True)


def test_a_checkpoint_that_is_gone_is_not_called_broken(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"best.ckpt"):
        unpack(tmp_path / "best.ckpt")


@pytest.mark.parametrize("name", ["README.md", "config.yaml", "result.json", "weights.safetensors"])
def test_files_of_somebody_else_are_not_written_over(recipe, tmp_path, name):
    (tmp_path / name).write_text("epochs: 3\n")
    with pytest.raises(FileExistsError, match=f"holds {name}, which a run would write over: --output takes another"):
        train(recipe, folder=tmp_path, resume=True)
    assert (tmp_path / name).read_text() == "epochs: 3\n"
    assert not (tmp_path / "history.csv").exists()


def test_a_run_that_broke_off_early_is_begun_again(recipe, tmp_path):
    """Where it left its recipe and no checkpoint, as after a first epoch that diverged."""
    diverging = replace(recipe, optimiser=replace(recipe.optimiser, lr=1e30), epochs=1)
    with pytest.raises(Diverged):
        train(diverging, folder=tmp_path / "run")
    for name in ("history.csv", "best.ckpt"):
        (tmp_path / "run" / name).write_text("of the epoch that it broke off in")
    assert train(replace(recipe, epochs=1), folder=tmp_path / "run")["epochs"] == 1


def test_a_worker_s_folder(recipe, tmp_path):
    (tmp_path / "planned.yaml").write_text("")
    (tmp_path / "config.yaml").write_text("")
    assert train(replace(recipe, epochs=1), folder=tmp_path, resume=True, figures_only=True)["epochs"] == 1


def test_a_recipe_is_written_once_the_data_is_there(recipe, tmp_path):
    nowhere = replace(recipe, data=replace(recipe.data, path=str(tmp_path / "nowhere")))
    with pytest.raises(FileNotFoundError, match="nowhere"):
        train(nowhere, folder=tmp_path / "run")
    with pytest.raises(ValueError, match="accelerator 'cuda' with devices 1 cannot be used here: "):
        train(replace(recipe, accelerator="cuda"), folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_split_to_test_on_that_is_not_there(recipe, tmp_path):
    with pytest.raises(ValueError, match="holds no images below tset/"):
        train(recipe, folder=tmp_path / "run", test="tset")
    assert not (tmp_path / "run").exists()


def test_a_run_is_not_overwritten(recipe, tmp_path):
    train(replace(recipe, epochs=1), folder=tmp_path / "run")
    with pytest.raises(FileExistsError, match="holds a run already: --resume continues it"):
        train(recipe, folder=tmp_path / "run")


def test_a_checkpoint_of_another_network(recipe, recipe_file, tmp_path):
    train(replace(recipe, epochs=1), folder=tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    with pytest.raises(ValueError, match="is a checkpoint of kanet_kv, but the recipe trains attnnet"):
        train(with_settings(recipe_file, "model.name=attnnet"), folder=tmp_path / "run", resume=True)


@pytest.mark.parametrize("clip", ["null", "1.0"])
def test_diverging(recipe_file, tmp_path, clip):
    recipe = with_settings(recipe_file, "optimiser.lr=1e30", "epochs=2", f"optimiser.clip={clip}")
    with pytest.raises(
        Diverged, match=r"the loss became NaN or infinite in step \d, in epoch 1 of 2.*there is no checkpoint yet"
    ) as found:
        train(recipe, folder=tmp_path / "run")
    assert ("optimiser.clip" in str(found.value)) == (clip == "null")
    assert not (tmp_path / "run" / "last.ckpt").exists()


def test_diverging_later_keeps_the_last_good_checkpoint(recipe, tmp_path):
    from lightning.pytorch.callbacks import Callback

    class Poison(Callback):
        def on_train_epoch_start(self, trainer, module):
            if trainer.current_epoch == 1:
                with torch.no_grad():
                    module.network.classifier.weight.fill_(float("nan"))

    with pytest.raises(Diverged, match="in epoch 2 of 3"):
        train(recipe, folder=tmp_path / "run", callbacks=[Poison()])
    network, _ = load_model(tmp_path / "run" / "last.ckpt")
    assert all(tensor.isfinite().all() for tensor in network.state_dict().values())


def test_a_full_disk_leaves_the_last_checkpoint_whole(recipe, tmp_path):
    """A limit on the size of files stands for the disk: the write fails half-way, as on a full one."""
    from lightning.pytorch.callbacks import Callback

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    class Fill(Callback):
        def on_train_epoch_start(self, trainer, module):
            if trainer.current_epoch == 1:
                trainer.strategy.checkpoint_io.finish()
                resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))

    try:
        with pytest.raises(OSError, match="last one is whole|File too large"):
            train(recipe, folder=tmp_path / "run", callbacks=[Fill()])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    load_model(tmp_path / "run" / "last.ckpt")
    assert not [path for path in (tmp_path / "run").iterdir() if path.name.startswith(".")]
    assert train(recipe, folder=tmp_path / "run", resume=True)["epochs"] == 3


def test_too_few_images(recipe, tmp_path):
    with pytest.raises(ValueError, match="18 training images do not fill one batch of 64"):
        train(replace(recipe, batch_size=64), folder=tmp_path / "run")


@pytest.mark.parametrize("in_memory", ["yes", "no"])
def test_bad_images(recipe_file, folder, tmp_path, in_memory):
    shutil.copytree(folder, tmp_path / "images")
    broken = tmp_path / "images" / "train" / "n02102040" / "4.JPEG"
    broken.write_bytes(broken.read_bytes()[:300])
    settings = (f"data.path={tmp_path / 'images'}", f"data.in_memory={in_memory}", "data.workers=1", "epochs=1")
    with pytest.raises(Exception, match=r"n02102040/4.JPEG is broken"):
        train(with_settings(recipe_file, *settings), folder=tmp_path / "a")
    recipe = with_settings(recipe_file, *settings, "data.skip_bad_images=true")
    result = train(recipe, folder=tmp_path / "b")
    assert result["skipped_images"] == 1
    assert result["skipped"][0].endswith("n02102040/4.JPEG")


def test_start_from_a_file(recipe, tmp_path):
    train(replace(recipe, epochs=1), folder=tmp_path / "a")
    start = replace(recipe.model, weights=str(tmp_path / "a" / "weights.safetensors"))
    result = train(replace(recipe, model=start, epochs=1), folder=tmp_path / "b")
    assert result["epochs"] == 1
    other = replace(start, name="kanet_kv", options={"width": 0.5})
    with pytest.raises(ValueError, match="does not fit the network"):
        train(replace(recipe, model=other), folder=tmp_path / "c")


def test_mixing_compiling_and_a_network_of_timms(recipe_file, tmp_path):
    pytest.importorskip("timm")
    settings = ("model.name=timm/resnet10t", "model.options={}", "data.images.mixup=0.2", "data.images.cutmix=1.0")
    more = ("data.images.crop=resized", "data.images.erase=0.5", "data.images.jitter=0.3", "epochs=1")
    result = train(with_settings(recipe_file, *settings, *more, "channels_last=true"), folder=tmp_path / "run")
    assert result["model"] == "timm/resnet10t"


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_papers_recipe_end_to_end(folder, tmp_path, processes):
    """On a tiny folder in ImageNet's layout; two processes through Lightning's DDP, as under torchrun."""
    settings = ["epochs=1", "batch_size=8", f"devices={processes}", "accelerator=cpu", "precision=32-true"]
    small = ["model.options.width=0.25", "data.in_memory=no", "data.workers=1"]
    command = [sys.executable, "-m", "kronattn.cli", "train", "--config", str(RECIPES / "imagenet" / "kanet_kv.yaml")]
    command += ["--data", str(folder), "--output", str(tmp_path / "run"), "--json", *settings, *small]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout)
    assert (result["data"], result["epochs"]) == ("imagenet", 1)
    assert load_model(tmp_path / "run" / "weights.safetensors")[1].size == 224


@pytest.mark.parametrize(("setting", "mode"), [(True, None), ("reduce-overhead", "reduce-overhead")])
def test_how_it_is_compiled(recipe, tmp_path, monkeypatch, setting, mode):
    seen = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, **options: seen.append(options))
    train(replace(recipe, epochs=1, compile=setting), folder=tmp_path / "run")
    assert seen == [{"dynamic": False, "mode": mode}]
    assert load_recipe(tmp_path / "run" / "config.yaml").compile == setting


def test_runs_in_one_process_decode_once(recipe, tmp_path, monkeypatch):
    decoded = []
    real = image_data.decode_all
    monkeypatch.setattr(image_data, "decode_all", lambda *a, **o: decoded.append(1) or real(*a, **o))
    store = {}
    for seed in (0, 1):
        train(replace(recipe, seed=seed, epochs=1), folder=tmp_path / str(seed), store=store)
    assert len(decoded) == 2  # the training images and those to validate with
    # Another size is another dataset.
    images = replace(recipe.data.images, resize=48)
    train(replace(recipe, epochs=1, data=replace(recipe.data, images=images)), folder=tmp_path / "other", store=store)
    assert len(decoded) == 4


def test_a_cache_is_read_by_the_next_run(recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", "elsewhere")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "elsewhere")
    kept = replace(recipe, cache=str(tmp_path / "cache"), epochs=1)
    train(kept, folder=tmp_path / "a")
    train(replace(recipe, epochs=1), folder=tmp_path / "b")
    monkeypatch.setattr(image_data, "decode_all", None)
    train(kept, folder=tmp_path / "c")
    assert same_weights(tmp_path / "a", tmp_path / "b")
    assert same_weights(tmp_path / "a", tmp_path / "c")


def test_deterministic_is_handed_on(recipe, tmp_path):
    seen = []

    class Look(Callback):
        def on_train_start(self, trainer, module):
            seen.append(torch.are_deterministic_algorithms_enabled())

    try:
        train(replace(recipe, epochs=1, deterministic=True), folder=tmp_path / "run", callbacks=[Look()])
    finally:
        torch.use_deterministic_algorithms(False)
    assert seen == [True]


class _Losses(Callback):
    """Each step's loss, by epoch."""

    def __init__(self):
        self.seen = {}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.setdefault(trainer.current_epoch, []).append((float(outputs["loss"]), len(batch[0])))


@pytest.mark.parametrize(
    ("iterations", "precision"),
    [(None, "32-true"), (None, "bf16-mixed"), (6, "32-true")],
    ids=["whole epochs", "half precision", "ends within an epoch"],
)
def test_figures_of_training_are_means_over_an_epoch(recipe, tmp_path, iterations, precision):
    losses = _Losses()
    settings = replace(recipe, epochs=2, iterations=iterations, batch_size=4, precision=precision)
    result = train(settings, folder=tmp_path / "run", callbacks=[losses])
    rows = list(csv.DictReader((tmp_path / "run" / "history.csv").open()))
    steps = [len(seen) for seen in losses.seen.values()]
    assert len(set(steps)) == (1 if iterations is None else 2)
    for row, seen in zip(rows, losses.seen.values(), strict=True):
        images = sum(size for _, size in seen)
        assert float(row["train/loss"]) == pytest.approx(sum(loss * size for loss, size in seen) / images)
        assert 0 <= float(row["train/top1"]) <= 1
    assert result["train_loss"] == pytest.approx(float(rows[-1]["train/loss"]))


def test_nothing_piles_up_with_every_step(recipe, tmp_path):
    """torch.manual_seed leaves a note for each kind of device that is not in use."""
    noted = len(torch.cuda._queued_calls)
    train(replace(recipe, epochs=2, accelerator="cpu"), folder=tmp_path / "run")
    # Lightning seeds a run once.
    assert len(torch.cuda._queued_calls) <= noted + 1
