"""Recipes: what they say, what they refuse, and that the paper's are the paper's to the letter."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from kronattn.data.classification import ImageArray
from kronattn.data.datasets import collate_good
from kronattn.models import create_model
from kronattn.nn import GlobalMean, KroneckerAttention
from kronattn.nn.coefficient_norm import CoefficientNorm
from kronattn.training.comparison import plan
from kronattn.training.image_data import ImageData
from kronattn.training.optimisation import build_optimiser, build_schedule
from kronattn.training.recipe import Recipe, load_recipe, recipe_yaml

RECIPES = Path(__file__).parents[2] / "recipes"
NETWORKS = (
    "kanet_kv",
    "kanet_qkv",
    "attnnet",
    "attnnet_pool",
    "mobilenetv2",
    "mobilenetv2_kao",
    "kanet_without_kao",
)


def test_every_recipe_loads_and_survives_being_written(tmp_path):
    files = sorted(RECIPES.rglob("*.yaml"))
    assert len(files) >= 2 * len(NETWORKS) + 1
    for file in files:
        recipe = load_recipe(file)
        copy = tmp_path / "config.yaml"
        copy.write_text(recipe_yaml(recipe))
        assert load_recipe(copy) == recipe, file


@pytest.mark.parametrize("folder", ["imagenet", "imagenette"])
def test_one_recipe_for_every_network(folder):
    recipes = [load_recipe(RECIPES / folder / f"{name}.yaml") for name in NETWORKS]
    assert [recipe.model.name for recipe in recipes] == list(NETWORKS)
    for recipe in recipes:
        recipe.model.name = ""
    assert all(recipe == recipes[0] for recipe in recipes)


class TestContext:
    def test_reaches_the_network(self):
        recipe = load_recipe(None, ["model.context=global_mean", "model.options={width: 0.25}"])
        assert recipe.model.label == "kanet_kv+global_mean"
        network = create_model(recipe.model.name, **recipe.model.all_options)
        assert sum(isinstance(module, GlobalMean) for module in network.modules()) == 10

    def test_as_an_option(self):
        recipe = load_recipe(None, ["model.options={context: axis_means}"])
        assert recipe.model.label == "kanet_kv+axis_means"
        assert load_recipe(None).model.label == "kanet_kv"

    def test_with_options(self, tmp_path):
        recipe = load_recipe(None, ["model.context=kao_qkv:positions=learned:gate=true", "model.options={width: 0.25}"])
        network = create_model(recipe.model.name, **recipe.model.all_options)
        assert network.stages[3][0].attn.gate
        assert network.stages[3][0].attn.positions is not None
        (single,) = plan(recipe, ["kanet_kv"], [3], tmp_path)
        assert single.recipe.model.label == "kanet_kv+kao_qkv:positions=learned:gate=true"
        assert single.folder.name == "kanet_kv+kao_qkv-positions=learned-gate=true-seed3"

    @pytest.mark.parametrize("context", ["squeeze_axial", "kao_qkv:positions=learned"])
    def test_survives_being_written(self, tmp_path, context):
        recipe = load_recipe(None, [f"model.context={context}"])
        (tmp_path / "config.yaml").write_text(recipe_yaml(recipe))
        assert load_recipe(tmp_path / "config.yaml") == recipe

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            (
                ["model.context=global_maen"],
                "unknown context 'global_maen': did you mean 'global_mean' or 'global_context'? There are none",
            ),
            (
                ["model.context=none", "model.options={context: kao_kv}"],
                "model.context is 'none', but model.options.context is 'kao_kv': give one",
            ),
            (["model.context=kao_qkv:gate"], "options are like kao_qkv:positions=learned:gate=true, not 'gate'"),
        ],
    )
    def test_mistakes(self, changes, message):
        with pytest.raises(ValueError) as raised:
            load_recipe(None, changes)
        assert message in str(raised.value)
        assert "\n" not in str(raised.value)


class TestThePapersRecipe:
    @pytest.fixture
    def recipe(self) -> Recipe:
        return load_recipe(RECIPES / "imagenet" / "kanet_kv.yaml")

    @pytest.fixture
    def network(self, recipe) -> nn.Module:
        return create_model(recipe.model.name, **recipe.model.options)

    def test_length_and_batch(self, recipe):
        assert (recipe.epochs, recipe.batch_size, recipe.label_smoothing, recipe.ema) == (150, 512, 0.0, None)

    def test_schedule_step_by_step(self, recipe):
        steps = 7
        parameter = nn.Parameter(torch.zeros(1))
        optimiser = torch.optim.SGD([parameter], lr=recipe.optimiser.lr)
        schedule = build_schedule(optimiser, recipe.schedule, recipe.epochs, steps)
        for epoch in range(recipe.epochs):
            expected = 0.1 if epoch < 80 else 0.01 if epoch < 105 else 0.001 if epoch < 120 else 0.0001
            for _ in range(steps):
                assert optimiser.param_groups[0]["lr"] == pytest.approx(expected)
                optimiser.step()
                schedule.step()

    def test_optimiser(self, recipe, network):
        optimiser = build_optimiser(network, recipe.optimiser)
        assert isinstance(optimiser, torch.optim.SGD)
        (group,) = optimiser.param_groups
        assert (group["lr"], group["momentum"], group["nesterov"], group["weight_decay"]) == (0.1, 0.9, False, 4e-5)
        assert len(group["params"]) == len(list(network.parameters()))

    def test_dropout_after_the_global_pooling(self, network):
        assert network.head_drop.p == pytest.approx(1 - 0.8)
        kept = []
        network.global_pool.register_forward_hook(lambda module, args, out: kept.append(out))
        network.head_drop.register_forward_hook(lambda module, args, out: kept.append(args[0]))
        network.eval()(torch.zeros(1, 3, 64, 64))
        assert kept[0] is kept[1]

    def test_xavier(self, network):
        for module in network.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                fan_in, fan_out = nn.init._calculate_fan_in_and_fan_out(module.weight)
                bound = (6 / (fan_in + fan_out)) ** 0.5
                assert module.weight.abs().max() <= bound
                if module.weight.numel() > 2000:
                    assert module.weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.1)

    def test_coefficients_have_a_batch_norm(self, network):
        layers = [module for module in network.modules() if isinstance(module, KroneckerAttention)]
        assert len(layers) == 10
        assert all(isinstance(layer.norm, CoefficientNorm) for layer in layers)

    def prepared(self, recipe, picture, split, count):
        """What the network sees of a picture, as colours from 0 to 255 again."""
        data = ImageData(replace(recipe.data, in_memory="no"), count)
        data._splits[split] = ImageArray(["one"], [0] * count, np.stack([picture] * count))
        dataset = data._datasets[split] = data.build(split)
        torch.manual_seed(0)
        images, _ = data.prepare(collate_good([dataset[at] for at in range(count)]), split)
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (data.images.mean, data.images.std))
        return 255 * (images * std + mean)

    def test_training_images(self, recipe):
        # A picture whose colour tells the place, so that a crop shows where it was taken from, and at which scale.
        places = torch.arange(512, dtype=torch.float32).mul(255 / 511)
        picture = torch.stack((places[:, None].expand(512, 512), places.expand(512, 512), torch.zeros(512, 512)))
        picture = picture.round().to(torch.uint8).permute(1, 2, 0).numpy()
        seen = self.prepared(recipe, picture, "train", 60)
        assert seen.shape == (60, 3, 224, 224)
        spans = [float(image[0, -1, 0] - image[0, 0, 0]) for image in seen]
        # 224 of 256 rows: the whole height was scaled to 256, whatever the crop.
        assert all(abs(span - 223) <= 2 for span in spans)
        tops = {int(image[0, 0, 0]) for image in seen}
        mirrored = [bool(image[1, 0, 0] > image[1, 0, -1]) for image in seen]
        assert min(tops) < 8
        assert max(tops) > 24
        assert 15 < sum(mirrored) < 45

    def test_evaluation_images_are_centre_crops(self, recipe):
        picture = np.zeros((256, 256, 3), dtype=np.uint8)
        picture[16:-16, 16:-16] = 200
        images = self.prepared(recipe, picture, "val", 1)
        assert images.shape == (1, 3, 224, 224)
        assert (images.round() == 200).all()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epoch: 3", "unknown key 'epoch': did you mean 'epochs'?"),
        ("data: {images: {sise: 32}}", "unknown key 'data.images.sise': did you mean 'size'?"),
        ("epochs: three", "epochs.*three"),
        ("optimiser: {name: sdg}", "optimiser.name.*sdg"),
        ("schedule: 3", "schedule holds settings: expected keys and values, not 3"),
        ("[1, 2]", "is not a recipe"),
        ("epochs: [", "is not YAML"),
        ("epochs: 0", "epochs must be at least 1"),
        ("compile: reduce", "compile must be true, false, auto, reduce-overhead or max-autotune, not 'reduce'"),
        ("optimiser: {lr: 1" + "0" * 400 + "}", "the recipe has a number that is too large"),
        ("ema: 1.5", "ema must lie between 0 and 1"),
        ("label_smoothing: 2", "label_smoothing must lie between 0 and 1, not 2"),
        ("data: {workers: -1}", "workers must be at least 0, not -1"),
        ("data: {images: {size: -1}}", "size must be at least 1, not -1"),
        ("data: {images: {eval_size: 0}}", "eval_size must be at least 1, not 0"),
        ("data: {images: {jitter: -1}}", "jitter must be at least 0, not -1"),
        ("data: {images: {mixup: -1}}", "mixup must be at least 0, not -1"),
        ("data: {images: {flip: 2}}", "flip must lie between 0 and 1, not 2"),
        ("data: {images: {std: [0, 1, 1]}}", "std must be above 0, not 0, 1, 1"),
        ("task: segmentation\ndata: {images: {std: [1, 1, 0]}}", "std must be above 0"),
        ("task: spectrograms\ndata: {images: {std: [0]}}", "std must be above 0"),
        ("model: {options: }", "model.options is null: give a value, or leave it out"),
        ("epochs: null", "epochs is null: give a value"),
        ("task: null", "task must be a name, such as classification, not None"),
        ("task: 5", "task must be a name, such as classification, not 5"),
        ("batch_size: 7\ndevices: 2", "batch_size 7 must be a multiple of the 2 devices"),
        ("data: {images: {size: 300}}", "size 300 cannot be cut from images of 256"),
        ("extends: other.yaml", "there is no recipe .*other.yaml"),
    ],
)
def test_refused(tmp_path, text, message):
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises((ValueError, FileNotFoundError), match=message) as caught:
        load_recipe(tmp_path / "recipe.yaml")
    assert "\n" not in str(caught.value)


def test_overrides_come_last(tmp_path):
    (tmp_path / "base.yaml").write_text("epochs: 5\nmodel: {name: attnnet, options: {width: 0.5}}")
    (tmp_path / "top.yaml").write_text("extends: base.yaml\nepochs: 6\nmodel: {options: {drop_rate: 0.1}}")
    recipe = load_recipe(tmp_path / "top.yaml", ["seed=4", "model.options.width=0.25"])
    assert (recipe.epochs, recipe.seed, recipe.model.name) == (6, 4, "attnnet")
    assert recipe.model.options == {"width": 0.25, "drop_rate": 0.1}


def test_warmup_and_cosine_and_poly():
    from kronattn.training.optimisation import learning_rate_factor
    from kronattn.training.recipe import ScheduleSettings

    cosine = ScheduleSettings("cosine", warmup=5)
    factors = [learning_rate_factor(cosine, epoch, 105) for epoch in (0, 2.5, 5, 55, 105)]
    assert factors == pytest.approx([0.01, 0.505, 1.0, 0.5, 0.0])
    poly = ScheduleSettings("poly", power=0.9)
    assert [learning_rate_factor(poly, e, 100) for e in (0, 50, 100)] == pytest.approx([1.0, 0.5**0.9, 0.0])


def test_vectors_and_coefficient_scales_can_be_spared_decay():
    network = create_model("kanet_kv", width=0.25, num_classes=3)
    recipe = load_recipe(None, ["optimiser.decay_vectors=false", "optimiser.weight_decay=0.1"])
    decayed, spared = build_optimiser(network, recipe.optimiser).param_groups
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)
    assert all(parameter.dim() > 1 for parameter in decayed["params"])
    assert len(decayed["params"]) + len(spared["params"]) == len(list(network.parameters()))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("extends: bad.yaml\n", "bad.yaml extends itself"),
        ("extends: [a]\n", r"extends must be the path of a recipe, not \['a'\]"),
        ("model: {name: " + "[" * 5000 + "]" * 5000 + "}\n", "nested too deeply|is not YAML"),
        ("model: !!python/object/apply:os.system ['true']\n", "is not YAML"),
        ("threads: 0\n", "threads must be at least 1, not 0"),
    ],
)
def test_recipes_of_strangers(tmp_path, text, message):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_recipe(path)
