"""What versions of PyTorch that are still supported cannot do."""

import pytest
import torch


def skip_tied_export(pools: bool = True) -> None:
    """Skip a test that exports a network whose pools round up, for sizes even and odd."""
    if pools and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15):
        pytest.skip("this torch.export ties sizes to the parity they have in the example")
