"""The core needs torch alone; what needs more says so in one line."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Everything that the package may use beside torch and what torch itself brings.
EXTRAS = (
    "typer",
    "rich",
    "matplotlib",
    "timm",
    "torchvision",
    "lightning",
    "torchmetrics",
    "sklearn",
    "fvcore",
    "scipy",
    "gradio",
    "onnx",
    "onnxruntime",
    "onnxscript",
    "PIL",
    "monai",
    "segmentation_models_pytorch",
    "ultralytics",
)

BLOCK = f"""
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {EXTRAS!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name.split(".")[0])
sys.meta_path.insert(0, Block())
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", BLOCK + code], capture_output=True, text=True)


def test_core_with_torch_alone():
    done = run(
        "import torch, kronattn, kronattn.distributions, kronattn.measure, kronattn.models.baselines\n"
        "from kronattn.nn import KroneckerAttention\n"
        "x = torch.randn(1, 4, 5, 6)\n"
        "print(KroneckerAttention(4)(x).shape == kronattn.kronecker_attention(x, mode='qkv').shape)\n"
        "print(kronattn.create_model('kanet_kv', num_classes=3)(torch.randn(2, 3, 32, 32)).shape)\n"
        "segmenter = kronattn.create_model('deeplabv2_kao_kv', backbone='kanet_kv', num_classes=3)\n"
        "print(segmenter(torch.randn(2, 3, 32, 32)).shape)"
    )
    assert done.stdout.splitlines() == ["True", "torch.Size([2, 3])", "torch.Size([2, 3, 32, 32])"], done.stderr


def test_importing_does_not_import_extras():
    done = subprocess.run(
        [sys.executable, "-c", f"import sys, kronattn; print([m for m in {EXTRAS!r} if m in sys.modules])"],
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "import kronattn.cli; sys.exit(kronattn.cli.main(['theorem']))",
            "the command needs typer: pip install 'kronattn[cli]'",
        ),
        ("import kronattn; kronattn.create_model('kanet_kv', features_only=True)", "pip install 'kronattn[timm]'"),
        (
            "from kronattn.models.baselines import BASELINES; BASELINES['vgg16'].build()",
            "pip install 'kronattn[vision]'",
        ),
        (
            "import kronattn; kronattn.create_model('deeplabv2_kao_kv')",
            "the backbone resnet101 needs torchvision: pip install 'kronattn[vision]'",
        ),
        ("from kronattn.integrations.timm import register; register()", "needs timm: pip install 'kronattn[timm]'"),
        ("from kronattn.integrations.smp import register; register()", "pip install 'kronattn[smp]'"),
        ("from kronattn.integrations.ultralytics import register; register()", "pip install 'kronattn[ultralytics]'"),
        ("from kronattn.export.runtime import require_onnx as needed; needed()", "pip install 'kronattn[export]'"),
        (
            "import kronattn.extras as extras; extras.require_library('torchvision', 'predict')",
            "predict needs torchvision: pip install 'kronattn[vision]'",
        ),
    ],
)
def test_what_is_missing_is_named(code, message):
    done = run(code)
    assert done.returncode != 0
    assert message in done.stderr.splitlines()[-1]


def test_who_has_others_train_starts_without_lightning():
    code = "import sys, kronattn.training.comparison, kronattn.study.run, kronattn.study.page\n"
    done = subprocess.run(
        [sys.executable, "-c", code + "print(sys.modules.keys() & {'lightning', 'torchmetrics', 'torchvision'})"],
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "set()", done.stderr
