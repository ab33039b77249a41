"""A real browser for tests of pages: one on the path, or Playwright's own; without any they are skipped, loudly."""

from __future__ import annotations

import shutil
import warnings

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = ["--no-sandbox", "--disable-gpu"]
HOW_TO_GET_ONE = "install chromium, or run `playwright install chromium`"


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    found = next(filter(None, map(shutil.which, NAMES)), None)
    with api.sync_playwright() as playwright:
        try:
            opened = playwright.chromium.launch(executable_path=found, args=FLAGS)
        except api.Error as error:
            reason = f"NOT TESTED IN A BROWSER, there is none: {HOW_TO_GET_ONE} ({str(error).splitlines()[0]})"
            warnings.warn(reason, stacklevel=1)
            pytest.skip(reason)
        yield opened
        opened.close()
