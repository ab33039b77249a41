"""What a study found, in sentences: every one of them follows from the figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["advice", "findings"]

_NOTHING = "no difference shown"
# The study's names of the layers that the advice is about.
_MEAN, _REGULAR = "global_mean", "attention"
# Those that look at nothing.
_WITHOUT = ("none", "identity")


def findings(part: Mapping[str, Any]) -> list[str]:
    """A sentence for each reference: which layers are better and which worse. The table beside it has the figures.

    Example:
        >>> better, unclear = {"verdict": "better"}, {"verdict": "no difference shown"}
        >>> part = {"references": ["none"], "layers": [{"layer": "kao_kv", "differences": {"none": better}},
        ...                                            {"layer": "kao_qkv", "differences": {"none": unclear}}]}
        >>> findings(part)
        ['Over none: kao_kv is better; no difference was shown for one other.']
    """
    sentences = []
    for reference in part["references"]:
        groups: dict[str, list[str]] = {}
        for entry in part["layers"]:
            found = entry["differences"].get(reference)
            if found is not None:
                groups.setdefault(found["verdict"], []).append(entry["layer"])
        said = [
            f"{_listed(groups[word])} {_is(groups[word])} {word}"
            for word in ("better", "maybe better", "maybe worse", "worse")
            if word in groups
        ]
        if rest := len(groups.get(_NOTHING, [])):
            others = "one other" if rest == 1 else f"the {rest} others"
            said.append(f"no difference was shown for {others if said else 'any'}")
        if said:
            sentences.append(f"Over {reference}: {'; '.join(said)}.")
    return sentences


def advice(part: Mapping[str, Any]) -> str:
    """Where to use what, in one sentence: nothing, a mean, Kronecker attention, or regular attention.

    Nothing is the study's first reference; where that is a context layer itself, the study is about its options, and
    so is the sentence. It speaks of what was shown after Holm's correction alone. A study's own caveat is said instead
    of it.
    """
    if part["runs"] and part["caveat"]:
        return str(part["caveat"])
    if not part["runs"]:
        return "Not measured yet."
    if not part["references"]:
        return "None of the layers that others are compared with is among these: nothing can be said of them."
    layers = {entry["layer"]: entry["differences"] for entry in part["layers"]}
    first = part["references"][0]
    helps = [name for name, found in layers.items() if _shown(found, first, "better")]
    if first not in _WITHOUT:
        better = f"{_listed(helps)} {_is(helps)}" if helps else "Nothing was shown to be"
        return f"{better} better than {first} here."
    if not helps:
        return "No context layer was shown to help here: leave it out, or measure on your own data."
    over_mean = [name for name in helps if name != _MEAN and _shown(layers[name], _MEAN, "better")]
    kao = [name for name in over_mean if name.startswith("kao")]
    if kao:
        return f"{_listed(kao)} {_is(kao)} worth it: better than nothing and better than a mean."
    if over_mean and any(name.startswith("kao") for name in helps):
        was = "was" if len(over_mean) == 1 else "were"
        return f"{_listed(helps)} help. Only {_listed(over_mean)} {was} shown to be better than a mean."
    if over_mean == [_REGULAR]:
        return "Regular attention is worth its price here; Kronecker attention was not shown to be better than a mean."
    if over_mean:
        return f"{_listed(over_mean)} {_is(over_mean)} better than a mean; Kronecker attention was not shown to be."
    if _MEAN in helps:
        return "A mean is enough here: it helps, and nothing was shown to be better than it."
    return f"{_listed(helps)} {'helps' if len(helps) == 1 else 'help'}, but none was shown to be better than a mean."


def _shown(found: Mapping[str, Any], reference: str, word: str) -> bool:
    return reference in found and found[reference]["verdict"] == word


def _is(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
