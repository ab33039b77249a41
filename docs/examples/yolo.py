from ultralytics import YOLO

from kronattn.integrations.ultralytics import register

register()  # once, before a YAML or a checkpoint with our layer is read


def classifier(path: str) -> YOLO:
    """A model from a YAML that names KroneckerBlock."""
    return YOLO(path, task="classify", verbose=False)
