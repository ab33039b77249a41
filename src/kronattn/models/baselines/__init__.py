"""The other networks of the paper's Table 3, beside what the paper prints about them.

`BASELINES` is the table, in the paper's order and without MobileNetV2, which the library has as a network
of its own. Five of the seven come from torchvision and timm, which are extras; ShuffleNet 1.5× and
ChannelNet-v1 are in neither and are written here.

Parameters and multiply-adds (MAdd) in the notes are of convolutions and linear layers, for one image of
224×224 and 1000 classes; batch norm's parameters are left out, as the paper does.

>>> list(BASELINES)
['googlenet', 'vgg16', 'alexnet', 'squeezenet', 'mobilenetv1', 'shufflenet', 'channelnet']
>>> model = BASELINES["shufflenet"].build(num_classes=10)
>>> sum(p.numel() for p in model.classifier.parameters())
14410
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from kronattn.models.baselines.borrowed import from_timm, from_torchvision
from kronattn.models.baselines.channelnet import ChannelNet
from kronattn.models.baselines.shufflenet import ShuffleNet

__all__ = ["BASELINES", "Baseline", "Builder", "ChannelNet", "ShuffleNet"]


# A function or a class that takes the numbers of classes and of an image's channels.
Builder = Callable[..., nn.Module]


@dataclass(frozen=True)
class Baseline:
    """One row of Table 3: a network and the printed values; `note` explains where they differ from it.

    >>> row = BASELINES["mobilenetv1"]
    >>> row.label, row.paper_top1, row.paper_params, row.paper_madd, row.note
    ('MobileNetV1', 0.706, 4200000.0, 569000000.0, None)
    """

    name: str
    label: str
    build: Builder
    paper_top1: float
    paper_params: float
    paper_madd: float
    note: str | None = None


_ROWS = (
    Baseline(
        "googlenet",
        "GoogleNet",
        # Said explicitly, because leaving init_weights out warns that its default will change.
        from_torchvision("googlenet", aux_logits=False, init_weights=True),
        0.698,
        6.8e6,
        1550e6,
        "torchvision's GoogLeNet has 3×3 kernels where the original has 5×5, in nine modules, and batch norm "
        "in place of biases: 6,610,344 parameters and 1,498,376,192 MAdd. With 5×5 kernels and biases it "
        "would be 6,998,552 and 1,582,671,872; the printed values, the same as in ChannelNets, lie "
        "between the two.",
    ),
    Baseline(
        "vgg16",
        "VGG16",
        from_torchvision("vgg16"),
        0.715,
        128e6,
        15300e6,
        "VGG16 has 138,357,544 parameters; the printed 128m, the same as in ChannelNets, looks like a "
        "slip for 138m. Its 13 convolutions take 15,346,630,656 MAdd, which is the printed value cut "
        "off; the three linear layers add 123,633,664, in all 15,470,264,320.",
    ),
    Baseline(
        "alexnet",
        "AlexNet",
        from_torchvision("alexnet"),
        0.572,
        60e6,
        720e6,
        "The printed values fit the two-tower original, whose second, fourth and fifth convolutions are in "
        "two groups and whose first has 96 channels at 55×55: 60,965,224 parameters and 724,406,816 MAdd. "
        "torchvision has the later one-tower version: 61,100,840 and 714,188,480.",
    ),
    Baseline(
        "squeezenet",
        "SqueezeNet",
        from_torchvision("squeezenet1_0"),
        0.575,
        1.3e6,
        833e6,
        "SqueezeNet 1.0 has 1,248,424 parameters; the printed 1.3m is that rounded to 1.25m and then once "
        "more. The printed MAdd is what an input of 227×227 gives: 832,667,936; at 224×224 it is 818,924,576. "
        "SqueezeNet 1.1 (349,151,936) cannot be meant.",
    ),
    Baseline("mobilenetv1", "MobileNetV1", from_timm("mobilenetv1_100"), 0.706, 4.2e6, 569e6),
    Baseline("shufflenet", "ShuffleNet 1.5x", ShuffleNet, 0.715, 3.4e6, 292e6),
    Baseline(
        "channelnet",
        "ChannelNet-v1",
        ChannelNet,
        0.705,
        3.7e6,
        407e6,
        "The layers of the ChannelNets paper give 3,690,440 parameters and 468,488,704 MAdd: 307,323,392 in "
        "the layers that are MobileNetV1's, 159,559,680 in the six group layers of its two GCWM and one GM "
        "(26,593,280 each) and 1,605,632 in the two channel-wise convolutions. The printed 407m is 61,488,704 "
        "less and does not go with the printed 3.7m: it would leave 99,676,608 for those modules, so 508,554 "
        "weights, each used at 14×14 positions, and 3,384,882 parameters in all.",
    ),
)

BASELINES: dict[str, Baseline] = {row.name: row for row in _ROWS}
