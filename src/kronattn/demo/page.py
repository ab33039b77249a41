"""The page itself, in Gradio: what stands where, and what happens when the pointer moves."""

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

__all__ = ["CSS", "FOLLOW_POINTER", "build_page", "theme"]

_CENTRE = (0.5, 0.5)
_START = "Choose an example or drop an image in; then move the pointer over the picture."
_CHOICES = [(label, mode) for mode, label in LABELS.items()]

# Two views, their controls and the picture fit a laptop's window; on a telephone they stand below each other.
CSS = """
.gradio-container { max-width: 1280px !important; }
#title { margin-bottom: -8px; }
#view img, #other-view img { cursor: crosshair; width: 100%; max-height: 47vh; object-fit: contain; }
#upload img { max-height: 20vh; object-fit: contain; }
#pointer { display: none; }
#caption, #other-caption { min-height: 4.2em; font-size: 0.9em; }
#classes h2 { font-size: 1.3em; padding: 4px; }
#cost .table { overflow-x: auto; }
#cost table { width: 100%; border-collapse: collapse; font-variant-numeric: tabular-nums; }
#cost th, #cost td { padding: 6px 10px; text-align: left; border-bottom: 1px solid var(--border-color-primary); }
#cost .number { text-align: right; }
#cost caption { text-align: left; font-weight: 600; padding-bottom: 8px; }
"""

# Tells the page where the pointer is on a view, in the picture's own pixels: at most eight times a second while it
# moves, where it came to rest or left, and a click at once. The number at the end makes each of them a change, so that
# a place is told again after the picture has changed under it. The box around the picture is what is listened to: the
# page puts a new picture in while a button is held down, and a click belongs to what it began and ended on. A place is
# told once the picture has loaded: before that it has no pixels.
FOLLOW_POINTER = """<script>
(() => {
  let last = 0, count = 0, waiting;
  const tell = (view, event) => {
    const image = view.querySelector("img");
    const field = document.querySelector("#pointer textarea, #pointer input");
    if (!image || !field) return;
    if (!image.complete) { waiting = setTimeout(tell, 50, view, event); return; }
    if (!image.naturalWidth) return;
    last = Date.now();
    const box = image.getBoundingClientRect();
    const scale = Math.min(box.width / image.naturalWidth, box.height / image.naturalHeight);
    const x = (event.clientX - box.left - (box.width - image.naturalWidth * scale) / 2) / scale;
    const y = (event.clientY - box.top - (box.height - image.naturalHeight * scale) / 2) / scale;
    field.value = [x, y, image.naturalWidth, image.naturalHeight, ++count].map(Math.round).join(",");
    field.dispatchEvent(new Event("input", { bubbles: true }));
  };
  const listen = event => {
    const view = event.target.closest && event.target.closest("#view, #other-view");
    if (!view) return;
    clearTimeout(waiting);
    const rest = event.type === "mousemove" ? last + 125 - Date.now() : 0;
    waiting = setTimeout(tell, Math.max(rest, 0), view, event);
  };
  document.addEventListener("mousemove", listen);
  document.addEventListener("click", listen);
})();
</script>"""


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
    other = next(mode for mode in ("regular", "kv") if mode != viewer.own)
    with gr.Blocks(title="Kronecker attention", analytics_enabled=False, delete_cache=(3600, 3600)) as page:
        gr.Markdown(f"# Where attention looks\n{_introduction(viewer)}", elem_id="title")
        seen = gr.State(None, time_to_live=3600)
        place = gr.State(_CENTRE)
        pointer = gr.Textbox(elem_id="pointer", show_label=False, container=False)
        with gr.Tab("Attention"), gr.Row():
            with gr.Column(scale=1, min_width=220):
                upload = gr.Image(sources=["upload"], label="Image", elem_id="upload", buttons=[], height=190)
                gr.Examples([[str(path)] for path in examples], inputs=[upload], label="Examples", elem_id="examples")
                classes = gr.Label(label="Classes", elem_id="classes", num_top_classes=3)
            with gr.Column(scale=4, min_width=320):
                with gr.Row():
                    modes, views, captions = zip(
                        _view_column("", viewer.own), _view_column("other-", other), strict=True
                    )
                layer = gr.Slider(0, max(1, layers - 1), value=0, step=1, label="Layer", elem_id="layer")
                with gr.Accordion("How to read this", open=False):
                    gr.Markdown(HOW_TO_READ)
        with gr.Tab("Cost"):
            gr.Markdown("What each operator costs on one feature map, measured on this computer when you ask.")
            size = gr.Slider(7, 112, value=28, step=7, label="Grid: size × size positions", elem_id="size")
            channels = gr.Slider(8, 64, value=8, step=8, label="Channels")
            measure = gr.Button("Measure", elem_id="measure")
            cost = gr.HTML(elem_id="cost")

        quiet: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden"}
        # One queue for all that draws: an earlier place or layer that came late would stand over the later one.
        drawn: dict[str, Any] = {**quiet, "concurrency_id": "views", "concurrency_limit": 1}
        shown = [views[0], captions[0], views[1], captions[1]]
        controls = [seen, layer, *modes]

        def draw(found: Seen | None, number: float, one: str, two: str, where: tuple[float, float]) -> tuple[Any, ...]:
            if found is None:
                return None, _START, None, ""
            at = min(int(number), layers - 1)
            return *viewer.view(found, at, one, where), *viewer.view(found, at, two, where)

        def take(uploaded: dict[str, Any] | None, number: float, one: str, two: str) -> tuple[Any, ...]:
            if uploaded is None:
                return None, _CENTRE, None, *draw(None, number, one, two, _CENTRE)
            path = str(uploaded["path"])
            try:
                found = viewer.look(path)
            except (BadImage, OSError) as error:
                # The file's name on this side is of no use to whoever uploaded it.
                message = " ".join(str(error).replace(path, "the file").split())
                return None, _CENTRE, None, None, message, None, ""
            return found, _CENTRE, found.shares or None, *draw(found, number, one, two, _CENTRE)

        def follow(found: Seen | None, number: float, one: str, two: str, text: str) -> tuple[Any, ...]:
            numbers = [float(part) for part in text.split(",") if part.lstrip("-").isdigit()]
            if found is None or len(numbers) != 5:
                return tuple(gr.skip() for _ in range(5))
            where = place_in_view((int(numbers[2]), int(numbers[3])), (numbers[0], numbers[1]))
            return where, *draw(found, number, one, two, where)

        # Gradio would open the file itself; unprocessed, our own reader does, with its limits and its messages.
        upload.change(take, [upload, layer, *modes], [seen, place, classes, *shown], preprocess=False, **drawn)
        # Of the places that the pointer passes, those that nobody has waited for are left out.
        pointer.change(follow, [*controls, pointer], [place, *shown], trigger_mode="always_last", **drawn)
        for control in (layer, *modes):
            control.change(draw, [*controls, place], shown, **drawn)
        measure.click(cost_html, [size, channels], cost, concurrency_limit=1, **quiet)
    return page


def _view_column(prefix: str, chosen: str) -> tuple[gr.Radio, gr.Image, gr.Markdown]:
    """One of the two views side by side: its operator, its picture and a line about it."""
    with gr.Column(min_width=300):
        mode = gr.Radio(_CHOICES, value=chosen, show_label=False, container=False, elem_id=f"{prefix}operator")
        view = gr.Image(interactive=False, format="jpeg", elem_id=f"{prefix}view", buttons=[], show_label=False)
        caption = gr.Markdown("" if prefix else _START, elem_id=f"{prefix}caption")
    return mode, view, caption
