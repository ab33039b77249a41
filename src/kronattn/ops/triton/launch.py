"""Launching kernels at little cost for each call.

Triton's own launch looks at every argument anew, and choosing blocks and strides takes as long again. So the first
call of a launcher with inputs of some shapes, strides and dtypes is written down: what it allocated, and which
compiled kernels it launched with which arguments. Later calls with such inputs do the same straight away.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from kronattn.ops.triton import rules

__all__ = ["empty", "forget", "launch", "played", "recorded"]

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

# What Triton was when its kernels were made, which does not change.
_INTERPRETED = rules.interpreted()
# Sizes that differ from call to call (a detector's images, say) must not fill the memory.
_MOST_TAPES = 4096


class _Varying(float):
    """A number that may differ from call to call, known by its place among the launcher's inputs."""

    place: int


class _Tape:
    """What a launcher did: allocations, launches, and which tensors it gave back.

    Places count the launcher's inputs first, then its allocations.
    """

    def __init__(self, inputs: Sequence[Any]) -> None:
        self.kept: list[Any] = list(inputs)  # alive until the end of the recording, so that addresses stay unique
        self.places: dict[int, int] = {}
        for place, x in enumerate(inputs):
            if isinstance(x, Tensor):
                self.places.setdefault(x.data_ptr(), place)
        self.allocations: list[tuple[Any, ...]] = []
        self.launches: list[tuple[Callable[..., None], tuple[Any, ...], tuple[Any, ...], list[tuple[int, int]]]] = []
        self.outputs: list[int | None] = []
        self.single = False
        self.valid = True

    def add_allocation(self, x: Tensor) -> None:
        self.places[x.data_ptr()] = len(self.kept)
        self.kept.append(x)
        self.allocations.append((x.shape, x.stride(), x.dtype, x.device))

    def add_launch(self, compiled: Any, grid: tuple[int, ...], args: Sequence[Any]) -> None:
        template: list[Any] = list(args)
        filled: list[tuple[int, int]] = []
        for index, x in enumerate(args):
            if isinstance(x, Tensor):
                place = self.places.get(x.data_ptr())
                if place is None:
                    self.valid = False
                    return
                filled.append((index, place))
                template[index] = None
            elif isinstance(x, _Varying):
                filled.append((index, x.place))
        # What compiled[grid](*args) comes down to, without the hooks that profilers may have set. After the grid
        # comes the stream, which may differ from call to call.
        compiled[grid]
        before = (*grid, compiled.function, compiled.packed_metadata, None, None, None)
        self.launches.append((compiled.run, before, tuple(template), filled))

    def finish(self, outputs: Any) -> _Tape | None:
        """The tape without what it held on to; None if the launcher did something that was not written down."""
        self.single = isinstance(outputs, Tensor)
        for x in (outputs,) if self.single else outputs:
            place = None if x is None else self.places.get(x.data_ptr(), -1)
            if place is not None:
                like = self.kept[place]
                self.valid = self.valid and place >= 0 and x.shape == like.shape and x.stride() == like.stride()
            self.outputs.append(place)
        self.kept, self.places = [], {}
        return self if self.valid else None

    def play(self, inputs: Sequence[Any], device: int) -> Any:
        held = list(inputs)
        for shape, strides, dtype, place in self.allocations:
            held.append(torch.empty_strided(shape, strides, dtype=dtype, device=place))
        stream = torch._C._cuda_getCurrentRawStream(device)
        for run, before, template, filled in self.launches:
            args = list(template)
            for index, place in filled:
                args[index] = held[place]
            run(*before[:3], stream, *before[3:], *args)
        outputs = [None if place is None else held[place] for place in self.outputs]
        return outputs[0] if self.single else tuple(outputs)


class _State(threading.local):
    tape: _Tape | None = None


_state = _State()
_everything: list[dict[Any, _Tape | None]] = []
_played: dict[Any, _Tape] = {}


def recorded(launcher: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Write down what ``launcher`` does for each kind of input, and do it straight away from then on.

    The launcher takes tensors and settings, allocates by :func:`empty`, launches by :func:`launch`, and gives back
    tensors that it has allocated. What goes beyond that is not written down, and runs in full every time.
    """
    tapes: dict[Any, _Tape | None] = {}
    latest: list[_Tape | None] = [None]
    _everything.append(tapes)

    @wraps(launcher)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if _INTERPRETED or _state.tape is not None:
            return launcher(*args, **kwargs)
        inputs = (*args, *kwargs.values()) if kwargs else args
        device = torch.cuda.current_device()
        key: list[Any] = [device, *kwargs] if kwargs else [device]
        elsewhere = None
        addresses: list[int] = []
        for x in inputs:
            if isinstance(x, Tensor):
                address = x.data_ptr()
                # Which inputs are the same tensor matters too, such as a skip connection's.
                twin = addresses.index(address) if address in addresses else -1
                addresses.append(address)
                key += (x.shape, x.stride(), x.dtype, address % 16, twin)
                elsewhere = x.device if x.get_device() != device else elsewhere
            else:
                key.append(None if type(x) is float else x)
        if elsewhere is not None:
            with torch.cuda.device(elsewhere):
                return call(*args, **kwargs)
        known = tuple(key)
        if known in tapes:
            latest[0] = tape = tapes[known]
            return launcher(*args, **kwargs) if tape is None else tape.play(inputs, device)
        if len(tapes) >= _MOST_TAPES:
            tapes.clear()
        marked = [_varying(x, place) if type(x) is float else x for place, x in enumerate(inputs)]
        _state.tape = recording = _Tape(inputs)
        try:
            outputs: Any = launcher(*marked[: len(args)], **dict(zip(kwargs, marked[len(args) :], strict=True)))  # type: ignore[arg-type]
        finally:
            _state.tape = None
        latest[0] = tapes[known] = recording.finish(outputs)
        return outputs

    call.__dict__["latest"] = latest
    return call


def played(launcher: Callable[..., Result], key: tuple[Any, ...], device: int, args: Sequence[Any]) -> Result:
    """``launcher(*args)`` where ``key`` says all there is to say about the arguments but addresses and numbers.

    Writing down what the arguments look like takes longer than many a kernel; a caller who has looked at them already
    can spare the launcher that. No two arguments may be the same tensor, unless the key says so.
    """
    addresses = 0
    for x in args:
        if isinstance(x, Tensor):
            addresses |= x.data_ptr()
    if _INTERPRETED or addresses % 16 or _state.tape is not None or device != torch.cuda.current_device():
        return launcher(*args)
    tape = _played.get(key)
    if tape is not None:
        return tape.play(args, device)
    outputs = launcher(*args)
    tape = launcher.latest[0]  # type: ignore[attr-defined]
    if tape is not None:
        if len(_played) >= _MOST_TAPES:
            _played.clear()
        _played[key] = tape
    return outputs


def forget() -> None:
    """Write everything down anew: for when the rules have changed."""
    _played.clear()
    for tapes in _everything:
        tapes.clear()


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """``kernel[grid](*args, **options)``, written down if a recording is under way."""
    compiled = kernel[grid](*[float(x) if isinstance(x, _Varying) else x for x in args], **options)
    if _state.tape is not None:
        _state.tape.add_launch(compiled, (*grid, 1, 1)[:3], args)


def empty(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, strides: Sequence[int] | None = None
) -> Tensor:
    """An uninitialised tensor, written down if a recording is under way."""
    if strides is None:
        x = torch.empty(shape, dtype=dtype, device=device)
    else:
        x = torch.empty_strided(shape, strides, dtype=dtype, device=device)
    if _state.tape is not None:
        _state.tape.add_allocation(x)
    return x


def _varying(x: float, place: int) -> _Varying:
    varying = _Varying(x)
    varying.place = place
    return varying
