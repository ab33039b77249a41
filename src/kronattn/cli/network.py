"""How sub-commands are told which network, and where it runs."""

from __future__ import annotations

from kronattn.measure import resolve_device

__all__ = ["WEIGHTS_HELP", "accelerator_of", "given_network"]

WEIGHTS_HELP = "The trained network: a file, a run's folder, or a name from `kronattn list weights`."


def given_network(argument: str | None, weights: str | None) -> str:
    """The network, which some commands take as an argument, too.

    >>> given_network(None, "kanet_kv")
    'kanet_kv'
    """
    if argument is not None and weights is not None:
        raise ValueError(f"give the network once: {argument} or --weights {weights}")
    found = weights if argument is None else argument
    if found is None:
        raise ValueError("--weights is missing: a file, a run's folder, or a name from `kronattn list weights`")
    return found


def accelerator_of(device: str) -> str:
    """Lightning's word for a device.

    >>> accelerator_of("cpu"), accelerator_of("auto")
    ('cpu', 'auto')
    """
    if device == "auto":
        return device
    kind = resolve_device(device).type
    return "gpu" if kind == "cuda" else kind
