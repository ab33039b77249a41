"""The page itself, in Gradio: what stands where, and what happens on a click."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gradio as gr

from kronattn.data.images import BadImage
from kronattn.demo.cost import cost_html
from kronattn.demo.viewer import Seen, Viewer
from kronattn.explain.operators import LABELS
from kronattn.explain.page import HOW_TO_READ
from kronattn.explain.view import place_in_view

__all__ = ["CSS", "build_page", "theme"]

_CENTRE = (0.5, 0.5)
_START = "Choose an example or drop an image in; then click on the picture."
_CHOICES = [(label, mode) for mode, label in LABELS.items()]

CSS = """
#view img { cursor: crosshair; }
#cost table { width: 100%; border-collapse: collapse; font-variant-numeric: tabular-nums; }
#cost th, #cost td { padding: 6px 10px; text-align: left; border-bottom: 1px solid var(--border-color-primary); }
#cost .number { text-align: right; }
#cost caption { text-align: left; font-weight: 600; padding-bottom: 8px; }
"""


def theme() -> Any:
    """The system's own fonts: the usual ones would be asked for from outside."""
    return gr.themes.Base(
        primary_hue=gr.themes.colors.blue, font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]
    )


def _introduction(viewer: Viewer) -> str:
    """Which network this is, and what it can see: an image of anything else gets one of these classes, too."""
    known = viewer.description
    classes = f"{len(known.classes)} classes: {known.some_classes()}"
    return f"{known.model}, {len(viewer.layers)} attention layers. It knows {classes}."


def build_page(viewer: Viewer, examples: Sequence[Path]) -> gr.Blocks:
    """The page for one trained network."""
    layers = len(viewer.layers)
    with gr.Blocks(title="Kronecker attention", analytics_enabled=False, delete_cache=(3600, 3600)) as page:
        gr.Markdown(f"# Where attention looks\n{_introduction(viewer)}")
        seen = gr.State(None, time_to_live=3600)
        place = gr.State(_CENTRE)
        with gr.Tab("Attention"), gr.Row():
            with gr.Column(scale=2):
                upload = gr.Image(sources=["upload"], label="Image", elem_id="upload", buttons=[])
                gr.Examples([[str(path)] for path in examples], inputs=[upload], label="Examples", elem_id="examples")
                classes = gr.Label(label="Classes", elem_id="classes", num_top_classes=5)
            with gr.Column(scale=3):
                view = gr.Image(interactive=False, format="png", elem_id="view", buttons=[], show_label=False)
                caption = gr.Markdown(_START, elem_id="caption")
                mode = gr.Radio(_CHOICES, value=viewer.own, label="Operator", elem_id="operator")
                layer = gr.Slider(0, max(1, layers - 1), value=0, step=1, label="Layer", elem_id="layer")
                gr.Markdown(HOW_TO_READ)
        with gr.Tab("Cost"):
            gr.Markdown("What each operator costs on one feature map, measured on this computer when you ask.")
            size = gr.Slider(7, 112, value=28, step=7, label="Grid: size × size positions", elem_id="size")
            channels = gr.Slider(8, 64, value=8, step=8, label="Channels")
            measure = gr.Button("Measure", elem_id="measure")
            cost = gr.HTML(elem_id="cost")

        quiet: dict[str, Any] = {"api_visibility": "private", "show_progress": "minimal"}
        shown = [view, caption]
        controls = [seen, layer, mode, place]

        def draw(found: Seen | None, number: float, operator: str, where: tuple[float, float]) -> tuple[Any, str]:
            if found is None:
                return None, _START
            return viewer.view(found, min(int(number), layers - 1), operator, where)

        def look(uploaded: dict[str, Any] | None, number: float, operator: str) -> tuple[Any, ...]:
            if uploaded is None:
                return None, _CENTRE, None, *draw(None, number, operator, _CENTRE)
            path = str(uploaded["path"])
            try:
                found = viewer.look(path)
            except (BadImage, OSError) as error:
                # The file's name on this side is of no use to whoever uploaded it.
                message = " ".join(str(error).replace(path, "the file").split())
                gr.Warning(message)
                return None, _CENTRE, None, None, message
            return found, _CENTRE, found.shares or None, *draw(found, number, operator, _CENTRE)

        def click(found: Seen | None, number: float, operator: str, event: gr.SelectData) -> tuple[Any, ...]:
            if found is None:
                return _CENTRE, None, ""
            picture, _ = draw(found, number, operator, _CENTRE)
            where = place_in_view(picture.size, event.index)
            return where, *draw(found, number, operator, where)

        # Gradio would open the file itself; unprocessed, our own reader does, with its limits and its messages.
        upload.change(look, [upload, layer, mode], [seen, place, classes, *shown], preprocess=False, **quiet)
        view.select(click, [seen, layer, mode], [place, *shown], **quiet)
        layer.change(draw, controls, shown, **quiet)
        mode.change(draw, controls, shown, **quiet)
        measure.click(cost_html, [size, channels], cost, concurrency_limit=1, **quiet)
    return page
