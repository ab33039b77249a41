"""What every network with our layer must do inside another framework: a step, save, load, export."""

import torch

from kronattn.nn import KroneckerAttention


def attention_layers(model):
    return [module for module in model.modules() if isinstance(module, KroneckerAttention)]


def step(model, x, target, loss=torch.nn.functional.cross_entropy):
    """One step of SGD; every weight of our layers that ran gets a gradient, and they move."""
    model.train()
    ran = []
    handles = [
        layer.register_forward_hook(lambda layer, inputs, output: ran.append(layer))
        for layer in attention_layers(model)
    ]
    model(x)
    for handle in handles:
        handle.remove()
    layers = list(dict.fromkeys(ran))
    assert layers
    before = [parameter.detach().clone() for layer in layers for parameter in layer.parameters()]
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    value = loss(model(x), target)
    value.backward()
    optimiser.step()
    after = [parameter for layer in layers for parameter in layer.parameters()]
    assert torch.isfinite(value)
    assert all(parameter.grad is not None for parameter in after)
    assert any(not torch.equal(old, new) for old, new in zip(before, after, strict=True))


def saves_and_loads(model, fresh, x, folder):
    """A new network of the same kind gives the same output from the saved weights."""
    torch.save(model.state_dict(), folder / "weights.pt")
    fresh.load_state_dict(torch.load(folder / "weights.pt", weights_only=True))
    with torch.no_grad():
        torch.testing.assert_close(fresh.eval()(x), model.eval()(x))


def exports(model, x):
    """PyTorch's exported program gives what the network gives."""
    model.eval()
    with torch.no_grad():
        program = torch.export.export(model, (x,))
        torch.testing.assert_close(program.module()(x), model(x), rtol=1e-4, atol=1e-4)
