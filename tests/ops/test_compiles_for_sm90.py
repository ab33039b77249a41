"""Every kernel compiles for compute capability 9.0 with the Triton that is installed, also where there is no GPU.

The launchers are called as they are, on CPU tensors, with the launch itself replaced by a note of what would have been
launched: so kernels are compiled for the arguments, constants and blocks that they are launched with. That happens in a
process of its own, since elsewhere in these tests Triton interprets kernels rather than compiling them.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import pkgutil
import subprocess
import sys

import pytest
import torch

# Bytes of shared memory that a block of threads can have. Half precision, which is what the planner picks kernels for,
# has to do with what an A100 has: GPUs with less do not get the kernels.
SHARED, SHARED_IN_HALF = 227 * 1024, 160 * 1024
POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int64: "*i64"}


def grid(*shape, dtype=torch.bfloat16, channels_last=True):
    x = torch.empty(shape, dtype=dtype)
    return x.contiguous(memory_format=torch.channels_last) if channels_last else x


def call_launchers(modules):
    """The shapes of KANets and heads, and what is unlike them: other dtypes and layouts, heads, biases, many keys."""
    pool, outer = modules["pool"].pool_forward, modules["outer"].outer_sum_forward
    mean_once, coefficient_norm = modules["outer"].mean_once_forward, modules["coefficient_norm"]
    attend, attend_backward = modules["attend"].attend_forward, modules["attend"].attend_backward
    moments, batch_norm = modules["moments"], modules["batch_norm_act"]
    half, single = {"dtype": torch.float16, "channels_last": False}, {"dtype": torch.float32, "channels_last": False}
    cases = [
        # (N, C, h, w), channels of the values, heads, bias, options
        ((512, 32, 28, 28), 32, 1, False, {}),
        ((512, 160, 7, 7), 160, 1, False, {}),
        ((16, 64, 65, 130), 21, 1, False, {}),
        ((2, 63, 14, 20), 63, 3, True, half),
        ((2, 256, 90, 120), 256, 1, True, half),
        ((2, 64, 14, 14), 64, 1, True, single),
        ((2, 64, 70, 70), 64, 2, False, single),
        ((2, 512, 33, 33), 512, 1, False, single),
    ]
    for shape, values, heads, has_bias, options in cases:
        x, y = grid(*shape, **options), grid(shape[0], values, *shape[2:], **options)
        tokens = pool(x, dtype=x.dtype)
        value_tokens = torch.empty(shape[0], tokens.shape[1], values, dtype=x.dtype)
        bias = torch.empty(heads, tokens.shape[1]) if has_bias else None
        residual, channels_last = (None if has_bias else y), options.get("channels_last", True)
        outer(value_tokens, residual, shape[2:], channels_last, x.dtype, False, has_bias)
        attend(x, tokens, value_tokens, bias, y if has_bias else None, heads)
        attend_backward(x, y, tokens, value_tokens, bias, heads, torch.float32, x.shape == y.shape)
        mean, squares = moments.moments_forward(x, tokens, heads)
        moments.moments_backward(x, tokens, mean, mean if has_bias else None, squares, x, tokens, heads)
        mean_once(value_tokens, shape[2:])
        weight, batches = torch.empty(heads), torch.zeros((), dtype=torch.int64)
        for found in (None, (mean, squares, 100.0)):
            running = weight, weight, batches
            coefficient_norm.normalise_forward(tokens, weight, found, running, 1e-5, 0.1, heads, None)
        coefficient_norm.normalise_backward(tokens, tokens, tokens, weight, weight, 100.0, heads, None)
    for batch, positions, keys, channels in ((8, 4225, 130, 2048), (2, 99, 7, 300)):
        tokens = torch.empty(batch, keys, channels, dtype=torch.bfloat16, requires_grad=True)
        rows = modules["wide"].centred(tokens, tokens.dtype)
        matrix = torch.empty(batch, positions, rows.shape[1], dtype=torch.bfloat16, requires_grad=True)
        found, handed_on = modules["wide"].moments(matrix, keys)
        weight, batches = torch.empty(1, requires_grad=True), torch.zeros((), dtype=torch.int64)
        norm = {"running": (weight.detach(), weight.detach(), batches), "eps": 1e-5, "momentum": 0.1}
        for moments_or_none in (None, found):
            softmax = coefficient_norm.normalise(handed_on, weight, moments_or_none, softmax_of=keys, **norm)
        outputs = [rows, found.mean, found.squares, softmax]
        torch.autograd.grad(outputs, [tokens, matrix], [torch.empty_like(x) for x in outputs])
    # A strip of rows for each of several programs, and tiles that cut rows.
    pool(grid(1, 64, 512, 512))
    for channels, concat in ((32, 16), (160, None)):
        x, clamp = grid(512, channels, 14, 14), (0.0, 6.0, concat is None)
        others = None if concat is None else grid(512, concat, 14, 14)
        weight, batches = torch.empty(channels), torch.zeros((), dtype=torch.int64)
        batch_norm.batch_norm_act(x, others, weight, weight, weight, weight, 1e-5, clamp)
        statistics = weight, weight, batches, 0.1, 1e-5
        y = batch_norm.batch_norm_act_in_training(x.requires_grad_(), others, weight, weight, statistics, clamp)
        y.backward(torch.empty_like(y))
    for channels, stride, weights in ((32, 1, torch.float32), (144, 2, torch.float32), (20, 2, torch.bfloat16)):
        x, weight = grid(128, channels, 40, 40), torch.empty((channels, 1, 3, 3), dtype=weights)
        modules["depthwise"].depthwise_backward(x, weight, x[:, :, ::stride, ::stride], stride)


def source_of(kernel, args):
    """What Triton compiles for these arguments: aligned pointers and multiples of 16 as such, ones as constants."""
    from triton.compiler import ASTSource

    signature, constants, hints = {}, {}, {}
    parameters = inspect.signature(kernel.fn).parameters.values()
    for place, (parameter, value) in enumerate(zip(parameters, args, strict=True)):
        if "constexpr" in str(parameter.annotation) or (type(value) is int and value == 1):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = POINTERS[value.dtype]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32" if value < 2**31 else "i64"
        if isinstance(value, torch.Tensor) or (type(value) is int and value % 16 == 0):
            hints[(place,)] = [["tt.divisibility", 16]]
    return ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=hints)


def main() -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime import JITFunction

    import kronattn.ops.triton as package
    from kronattn.ops.triton import blocks

    parts = [part.name for part in pkgutil.iter_modules(package.__path__)]
    modules = {part: importlib.import_module(f"{package.__name__}.{part}") for part in parts}
    noted = [(modules["blocks"].probe_kernel, (torch.zeros(1),), {})]

    def note(kernel, grid, tensors, numbers, *constants, **options):
        noted.append((kernel, (*tensors, *numbers, *constants), options))

    original = blocks.launch
    for module in modules.values():
        if getattr(module, "launch", None) is original:
            module.launch = note
    call_launchers(modules)

    names = {
        id(kernel): f"{module}.{name}"
        for module, members in modules.items()
        for name, kernel in vars(members).items()
        if isinstance(kernel, JITFunction) and name.endswith("_kernel") and kernel.fn.__module__ == members.__name__
    }
    compiled: dict[str, list[tuple[int, bool]]] = {name: [] for name in names.values()}
    seen = set()
    for kernel, args, options in noted:
        source = source_of(kernel, args)
        key = id(kernel), str(source.signature), str(source.constants), str(source.attrs), str(options)
        if key not in seen:
            seen.add(key)
            binary = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
            in_half = not {"*bf16", "*fp16"}.isdisjoint(source.signature.values())
            compiled[names[id(kernel)]].append((binary.metadata.shared, in_half))
    print(json.dumps({"triton": triton.__version__, "kernels": compiled}))


@pytest.mark.slow
def test_every_kernel_compiles():
    pytest.importorskip("triton", reason="this build of PyTorch has no Triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kernels = json.loads(done.stdout.splitlines()[-1])["kernels"]
    assert len(kernels) > 10
    assert [name for name, compiled in kernels.items() if not compiled] == [], "no launcher launches these"
    for name, compiled in kernels.items():
        for shared, in_half in compiled:
            assert shared <= (SHARED_IN_HALF if in_half else SHARED), name


if __name__ == "__main__":
    main()
