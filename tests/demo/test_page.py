"""The page in a real browser: upload, prediction, pointer, click, layer, operators, cost; a screenshot of each state.

Screenshots are kept in out/screenshots/. Skipped, with a warning, where no browser can be had.
"""

from __future__ import annotations

import http.client
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from kronattn.cli import main
from tests.browser import browser
from tests.trained import CLASSES, photo, weights_file

pytest.importorskip("gradio", reason="gradio is not installed")

__all__ = ["browser"]

ROOT = Path(__file__).resolve().parents[2]
SCREENSHOTS = ROOT / "out" / "screenshots"
PATIENCE = 90_000  # milliseconds: the machine may have other things to do


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    return weights_file(tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="module")
def address(weights, tmp_path_factory) -> Iterator[str]:
    """The page as a user starts it, in a process of its own."""
    command = [sys.executable, "-u", "-m", "kronattn.cli", "demo", "--weights", str(weights), "--port", "0"]
    errors = tmp_path_factory.mktemp("log") / "stderr"
    with errors.open("w") as log:
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env={**os.environ})
        try:
            yield _announced(server, errors)
        finally:
            server.send_signal(signal.SIGINT)
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                server.kill()
    assert "Traceback" not in errors.read_text()


def _announced(server: subprocess.Popen[str], errors: Path) -> str:
    waiting = selectors.DefaultSelector()
    waiting.register(server.stdout, selectors.EVENT_READ)
    until = time.monotonic() + 120
    while time.monotonic() < until and server.poll() is None:
        if waiting.select(1):
            found = re.search(r"http://\S+", server.stdout.readline())
            if found:
                return found[0]
    raise AssertionError(f"the page did not come up: {errors.read_text()}")


@pytest.fixture(scope="module")
def page(browser, address):
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.set_default_timeout(PATIENCE)
    page.errors, page.hosts = [], set()
    page.on("console", lambda message: page.errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: page.errors.append(str(error)))
    page.on("request", lambda request: page.hosts.add(urlsplit(request.url).hostname))
    page.goto(address)
    page.wait_for_selector("#upload")
    yield page
    page.close()


def caption(page) -> str:
    return page.inner_text("#caption")


def wait_for_caption(page, *parts: str) -> None:
    for part in parts:
        page.wait_for_function(
            "part => document.querySelector('#caption')?.innerText.includes(part)", arg=part, timeout=PATIENCE
        )


def picture(page) -> bytes:
    """The view as it stands, once it has been drawn."""
    page.wait_for_function("() => { const i = document.querySelector('#view img'); return i && i.complete; }")
    return page.evaluate("document.querySelector('#view img').src").encode()


def screenshot(page, name: str) -> None:
    page.screenshot(path=SCREENSHOTS / f"{name}.png")
    assert (SCREENSHOTS / f"{name}.png").stat().st_size > 10_000


def size_of(page) -> tuple[int, int]:
    """Of the whole page, with what one would have to scroll to."""
    return tuple(page.evaluate("[document.documentElement.scrollWidth, document.documentElement.scrollHeight]"))


def place_on(page, view: str, x: float, y: float) -> tuple[float, float]:
    box = page.locator(f"{view} img").bounding_box()
    return box["x"] + box["width"] * x, box["y"] + box["height"] * y


def point_at(page, view: str, x: float, y: float, caption: str) -> None:
    """Move the pointer to a place on a view, on the way over others that it does not stay at."""
    page.mouse.move(*place_on(page, view, x, y), steps=5)
    wait_for_caption(page, caption)


def test_a_visit(page, address, tmp_path):
    """One visit, in the order of a visitor: each step needs the one before."""
    screenshot(page, "1-start")

    page.set_input_files("#upload input[type=file]", str(photo(tmp_path / "photo.png", 240, 160)))
    wait_for_caption(page, "KAO_KV in stages.3.0.attn (the network's own operator)", "row 4, column 4 of 8×8")
    assert any(name in page.inner_text("#classes") for name in CLASSES)
    assert "%" in page.inner_text("#classes")
    assert "regular in stages.3.0.attn" in page.inner_text("#other-caption")
    first = picture(page)
    assert size_of(page) == (1280, 800)  # a laptop's window: nothing to scroll for
    screenshot(page, "2-prediction")

    point_at(page, "#view", 0.3, 0.3, "row 1, column 1 of 8×8")
    followed = picture(page)
    assert followed != first
    point_at(page, "#other-view", 0.9, 0.3, "row 1, column 7 of 8×8")  # one place for both views

    # Clicks that come faster than the page draws, among movements: where the last of them was is what counts.
    for x in (0.1, 0.5, 0.95):
        page.mouse.click(*place_on(page, "#view", x, 0.95))
    wait_for_caption(page, "row 7, column 7 of 8×8")
    clicked = picture(page)
    assert clicked not in (first, followed)
    screenshot(page, "3-click")

    page.locator("#layer input[type=number]").fill("9")
    page.locator("#layer input[type=number]").press("Enter")
    wait_for_caption(page, "stages.9.0.attn", "row 1, column 1 of 2×2")
    assert picture(page) != clicked
    screenshot(page, "4-layer")

    for label, name in (("KAO_QKV", "5-qkv"), ("regular", "6-regular")):
        page.locator("#operator label", has_text=label).click()
        wait_for_caption(page, f"{label} in stages.9.0.attn (not trained here")
        screenshot(page, name)

    page.get_by_role("tab", name="Cost").click()
    page.click("#measure button, button#measure")
    page.wait_for_selector("#cost table")
    table = page.inner_text("#cost")
    assert all(label in table for label in ("Attn", "Attn+Pool", "Fused", "KAO_KV", "KAO_QKV"))
    assert "53,760" in table  # KAO_QKV's multiply-adds at 28×28, as the paper counts them
    screenshot(page, "7-cost")

    page.get_by_role("tab", name="Attention").click()
    page.locator("#examples img, #examples button").first.click()
    wait_for_caption(page, "row 1, column 1 of 2×2")  # a new image is looked at from its centre
    screenshot(page, "8-example")
    assert page.errors == []

    (tmp_path / "text.png").write_text("hello")
    page.goto(address)
    wait_for_caption(page, "Choose an example")
    page.set_input_files("#upload input[type=file]", str(tmp_path / "text.png"))
    wait_for_caption(page, "the file is not an image that Pillow can read")
    page.wait_for_timeout(500)
    assert page.inner_text("body").count("not an image that Pillow can read") == 1
    screenshot(page, "9-no-image")
    assert page.hosts <= {"127.0.0.1", None, ""}


def test_the_pointer_rests_while_a_picture_is_on_its_way(browser, address, tmp_path):
    """A place that was pointed at before the last picture had come is shown as well, once it has."""
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.set_default_timeout(PATIENCE)
    page.goto(address)
    page.set_input_files("#upload input[type=file]", str(photo(tmp_path / "photo.png", 240, 160)))
    wait_for_caption(page, "row 4, column 4 of 8×8")
    picture(page)

    page.route("**/file=**", lambda route: None)
    page.mouse.move(*place_on(page, "#view", 0.7, 0.7))
    wait_for_caption(page, "row 5, column 5 of 8×8")
    page.wait_for_function("() => !document.querySelector('#view img').complete")
    page.mouse.move(*place_on(page, "#view", 0.3, 0.3))
    page.mouse.move(5, 5)  # on no view: what it was over last is what counts
    page.wait_for_timeout(500)
    assert "row 5, column 5 of 8×8" in caption(page)  # it has no pixels yet that a place could be told in
    page.unroute("**/file=**")  # which lets those that wait go on
    wait_for_caption(page, "row 1, column 1 of 8×8")
    page.close()


def test_on_a_telephone(browser, address):
    page = browser.new_page(viewport={"width": 390, "height": 844})
    page.set_default_timeout(PATIENCE)
    page.goto(address)
    page.wait_for_selector("#upload")
    page.locator("#examples img, #examples button").first.click()
    wait_for_caption(page, "row 4, column 4 of 8×8")
    picture(page)
    assert size_of(page)[0] == 390
    page.screenshot(path=SCREENSHOTS / "telephone.png", full_page=True)
    page.close()


def get(address: str, path: str) -> int:
    where = urlsplit(address)
    connection = http.client.HTTPConnection(where.hostname, where.port, timeout=30)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    finally:
        connection.close()


def test_what_is_served_and_to_whom(address, weights):
    assert urlsplit(address).hostname == "127.0.0.1"
    assert get(address, "/") == 200
    for name in ("/etc/passwd", str(ROOT / "pyproject.toml"), "../../../../etc/passwd", str(weights)):
        assert get(address, f"/gradio_api/file={name}") in (403, 404), name
    assert upload(address, 21 * 2**20) in (413, None)
    assert upload(address, 2**10) == 200


def upload(address: str, size: int) -> int | None:
    """The answer to an upload of that many bytes; None where the server hung up in the middle of it."""
    where = urlsplit(address)
    connection = http.client.HTTPConnection(where.hostname, where.port, timeout=30)
    head = b'--x\r\nContent-Disposition: form-data; name="files"; filename="a.png"\r\nContent-Type: image/png\r\n\r\n'
    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    try:
        connection.request("POST", "/gradio_api/upload", head + bytes(size) + b"\r\n--x--\r\n", headers)
        return connection.getresponse().status
    except (BrokenPipeError, ConnectionResetError):
        return None
    finally:
        connection.close()


def test_uploads_go_with_the_page(weights, tmp_path):
    """Also where a service manager ends it: that is SIGTERM."""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-u", "-m", "kronattn.cli", "demo", "--weights", str(weights), "--port", "0"]
    errors = tmp_path / "stderr"
    with errors.open("w") as log:
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
        assert upload(_announced(server, errors), 2**10) == 200
    assert list(tmp_path.glob("kronattn-demo-*/uploads/*"))
    server.send_signal(signal.SIGTERM)
    assert server.wait(120) == 128 + signal.SIGTERM
    assert not list(tmp_path.glob("kronattn-demo-*"))


def test_a_port_in_use_is_one_line(weights, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["demo", "--weights", str(weights), "--port", str(port)]) == 2
    captured = capsys.readouterr()
    assert f"port {port} on 127.0.0.1 is in use: choose another with --port" in captured.err
    assert captured.err.count("\n") == 1
