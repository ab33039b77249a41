"""Tools that replace, wrap or listen to modules find every one of them called: PyTorch's own, and stand-ins for others.

The packages that people use (peft, torchao, thop, torchinfo) are tried in tests/integrations.
"""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.utils import parametrizations, prune

import kronattn

NETWORKS = kronattn.list_models("classification")
SEGMENTERS = ["deeplabv2_aspp", "deeplabv2_attn", "deeplabv2_kao_kv", "deeplabv2_kao_qkv"]
IMAGE = (2, 3, 64, 64)


def build(name):
    torch.manual_seed(0)
    options = {"backbone": "kanet_kv", "backbone_options": {"width": 0.25}} if name in SEGMENTERS else {"width": 0.25}
    return kronattn.create_model(name, num_classes=3, **options)


def settled(name):
    """A network in evaluation whose statistics are those of the image: its features have a size of about one."""
    model = build(name)
    for module in model.modules():
        if hasattr(module, "running_mean"):
            module.momentum = 1.0
    with torch.no_grad():
        model.train()(image())
    return model.eval()


def maps(model):
    """Every module with a matrix: convolutions and linear maps."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Conv2d | nn.Linear)]


def image():
    return torch.randn(IMAGE, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", [*NETWORKS, *SEGMENTERS])
@pytest.mark.parametrize("how", ["training", "evaluation", "no_grad"])
def test_every_leaf_is_called_once(name, how):
    model = build(name).train(how == "training")
    calls: dict[str, int] = {}
    for key, module in model.named_modules():
        if not list(module.children()):
            calls[key] = 0
            module.register_forward_hook(lambda *_, key=key: calls.update({key: calls[key] + 1}))
    with torch.set_grad_enabled(how != "no_grad"):
        model(image())
    assert {key: count for key, count in calls.items() if count != 1} == {}
    owners = {key.rpartition(".")[0] for key, _ in model.named_parameters()}
    assert owners <= set(calls), "every parameter belongs to a module that is called"


@pytest.mark.parametrize("name", ["kanet_kv", "kanet_without_kao"])
def test_listening_changes_nothing(name):
    """Shortcuts that a listener turns off give the same result."""
    model, x = build(name).eval(), torch.randn(4, 3, 224, 224)
    with torch.no_grad():
        expected = model(x)
        for module in model.modules():
            module.register_forward_hook(lambda *_: None)
        torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-4)


class Adapter(nn.Module):
    """What a low-rank adapter does to a module: its output plus that of two small maps."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        if isinstance(base, nn.Conv2d):
            self.down = nn.Conv2d(base.in_channels, 2, base.kernel_size, base.stride, base.padding, bias=False)
            self.up: nn.Module = nn.Conv2d(2, base.out_channels, 1, bias=False)
        else:
            self.down = nn.Linear(base.in_features, 2, bias=False)
            self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize("name", ["kanet_kv", "kanet_qkv", "attnnet", *SEGMENTERS[1:]])
def test_adapters_learn_and_merge(name):
    model = build(name).eval()
    adapters = []
    for key, module in maps(model):
        pointwise = isinstance(module, nn.Linear) or (module.groups == 1 and module.kernel_size == (1, 1))
        if pointwise:
            parent = model.get_submodule(key.rpartition(".")[0])
            adapters.append(Adapter(module))
            setattr(parent, key.rpartition(".")[2], adapters[-1])
    x = image()
    output = model(x)
    output.square().sum().backward()
    for adapter in adapters:
        assert adapter.up.weight.grad.abs().sum() > 0
        assert adapter.down.weight.grad.abs().sum() > 0
    with torch.no_grad():
        for adapter in adapters:
            product = adapter.up.weight.flatten(1) @ adapter.down.weight.flatten(1)
            adapter.base.weight += product.view_as(adapter.base.weight)
            adapter.up.weight.zero_()
        torch.testing.assert_close(model(x), output, rtol=1e-4, atol=1e-5 * output.abs().max().item())


@pytest.mark.parametrize("name", ["kanet_qkv", "deeplabv2_kao_kv"])
@pytest.mark.parametrize(
    "apply",
    [
        lambda module: prune.l1_unstructured(module, "weight", amount=0.3),
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
        nn.utils.weight_norm,
    ],
    ids=["prune", "weight_norm", "spectral_norm", "old_weight_norm"],
)
def test_reparametrised_weights_are_used_and_learn(name, apply):
    model, x = build(name), image()
    reference = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        modules = [module for _, module in maps(model)]
        for module in modules:
            apply(module)
    model(x).square().sum().backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
    # The same network with the weights that came out, computed plainly.
    model.eval(), reference.eval()
    with torch.no_grad():
        for (_, plain), module in zip(maps(reference), modules, strict=True):
            plain.weight.copy_(module.weight)
        buffers = dict(model.named_buffers())
        for key, buffer in reference.named_buffers():
            buffer.copy_(buffers[key])
        torch.testing.assert_close(model(x), reference(x), rtol=1e-4, atol=1e-4)


class Rounded(torch.Tensor):
    """A weight that is more than a tensor: eight bits with a scale, like torchao's, which knows linear maps alone."""

    @staticmethod
    def __new__(cls, weight):
        return torch.Tensor._make_wrapper_subclass(cls, weight.shape, dtype=weight.dtype)

    def __init__(self, weight):
        self.scale = weight.abs().amax(dim=1, keepdim=True) / 127
        self.codes = (weight / self.scale).round().to(torch.int8)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is nn.functional.linear:
            x, weight, *rest = args
            return nn.functional.linear(x, weight.codes.to(x.dtype) * weight.scale, *rest)
        if getattr(function, "__name__", "") in ("__get__", "detach", "is_floating_point", "requires_grad_"):
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        raise NotImplementedError(f"{function} of a rounded weight")

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"{function} of a rounded weight")


@pytest.mark.parametrize("name", ["kanet_kv", "kanet_qkv", "attnnet", "deeplabv2_kao_kv", "deeplabv2_kao_qkv"])
def test_weights_that_are_more_than_a_tensor(name):
    model, x = settled(name), image()
    expected = model(x)
    for _, module in maps(model):
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(Rounded(module.weight.detach()), requires_grad=False)
    with torch.no_grad():
        found = model(x)
    assert (found - expected).abs().max() < 0.1 * expected.abs().max()
    assert not torch.equal(found, expected)


@pytest.mark.parametrize("name", ["kanet_kv", "kanet_qkv", "attnnet", "deeplabv2_kao_kv"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_dynamic_quantisation(name):
    if not torch.backends.quantized.supported_engines:
        pytest.skip("this build of PyTorch has no quantised kernels")
    model, x = settled(name), image()
    quantised = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    with torch.no_grad():
        expected, found = model(x), quantised(x)
    assert (found - expected).abs().max() < 0.1 * expected.abs().max()


@pytest.mark.parametrize("name", ["kanet_kv", "kanet_qkv", "kanet_without_kao"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_static_quantisation(name):
    from torch.ao.quantization import get_default_qconfig_mapping
    from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

    engines = [engine for engine in torch.backends.quantized.supported_engines if engine != "none"]
    if not engines:
        pytest.skip("this build of PyTorch has no quantised kernels")
    model, x = settled(name), image()
    engine = "x86" if "x86" in engines else engines[-1]
    torch.backends.quantized.engine = engine
    prepared = prepare_fx(model, get_default_qconfig_mapping(engine), (x,))
    with torch.no_grad():
        prepared(x)
        quantised = convert_fx(prepared)
        found = quantised(x)
    # Eight bits of an untrained network with depth-wise convolutions are not close to anything: it has to run, with
    # every convolution and map in eight bits.
    assert found.shape == (2, 3)
    assert torch.isfinite(found).all()
    assert found.std() > 0
    kinds = {key: type(module).__module__ for key, module in quantised.named_modules() if hasattr(module, "scale")}
    for key, _ in maps(model):
        assert "quantized" in kinds[key], key


SHARDED = ("kanet_kv", "deeplabv2_kao_qkv")


def _shard(rank, folder):
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    torch.set_num_threads(1)
    for name in SHARDED:
        model = build(name)
        for module in model.modules():
            if isinstance(module, nn.Conv2d | nn.Linear | nn.BatchNorm2d):
                fully_shard(module)
        fully_shard(model)
        output = model(image())
        output.square().sum().backward()
        gradients = [parameter.grad.full_tensor().abs().sum().item() for parameter in model.parameters()]
        if rank == 0:
            torch.save((output.detach(), gradients), f"{folder}/{name}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """All networks in one pair of processes: to start them takes longer than anything that they do."""
    folder = tmp_path_factory.mktemp("sharded")
    mp.spawn(_shard, args=(str(folder),), nprocs=2)
    return folder


@pytest.mark.parametrize("name", SHARDED)
def test_sharded_module_by_module(name, sharded):
    output, gradients = torch.load(sharded / f"{name}.pt")
    model = build(name)
    expected = model(image())
    expected.square().sum().backward()
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)
    for found, parameter in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(found, parameter.grad.abs().sum().item(), rtol=1e-3, atol=1e-3)


def test_a_wrapper_around_the_stages_is_called():
    class Wrapper(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.calls = inner, 0

        def forward(self, x):
            self.calls += 1
            return self.inner(x)

    model = build("kanet_kv")
    model.stages = Wrapper(model.stages)
    model(image())
    assert model.stages.calls == 1
