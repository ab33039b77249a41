"""What the network said about the image, in one line to stand above its attention."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

__all__ = ["describe_prediction"]


def describe_prediction(output: Tensor, classes: Sequence[str], place: tuple[float, float], *, most: int = 3) -> str:
    """A sentence for the output of one image.

    Args:
        output: (num_classes,) logits of a classifier, or (num_classes, h, w) scores of a segmenter.
        classes: their names.
        place: x and y as fractions; a segmenter's prediction is that of this place.
        most: how many classes to name.

    Example:
        >>> describe_prediction(torch.tensor([0.0, 3.0, 1.0]), ["cat", "dog", "fish"], (0.5, 0.5), most=2)
        'Predicted: dog, 84.4% confident; then fish 11.4%.'
    """
    where = "Predicted"
    if output.dim() == 3:
        height, width = output.shape[1:]
        output = output[:, min(int(place[1] * height), height - 1), min(int(place[0] * width), width - 1)]
        where = "Predicted at the marked position"
    shares, numbers = output.float().softmax(dim=0).topk(min(most, len(output)))
    named = [classes[n] if n < len(classes) else f"class {n}" for n in numbers.tolist()]
    first, *others = zip(named, shares.tolist(), strict=True)
    rest = "; then " + ", ".join(f"{name} {share:.1%}" for name, share in others) if others else ""
    return f"{where}: {first[0]}, {first[1]:.1%} confident{rest}."
