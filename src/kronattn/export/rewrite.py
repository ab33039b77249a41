"""The same network in the operators that other runtimes run best and their converters know."""

from __future__ import annotations

from torch import nn

from kronattn.inference import fuse_known

__all__ = ["rewritten"]


def rewritten(model: nn.Module) -> nn.Module:
    """A copy of a network in evaluation mode that computes the same, for other runtimes and their converters.

    The portable form of :func:`kronattn.fuse`: onnxruntime keeps the channels of convolutions in blocks and folds
    activations and sums into the convolution before them, so convolutions stay convolutions and concatenations become
    sums of two. Modules that are not known stay as they are. Every exported file is of this form; a converter that
    wants a module (``torch.jit.trace`` and pnnx, for instance) gets it from here.

    Example:
        >>> import kronattn
        >>> model = kronattn.create_model("kanet_qkv", num_classes=3, width=0.25).eval()
        >>> x = torch.randn(2, 3, 64, 48)
        >>> torch.allclose(rewritten(model)(x), model(x), atol=1e-5)
        True
    """
    return fuse_known(model, portable=True)
