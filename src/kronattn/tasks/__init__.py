"""What a network can learn here, each task in a file of its own. A new one is a file, and one line in ``TASKS``."""

from kronattn.names import near_names
from kronattn.tasks.classification import Classification
from kronattn.tasks.segmentation import Segmentation
from kronattn.tasks.spectrograms import Spectrograms
from kronattn.tasks.task import Finding, Interpretation, Task
from kronattn.tasks.volumes import Volumes

__all__ = ["TASKS", "Finding", "Interpretation", "Task", "find_task"]

TASKS: dict[str, Task] = {
    "classification": Classification(),
    "segmentation": Segmentation(),
    "spectrograms": Spectrograms(),
    "volumes": Volumes(),
}


def find_task(name: str) -> Task:
    """A task by its name.

    Example:
        >>> find_task("segmentation").label
        'mean IoU'
        >>> find_task("detection")
        Traceback (most recent call last):
        ...
        ValueError: unknown task 'detection': known are classification, segmentation, spectrograms, volumes
    """
    if name not in TASKS:
        raise ValueError(f"unknown task {name!r}: {near_names(name, TASKS)}")
    return TASKS[name]
