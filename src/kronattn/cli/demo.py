"""``kronattn demo``: a page on this computer to try a trained network on."""

from __future__ import annotations

from pathlib import Path

import typer

from kronattn.cli.options import Weights
from kronattn.cli.output import say

__all__ = ["demo"]


def demo(
    weights: Weights = "kanet_kv",
    host: str = typer.Option("127.0.0.1", help="Address to serve on. The default is this computer alone."),
    port: int = typer.Option(7860, min=0, max=65535, help="Port to serve on; 0 for any that is free."),
    examples: Path | None = typer.Option(None, help="Folder of images to offer as examples."),
) -> None:
    """Serve a page: drop an image in, see its classes, click on it, and see where that position attends.

    Example: kronattn demo --port 7861
    """
    from kronattn.demo.serve import require_gradio, serve
    from kronattn.models.files import load_model
    from kronattn.predict.inputs import list_images

    require_gradio()
    given = list_images([examples])[:12] if examples is not None else []
    model, description = load_model(weights)
    serve(
        model,
        description,
        host=host,
        port=port,
        examples=given,
        announce=lambda address: say(f"Page: {address} (stop with Ctrl+C)"),
    )
