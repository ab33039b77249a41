"""``kronattn train``, ``evaluate`` and ``compare``: what they print, and one line for each mistake."""

import json
import shutil

import pytest

from kronattn.cli import main
from tests.training.conftest import folder, one_thread, recipe, recipe_file

__all__ = ["folder", "one_thread", "recipe", "recipe_file"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory, folder):
    from tests.training.conftest import SMALL

    place = tmp_path_factory.mktemp("cli")
    config = place / "small.yaml"
    config.write_text(SMALL)
    run = place / "run"
    arguments = ["train", "--config", str(config), "--data", str(folder), "--output", str(run)]
    assert main([*arguments, "--seed", "3", "--model", "kanet_qkv", "epochs=2", "--optimiser.lr", "0.01"]) == 0
    return config, run


def error_of(capsys, arguments) -> str:
    assert main(arguments) != 0
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1, captured.err
    return captured.err


def test_settings_reach_the_run(trained):
    _, run = trained
    result = json.loads((run / "result.json").read_text())
    assert (result["model"], result["seed"], result["epochs"]) == ("kanet_qkv", 3, 2)
    assert "lr: 0.01" in (run / "config.yaml").read_text()


def test_the_saved_config_repeats_the_run(trained, tmp_path, capsys):
    _, run = trained
    arguments = ["train", "--config", str(run / "config.yaml"), "--output", str(tmp_path / "again"), "--json"]
    assert main(arguments) == 0
    again = json.loads(capsys.readouterr().out)
    first = json.loads((run / "result.json").read_text())
    assert (again["top1"], again["loss"], again["train_loss"]) == (first["top1"], first["loss"], first["train_loss"])


def test_evaluate(trained, folder, capsys, tmp_path):
    _, run = trained
    figure = tmp_path / "confusion.png"
    arguments = ["evaluate", str(run / "weights.safetensors"), "--data", str(folder), "--device", "cpu"]
    assert main([*arguments, "--output", str(figure)]) == 0
    assert "calibration error" in capsys.readouterr().out
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["images"] == 6
    assert len(found["classes"]) == 2


def test_evaluate_on_classes_that_the_network_does_not_know(trained, folder, tmp_path, capsys):
    _, run = trained
    shutil.copytree(folder / "val", tmp_path / "data" / "val")
    (tmp_path / "data" / "val" / "n01440764").rename(tmp_path / "data" / "val" / "zebra")
    arguments = ["evaluate", str(run / "last.ckpt"), "--data", str(tmp_path / "data"), "--device", "cpu"]
    assert "a class 'zebra' that the network does not know" in error_of(capsys, arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["epoch=3"], "unknown key 'epoch': did you mean 'epochs'?"),
        (["--optimiser.lrr", "0.1"], "unknown key 'optimiser.lrr': did you mean 'lr'?"),
        (["--epochs"], "--epochs needs a value"),
        (["surprise"], "expected key=value, got 'surprise'"),
        (["--model", "kanet_kw"], "unknown model 'kanet_kw': did you mean 'kanet_kv'"),
        (["model.options.widht=1"], "widht"),
        (["--data", "nowhere"], "there is no folder or .tar archive 'nowhere'"),
        (["batch_size=0"], "batch_size must be at least 1"),
        (["epochs=null"], "epochs is null: give a value"),
        (["--data", ""], "needs to know where it lies"),
    ],
)
def test_mistakes(recipe_file, tmp_path, capsys, arguments, message):
    err = error_of(capsys, ["train", "--config", str(recipe_file), "--output", str(tmp_path / "run"), *arguments])
    assert message in err


def test_a_network_that_timm_does_not_have(recipe_file, tmp_path, capsys):
    pytest.importorskip("timm")
    arguments = ["train", "--config", str(recipe_file), "--output", str(tmp_path / "run"), "--model", "timm/nope"]
    assert "unknown model 'timm/nope': timm.list_models() says which there are" in error_of(capsys, arguments)


def test_a_precision_that_weights_and_images_would_not_share(trained, folder, capsys):
    arguments = ["evaluate", str(trained[1]), "--data", str(folder), "--precision", "64-true"]
    message = "--precision must be 32-true, bf16-mixed or 16-mixed, not '64-true'"
    assert message in error_of(capsys, arguments)


def test_mistakes_leave_no_folders(recipe_file, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    error_of(capsys, ["train", "--config", str(recipe_file), "--data", "nowhere", "--output", "new/runs/first"])
    error_of(capsys, ["compare", "--config", str(recipe_file), "--models", "kanet_kv", "--seeds", "x"])
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_no_such_recipe(capsys):
    assert "there is no recipe nothing" in error_of(capsys, ["train", "--config", "nothing"])


def test_a_folder_of_a_recipe_s_name_is_no_recipe(tmp_path, monkeypatch, capsys):
    """Whoever has photos in photos/ types ``--config photos --data photos``."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    assert "photos holds no images" in error_of(capsys, ["train", "--config", "photos", "--data", "photos"])


def test_divergence_is_one_line(recipe_file, tmp_path, capsys):
    arguments = ["train", "--config", str(recipe_file), "--output", str(tmp_path / "run"), "optimiser.lr=1e30"]
    assert "the loss became NaN or infinite in step" in error_of(capsys, arguments)


def test_a_bad_image_in_a_worker_process_is_one_line(recipe_file, folder, tmp_path, capsys):
    shutil.copytree(folder, tmp_path / "images")
    broken = tmp_path / "images" / "train" / "n02102040" / "4.JPEG"
    broken.write_bytes(broken.read_bytes()[:300])
    arguments = ["train", "--config", str(recipe_file), "--data", str(tmp_path / "images")]
    arguments += ["--output", str(tmp_path / "run"), "data.in_memory=no", "data.workers=1"]
    err = error_of(capsys, arguments)
    assert "n02102040/4.JPEG is broken" in err
    assert "Traceback" not in err


def test_compare(recipe_file, tmp_path, capsys):
    runs, output, figure = tmp_path / "runs", tmp_path / "results" / "tiny.json", tmp_path / "tiny.svg"
    arguments = ["compare", "--config", str(recipe_file), "--models", "mobilenetv2,kanet_qkv", "--seeds", "0-1"]
    arguments += ["--folder", str(runs), "--output", str(output), "--figure", str(figure), "epochs=2"]
    assert main([*arguments, "--jobs", "2"]) == 0
    captured = capsys.readouterr()
    assert "kanet_qkv, seed 1:" in captured.err
    assert "95%" in captured.out
    assert "Several runs shared the device" in " ".join(captured.out.split())
    found = json.loads(output.read_text())
    assert [(run["model"], run["seed"]) for run in found["runs"]] == [
        ("mobilenetv2", 0),
        ("kanet_qkv", 0),
        ("mobilenetv2", 1),
        ("kanet_qkv", 1),
    ]
    assert str(tmp_path) not in found["recipe"]
    assert found["summary"][1]["difference"]["pairs"] == 2
    assert [row["images_per_second"] for row in found["summary"]] == [None, None]
    assert "<svg" in figure.read_text()
    assert not list(runs.glob(".*"))
    # Once more: three runs are taken as they are, the fourth is made again, alone, and has a speed.
    before = {path: path.stat().st_mtime_ns for path in runs.rglob("result.json")}
    missing = runs / "kanet_qkv-seed1"
    shutil.rmtree(missing)
    assert main([*arguments, "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert [run["top1"] for run in again["runs"]] == [run["top1"] for run in found["runs"]]
    kept = [path for path in runs.rglob("result.json") if path.stat().st_mtime_ns == before[path]]
    assert len(kept) == 3
    own = again["runs"][3]["images_per_second"]
    assert own > 0
    assert [row["images_per_second"] for row in again["summary"]] == [None, own]
    # Each by itself: now there are speeds.
    assert main([*arguments, "--alone", "2", "--json"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert [row["images_per_second"] > 0 for row in alone["summary"]] == [True, True]
    for name in ("images_per_second", "waiting_for_data"):
        assert alone["summary"][0][name] == alone["alone"]["mobilenetv2"][name]
    assert "--alone must be at least 2" in error_of(capsys, [*arguments, "--alone", "1"])
    # Other settings are another comparison.
    assert "holds a run with other settings" in error_of(capsys, [*arguments, "optimiser.lr=0.5"])


def test_compare_goes_on_when_a_run_fails(recipe_file, tmp_path, capsys):
    arguments = ["compare", "--config", str(recipe_file), "--models", "mobilenetv2,timm/resnetx", "--seeds", "0"]
    arguments += ["--folder", str(tmp_path / "runs"), "-o", str(tmp_path / "tiny.json"), "epochs=1"]
    assert main([*arguments, "--quiet"]) == 1
    err = capsys.readouterr().err
    assert "timm/resnetx, seed 0 failed: " in err
    assert "mobilenetv2" not in err  # what went well is told without --quiet alone
    assert len(json.loads((tmp_path / "tiny.json").read_text())["runs"]) == 1


def test_compare_with_an_unknown_network_trains_none(recipe_file, tmp_path, capsys):
    arguments = ["compare", "--config", str(recipe_file), "--models", "mobilenetv2,kanet_kw", "--seeds", "0"]
    arguments += ["--folder", str(tmp_path / "runs"), "--output", str(tmp_path / "results" / "tiny.json")]
    assert "unknown model 'kanet_kw': did you mean 'kanet_kv'" in error_of(capsys, arguments)
    message = "device must be auto, cpu, cuda or mps, not 'abacus'"
    assert message in error_of(capsys, [*arguments[:3], "--models", "kanet_kv", "--device", "abacus"])
    assert not (tmp_path / "runs").exists()
    assert not (tmp_path / "results").exists()


def test_compare_contexts(recipe_file, tmp_path, capsys):
    arguments = ["compare", "--config", str(recipe_file), "--models", "kanet_kv", "--seeds", "0", "epochs=1"]
    arguments += ["--folder", str(tmp_path / "runs"), "--output", str(tmp_path / "tiny.json")]
    assert main([*arguments, "--context", "none, global_mean", "--baseline", "kanet_kv+none", "--json"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert "kanet_kv+global_mean, seed 0:" in captured.err
    assert [row["model"] for row in found["summary"]] == ["kanet_kv+none", "kanet_kv+global_mean"]
    assert found["summary"][0]["parameters"] > found["summary"][1]["parameters"]
    assert (tmp_path / "runs" / "kanet_kv+none-seed0" / "weights.safetensors").exists()
    message = "unknown context 'global_maen': did you mean 'global_mean' or 'global_context'? There are none,"
    assert message in error_of(capsys, [*arguments, "--context", "none,global_maen"])
    error = error_of(capsys, [*arguments, "--context", "none", "--baseline", "kanet_kv"])
    assert "--baseline kanet_kv is not among --models kanet_kv+none" in error


def test_compare_needs_its_baseline(recipe_file, capsys):
    arguments = ["compare", "--config", str(recipe_file), "--models", "kanet_kv", "--baseline", "mobilenetv2"]
    assert "--baseline mobilenetv2 is not among --models kanet_kv" in error_of(capsys, arguments)


def test_bench_loader(recipe_file, tmp_path, capsys):
    output = tmp_path / "loader.json"
    assert main(["bench", "loader", "--config", str(recipe_file), "--epochs", "3", "--output", str(output)]) == 0
    assert "images a second" in capsys.readouterr().out
    found = json.loads(output.read_text())
    assert len(found["pairs"]) == 2
    assert min(found["pairs"]) <= found["kept"] <= max(found["pairs"])
    assert found["images_per_second"] > 0
