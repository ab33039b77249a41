"""Where attention looks: the three operators beside each other on one image, as a picture or a page."""

from kronattn.explain.figure import draw_layers
from kronattn.explain.operators import MODES, Comparison, compare_operators, look
from kronattn.explain.page import render_explanation
from kronattn.explain.place import choose_layers, grid_position, parse_place, place_in_part

__all__ = [
    "MODES",
    "Comparison",
    "choose_layers",
    "compare_operators",
    "draw_layers",
    "grid_position",
    "look",
    "parse_place",
    "place_in_part",
    "render_explanation",
]
