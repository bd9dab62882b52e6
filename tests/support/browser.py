"""A headless Chromium for tests of pages, and what a tab complains of."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from benchmarks.pictures import PATIENCE_MS


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser; the test is skipped where playwright or a browser is missing."""
    api = pytest.importorskip("playwright.sync_api")
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no Chrome or Chromium to draw in")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def tab(
    browser: Any, width: int = 1280, scheme: str = "light", **context: Any
) -> Iterator[tuple[Any, list[str]]]:
    """A page of its own context, and the list that its complaints fill."""
    opened = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, **context)
    opened.set_default_timeout(PATIENCE_MS)
    page = opened.new_page()
    found: list[str] = []
    page.on("console", lambda message: found.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: found.append(str(error)))
    page.on("dialog", lambda dialog: (found.append(f"dialog {dialog.message}"), dialog.dismiss()))
    yield page, found
    opened.close()
