"""Serving the page on this computer, and nothing but the page."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kronattn.demo.examples import write_examples
from kronattn.demo.viewer import Viewer
from kronattn.extras import require_library
from kronattn.measure import peak_memory

if TYPE_CHECKING:
    from torch import nn

    from kronattn.models.files import Description

__all__ = ["MAX_UPLOAD", "require_gradio", "serve"]

MAX_UPLOAD = 20 * 2**20


def require_gradio() -> None:
    """Say what to install if Gradio is missing, and keep it from reporting to its makers."""
    # Read when Gradio is imported.
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    require_library("gradio", "the page")


def serve(
    model: nn.Module,
    description: Description,
    *,
    host: str = "127.0.0.1",
    port: int = 7860,
    examples: Sequence[Path] = (),
    announce: Callable[[str], Any] = print,
) -> None:
    """Serve the page until interrupted.

    Args:
        model, description: from :func:`kronattn.models.files.load_model`.
        host: 127.0.0.1 is this computer alone.
        port: 0 takes any that is free.
        examples: image files to start from; pictures of our own otherwise.
        announce: gets the page's address once it is there.
    """
    viewer = Viewer(model, description)
    port = _free_port(host, port)
    require_gradio()
    # PyTorch's profiler, which counts memory, wants to be met in the main thread first.
    peak_memory(lambda: None)
    with _private_folder() as folder:
        # Imported here: where Gradio keeps uploads is read from the environment.
        from kronattn.demo.page import CSS, FOLLOW_POINTER, build_page, theme

        page = build_page(viewer, list(examples) or write_examples(folder))
        page.queue(max_size=16, default_concurrency_limit=2)
        try:
            _, address, _ = page.launch(
                server_name=host,
                server_port=port,
                share=False,
                quiet=True,
                inbrowser=False,
                prevent_thread_lock=True,
                max_file_size=MAX_UPLOAD,
                state_session_capacity=20,
                ssr_mode=False,
                footer_links=[],
                enable_monitoring=False,
                theme=theme(),
                css=CSS,
                head=FOLLOW_POINTER,
            )
            announce(address)
            page.block_thread()
        finally:
            page.close(verbose=False)


def _free_port(host: str, port: int) -> int:
    """The port if nobody has it, or any free one for 0."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except socket.gaierror:
            raise OSError(f"--host {host} is not an address of this computer") from None
        except (OSError, OverflowError) as error:
            reason = "is in use" if getattr(error, "errno", None) == 98 else f"cannot be used ({error})"
            raise OSError(f"port {port} on {host} {reason}: choose another with --port") from None
        return int(probe.getsockname()[1])


@contextmanager
def _private_folder() -> Iterator[Path]:
    """A folder for uploads and pictures that goes when the page does."""
    with _ended_in_order(), tempfile.TemporaryDirectory(prefix="kronattn-demo-") as folder:
        os.environ["GRADIO_TEMP_DIR"] = str(Path(folder) / "uploads")
        yield Path(folder)


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """Have SIGTERM end the page as Ctrl+C does: service managers and containers send it, and uploads would stay."""
    if threading.current_thread() is not threading.main_thread():
        yield  # which alone may decide about signals
        return

    def end(*_: Any) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
