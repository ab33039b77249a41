"""Peak memory of calls whose allocations are known to the byte."""

from __future__ import annotations

import pytest
import torch

from kronattn.measure import available_memory, peak_memory

MB = 2**20


def test_temporary_and_output():
    def call():
        temporary = torch.zeros(4 * MB, dtype=torch.uint8)
        output = torch.empty(MB, dtype=torch.uint8)
        del temporary
        return output

    assert peak_memory(call) == 5 * MB


def test_freed_before_the_next_allocation():
    def call():
        temporary = torch.zeros(4 * MB, dtype=torch.uint8)
        del temporary
        return torch.empty(MB, dtype=torch.uint8)

    assert peak_memory(call) == 4 * MB


def test_output_alone_and_nothing():
    x = torch.zeros(MB, dtype=torch.uint8)
    assert peak_memory(x.neg) == MB
    assert peak_memory(x.neg_) == 0


def test_what_lived_before_does_not_count():
    kept = [torch.zeros(8 * MB, dtype=torch.uint8)]
    assert peak_memory(lambda: kept[0][:MB].clone()) == MB


def test_runs_once_more_to_warm_up():
    runs = []
    peak_memory(lambda: runs.append(1))
    peak_memory(lambda: runs.append(1), warm_up=False)
    assert len(runs) == 3


def test_is_silent(capfd):
    peak_memory(lambda: torch.ones(3))
    assert capfd.readouterr() == ("", "")


def test_other_devices_are_refused():
    with pytest.raises(ValueError, match="meta"):
        peak_memory(lambda: None, device="meta")


def test_available_memory_is_a_number_of_bytes():
    available = available_memory()
    assert available is None or 10**7 < available < 10**14


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_cuda():
    def call():
        temporary = torch.zeros(4 * MB, dtype=torch.uint8, device="cuda")
        output = torch.empty(MB, dtype=torch.uint8, device="cuda")
        del temporary
        return output

    assert peak_memory(call, device="cuda") == 5 * MB
