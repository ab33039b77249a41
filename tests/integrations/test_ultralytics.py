"""Our layer in a model of ultralytics, from its YAML to an exported file."""

import shutil
import subprocess
import sys

import pytest
import torch

from tests.integrations.examples import EXAMPLES, example
from tests.integrations.steps import attention_layers, step


def test_nobody_imports_it_unasked():
    code = (
        "import sys, kronattn, kronattn.integrations, kronattn.integrations.ultralytics\n"
        "print('ultralytics' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr


def test_without_it(monkeypatch):
    from kronattn.integrations.ultralytics import register

    monkeypatch.setitem(sys.modules, "ultralytics", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs ultralytics: pip install 'kronattn\[ultralytics\]'"):
        register()


class TestInUltralytics:
    @pytest.fixture(autouse=True)
    def _ultralytics(self, tmp_path, monkeypatch):
        pytest.importorskip("ultralytics", reason="ultralytics is not installed: make test-integrations")
        monkeypatch.chdir(tmp_path)
        shutil.copy(EXAMPLES / "yolo_classifier.yaml", tmp_path)

    def test_trains_saves_loads_and_exports(self, tmp_path):
        torch.manual_seed(0)
        model = example("yolo").classifier("yolo_classifier.yaml")
        layers = attention_layers(model.model)
        assert [(layer.channels, layer.mode) for layer in layers] == [(32, "qkv"), (64, "kv")]
        x = torch.randn(4, 3, 64, 64)
        step(model.model, x, torch.tensor([0, 1, 2, 0]))

        model.save(tmp_path / "model.pt")
        again = example("yolo").classifier(str(tmp_path / "model.pt"))
        states = model.model.state_dict(), again.model.state_dict()
        assert states[0].keys() == states[1].keys()
        for name, tensor in states[0].items():
            # Checkpoints are kept in half precision.
            torch.testing.assert_close(states[1][name].float(), tensor.float(), rtol=1e-2, atol=1e-3)

        pytest.importorskip("onnxruntime")
        from kronattn.export.runtime import run_onnx

        path = again.export(format="onnx", imgsz=64, simplify=False, verbose=False)
        again.model.float().eval()
        with torch.no_grad():
            expected = again.model(x[:1])
        expected = expected[0] if isinstance(expected, tuple) else expected
        torch.testing.assert_close(run_onnx(str(path))(x[:1]), expected, rtol=1e-3, atol=1e-4)
