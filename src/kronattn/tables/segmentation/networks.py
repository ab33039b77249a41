"""Table 6: whole networks, counted, with their accuracy beside what the paper prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from kronattn.measure import count_madd
from kronattn.models.registry import create_model
from kronattn.present import Cell, Table, tabulate
from kronattn.tables.segmentation.candidates import HEADS
from kronattn.tables.segmentation.printed import PRINTED, Accuracy

__all__ = ["Counted", "count_networks", "network_table", "to_json"]


@dataclass(frozen=True)
class Counted:
    """A whole network, counted: parameters, those of its head, features' channels, and MAdd at each image size."""

    network: str
    params: int
    head_params: int
    channels: int
    stride: int
    madd: dict[int, int]


def count_networks(sizes: Sequence[int], *, backbone: str = "resnet101") -> list[Counted]:
    """Count the parameters and multiply-adds of the four networks, for one image of each size; nothing is computed.

    Example:
        >>> [(found.network, found.head_params) for found in count_networks([], backbone="kanet_kv")][2]
        ('deeplabv2_kao_kv', 85222)
    """
    counted = []
    for network in dict.fromkeys(head.network for head in HEADS.values()):
        with torch.device("meta"):
            model: Any = create_model(network, backbone=backbone).eval()
            madd = {size: count_madd(model, torch.empty(1, 3, size, size)) for size in sizes}
        counted.append(
            Counted(
                network=network,
                params=sum(parameter.numel() for parameter in model.parameters()),
                head_params=sum(parameter.numel() for parameter in model.head.parameters()),
                channels=model.backbone.num_features,
                stride=model.output_stride,
                madd=madd,
            )
        )
    return counted


def network_table(counted: Sequence[Counted], ours: Mapping[str, Accuracy], *, backbone: str) -> Table:
    """The networks with their accuracy beside what the paper prints."""
    # The same network with two ways to compute its attention is one row here, under the first one's name.
    labels = {head.network: head.label for head in reversed(HEADS.values())}

    def stored(found: Counted, figure: str, times: float, form: str) -> Cell:
        """What a training run found, which is kept in results/, beside the printed value."""
        printed, own = PRINTED[found.network], ours.get(found.network)
        text = "–" if own is None else format(times * getattr(own, figure), form)
        return Cell(text, format(times * getattr(printed, figure), form), tone="" if own is None else "stored")

    def gigas(size: int) -> Any:
        return lambda found: f"{found.madd[size] / 1e9:.2f}"

    runs = max((accuracy.runs for accuracy in ours.values()), default=0)
    from_runs = f"the mean of {runs} runs" if runs > 1 else "one run" if runs else "a dash where we have none"
    note = (
        f"Backbone: {backbone} at output stride {counted[0].stride}. GMAdd: 10⁹ multiply-adds for one image, in "
        f"evaluation. Grey: as printed, on PASCAL VOC 2012, pretrained on ImageNet and MS-COCO. Blue: ours, on CamVid "
        f"from random weights, with the backbone of recipes/camvid ({from_runs}). The two do not compare with each "
        "other, the rows of each do."
    )
    return tabulate(
        "Table 6: DeepLabV2 with four heads",
        {
            "Head": lambda found: labels[found.network],
            "Accuracy": lambda found: stored(found, "pixel_accuracy", 1, ".3f"),
            "Mean IoU": lambda found: stored(found, "mean_iou", 100, ".1f"),
            "Params": lambda found: f"{found.params:,}",
            "in head": lambda found: f"{found.head_params:,}",
            **{f"GMAdd {size}²": gigas(size) for size in counted[0].madd},
        },
        counted,
        notes=[note],
    )


def to_json(counted: Sequence[Counted], ours: Mapping[str, Accuracy]) -> list[dict[str, Any]]:
    """A row for each network."""
    return [
        {
            "network": found.network,
            "params": found.params,
            "head_params": found.head_params,
            "madd": {str(size): madd for size, madd in found.madd.items()},
            "paper": {name: getattr(PRINTED[found.network], name) for name in ("pixel_accuracy", "mean_iou")},
            "camvid": asdict(ours[found.network]) if found.network in ours else None,
        }
        for found in counted
    ]
