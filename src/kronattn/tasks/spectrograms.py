"""Spectrograms: a sound to its class by its picture, (N, 1, H, W) to (N, classes), in folds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kronattn.data.spectrogram_augment import SpectrogramSettings
from kronattn.tasks.classification import Classification

if TYPE_CHECKING:
    from kronattn.models.files import Description

__all__ = ["Spectrograms"]


class Spectrograms(Classification):
    """Classification of grey pictures that are longer than high, whose right and left are later and earlier.

    Example:
        >>> from kronattn.models.files import Description
        >>> Spectrograms().example(Description("kanet_kv", shape=[1, 64, 216])).shape
        torch.Size([1, 1, 64, 216])
    """

    settings: Any = SpectrogramSettings
    data_module = "kronattn.training.spectrogram_data:SpectrogramPictures"
    # A picture is taken as it is: to scale it would be to shift its pitch.
    cut = "own"

    def describe(self, data: Any) -> dict[str, Any]:
        size = list(data.images.size)
        return {"shape": [1, *size], "resize": max(size), "size": max(size), "fold": data.images.fold}

    def evaluated(self, description: Description, data: str) -> Any:
        _, height, width = description.shape
        return SpectrogramSettings(
            size=(height, width),
            fold=description.fold or 1,
            mean=tuple(description.mean),  # type: ignore[arg-type]
            std=tuple(description.std),  # type: ignore[arg-type]
        )

    def prepared(self, description: Description) -> str:
        _, height, width = description.shape
        return f"A grey picture of {height} frequencies × {width} times is taken as it is"
