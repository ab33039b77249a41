"""The report: everything the library can show in a few minutes, on one self-contained page."""

from kronattn.report.page import render_page
from kronattn.report.registry import SECTIONS
from kronattn.report.section import Content, Drawing, Highlight, Section, Settings

__all__ = ["SECTIONS", "Content", "Drawing", "Highlight", "Section", "Settings", "render_page"]
