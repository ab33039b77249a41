"""Fine-tuning in one command, on few photographs, from several kinds of weights."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from kronattn.cli import main
from kronattn.data.classification import load_split
from kronattn.data.prepare import prepare_image, seen_part
from kronattn.models import create_model
from kronattn.models.files import Description, load_model
from kronattn.models.registry import packaged_weights
from kronattn.training.recipe import load_recipe
from kronattn.training.start import start_from


def photographs(root, classes, each, size=(64, 48)):
    """A folder for each class, with nobody's split; what tells classes apart is a colour."""
    generator = np.random.default_rng(0)
    for number, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for index in range(each):
            pixels = generator.integers(0, 130, (size[1], size[0], 3), dtype=np.uint8)
            pixels[..., number % 3] += 120
            Image.fromarray(pixels).save(root / name / f"{index}.jpg")
    return root


@pytest.fixture(scope="module")
def sixty(tmp_path_factory):
    return photographs(tmp_path_factory.mktemp("sixty") / "pets", ["cat", "dog", "fish"], 20)


SMALLER = ["data.images.resize=72", "data.images.size=64", "data.images.eval_resize=72", "data.images.eval_size=64"]


def test_sixty_images_in_three_classes_without_a_flag(sixty, tmp_path, monkeypatch, capsys):
    """The recipe as it is, but for the size of images, which decides how long this takes."""
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--config", "finetune", "--data", str(sixty), *SMALLER, "epochs=4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["best_top1"] > 0.9  # colours, from trained weights
    _, description = load_model(found["folder"])
    assert description.classes == ["cat", "dog", "fish"]
    assert description.keep_aspect
    assert main(["evaluate", "--weights", found["folder"], "--data", str(sixty), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["images"] == 12


def test_photos_recipe(sixty, tmp_path, capsys):
    recipe = load_recipe("photos")
    assert not recipe.compile
    assert recipe.data.images.keep_aspect
    assert 48 // recipe.batch_size >= 3
    run = ["train", "--config", "photos", "--data", str(sixty), "-o", str(tmp_path / "run"), *SMALLER, "epochs=1"]
    assert main([*run, "--json", "model.options={width: 0.25}"]) == 0
    assert json.loads(capsys.readouterr().out)["epochs"] == 1


def test_the_backbone_rests_at_first(sixty, tmp_path):
    arguments = ["train", "--config", "finetune", "--data", str(sixty), *SMALLER, "ema=null", "epochs=1"]
    packaged = load_file(packaged_weights("kanet_kv"))
    for freeze, name in ((1, "frozen"), (0, "free")):
        assert main([*arguments, f"freeze_epochs={freeze}", "-o", str(tmp_path / name), "--quiet"]) == 0
    frozen, free = (load_file(tmp_path / name / "weights.safetensors") for name in ("frozen", "free"))
    features = [name for name in frozen if not name.startswith("classifier.")]
    assert all(torch.equal(frozen[name].float(), packaged[name].float()) for name in features)
    assert not torch.equal(free["stem.conv.weight"], packaged["stem.conv.weight"].float())
    assert not torch.equal(free["stem.norm.running_mean"], packaged["stem.norm.running_mean"].float())


def test_every_weight_learns_after_that(sixty, tmp_path):
    arguments = ["train", "--config", "finetune", "--data", str(sixty), *SMALLER, "ema=null", "--quiet"]
    assert main([*arguments, "freeze_epochs=1", "epochs=2", "-o", str(tmp_path / "run")]) == 0
    last, packaged = load_file(tmp_path / "run" / "weights-last.safetensors"), load_file(packaged_weights("kanet_kv"))
    assert not torch.equal(last["stem.conv.weight"], packaged["stem.conv.weight"].float())
    assert not torch.equal(last["stem.norm.running_mean"], packaged["stem.norm.running_mean"].float())


def test_from_mobilenetv2_in_a_file(tmp_path):
    torchvision = pytest.importorskip("torchvision")
    timm = pytest.importorskip("timm")
    theirs = torchvision.models.mobilenet_v2()
    torch.save(theirs.state_dict(), tmp_path / "torchvision.pth")
    network = create_model("kanet_kv", num_classes=3)
    start_from(network, str(tmp_path / "torchvision.pth"))
    assert torch.equal(network.stem.conv.weight, theirs.features[0][0].weight)

    theirs = timm.create_model("mobilenetv2_100")
    save_file(theirs.state_dict(), tmp_path / "timm.safetensors")
    network = create_model("mobilenetv2", num_classes=3)
    start_from(network, str(tmp_path / "timm.safetensors"))
    assert torch.equal(network.stem.conv.weight, theirs.conv_stem.weight)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["model.weights=kanet_kw"],
            "model.weights: kanet_kw is neither a file nor a network that comes with",
        ),
        (["freeze_epochs=-1"], "freeze_epochs must be at least 0, not -1"),
        (["freeze_epochs=1", "devices=2"], "freeze_epochs is for one device"),
        (["model.name=mobilenetv2"], "does not fit the network"),
    ],
)
def test_mistakes(sixty, tmp_path, capsys, settings, message):
    run = tmp_path / "run"
    assert main(["train", "--config", "finetune", "--data", str(sixty), "-o", str(run), *settings]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert not run.exists()


def test_an_unreadable_file_of_weights(sixty, tmp_path, capsys):
    (tmp_path / "w.pth").write_text("hello")
    weights = f"model.weights={tmp_path / 'w.pth'}"
    assert main(["train", "--config", "finetune", "--data", str(sixty), "-o", str(tmp_path / "run"), weights]) == 2
    err = capsys.readouterr().err
    assert "w.pth" in err
    assert err.count("\n") == 1


class TestFoldersWithoutASplit:
    def test_a_fifth_is_held_out_always_the_same(self, sixty):
        train, val = (load_split("folder", str(sixty), split) for split in ("train", "val"))
        assert train.classes == val.classes == ["cat", "dog", "fish"]
        assert [val.labels.count(label) for label in range(3)] == [4, 4, 4]
        names = [{images.name(at) for at in range(len(images))} for images in (train, val)]
        assert not names[0] & names[1]
        assert len(names[0] | names[1]) == 60
        again = load_split("folder", str(sixty), "val")
        assert names[1] == {again.name(at) for at in range(len(again))}

    def test_new_images_do_not_move_the_others_much(self, tmp_path):
        root = photographs(tmp_path / "a", ["cat", "dog"], 10)
        before = {str(entry) for entry in load_split("folder", str(root), "val").entries}
        Image.new("RGB", (9, 9)).save(root / "cat" / "new.jpg")
        after = {str(entry) for entry in load_split("folder", str(root), "val").entries}
        assert len(before & after) >= 3

    @pytest.mark.parametrize("names", [["training", "validation"], ["train"], ["cat"]])
    def test_folders_that_are_no_classes(self, tmp_path, names):
        root = photographs(tmp_path / "a", names, 4)
        with pytest.raises(ValueError, match="holds no images below"):
            load_split("folder", str(root), "val")

    def test_a_class_of_one_image(self, tmp_path):
        root = photographs(tmp_path / "a", ["cat", "dog"], 1)
        with pytest.raises(ValueError, match="the class cat has a single image"):
            load_split("folder", str(root), "train")


def test_aspect_is_kept(tmp_path):
    """A circle in a wide photograph stays one."""
    image = Image.new("RGB", (300, 100))
    image.paste((255, 255, 255), (130, 30, 170, 70))
    seen = Description("kanet_kv", resize=100, size=80, mean=[0.0] * 3, std=[1.0] * 3)
    kept = Description("kanet_kv", resize=100, size=80, mean=[0.0] * 3, std=[1.0] * 3, keep_aspect=True)
    for about, width in ((seen, 14), (kept, 40)):
        white = (prepare_image(image, about)[0] > 0.5).nonzero()
        height, found = (int(white[:, at].max() - white[:, at].min()) + 1 for at in (0, 1))
        assert abs(height - 40) <= 1
        assert abs(found - width) <= 1
    assert seen_part(image, kept).size == (80, 80)
