"""The guide as it is built, opened from files in a real browser: search, code that fits, copies without prompts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.browser import browser

__all__ = ["browser"]

pytest.importorskip("mkdocs", reason="mkdocs is not installed")

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory, browser) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def page(browser):
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.requests = []
    page.on("request", lambda request: page.requests.append(request.url))
    yield page
    page.close()


def test_search_works_from_files_and_fetches_nothing(site, page):
    page.goto((site / "index.html").as_uri())
    page.keyboard.press("/")
    page.wait_for_selector("input.md-search__input", state="visible")
    page.keyboard.type("onnxruntime")
    page.wait_for_selector(".md-search-result__item", timeout=30_000)
    assert "onnxruntime" in page.inner_text(".md-search-result__list")
    assert [url for url in page.requests if not url.startswith("file:")] == []


def test_copied_code_has_no_prompts(site, page):
    page.goto((site / "index.html").as_uri())
    copied = page.evaluate(
        "() => [...document.querySelectorAll('pre code')].filter(code => code.querySelector('.gp')).map(code => {"
        # As the button does it.
        " code.setAttribute('data-md-copying', ''); const text = code.innerText;"
        " code.removeAttribute('data-md-copying'); return text; })"
    )
    assert len(copied) >= 4
    for text in copied:
        assert ">>>" not in text
        assert "torch.Size" not in text
        compile(text, "copied", "exec")


@pytest.mark.parametrize("width", [1280, 390])
def test_code_and_pages_fit(site, page, width):
    page.set_viewport_size({"width": width, "height": 800})
    # Drawings in characters keep their lines, and scroll on a telephone.
    code = "pre code" if width > 1000 else ".highlight:not(.drawing) > pre code"
    for path in sorted(site.glob("*.html")):
        page.goto(path.as_uri())
        cut = page.evaluate(
            f"() => [...document.querySelectorAll('{code}')].filter(e => e.scrollWidth > e.clientWidth + 1)"
            ".map(e => e.innerText.slice(0, 60))"
        )
        assert cut == [], path.name
        assert page.evaluate("document.documentElement.scrollWidth") <= width, path.name
