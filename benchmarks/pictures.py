"""Draw the pictures of the documentation: commands in a terminal, and pages about plans and runs.

    python -m benchmarks.pictures docs/pictures

Terminals become SVG. Screenshots of pages are taken in Chromium, by playwright, at widths of 1280 and 390
pixels. The runs train `gpt2-nano` for a minute each.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from rich.console import Console
from rich.text import Text

from benchmarks.terminal import in_terminal

JOB = "--model llama2-70b --world-size 64 --local-world-size 8 --device a100-80g --global-batch-size 1024"

TRAIN = (
    "launch --model gpt2-nano --device cpu --world-size 2 --max-global-batch-size 32 --train-iters 100 "
    "--lr 3e-3 --lr-warmup-iters 10 --log-interval 10 --eval-interval 50 --log-dir run"
)

TERMINALS = {
    "suggest": f"suggest {JOB}",
    "explain": f"explain {JOB} --layout tp=16 --no-what-if",
    "launch": TRAIN.replace("--train-iters 100", "--train-iters 30").replace(" --log-dir run", ""),
}
"""Commands that are drawn at each width."""

WIDTHS = (80, 160)

PATIENCE_MS = 600_000
"""Most milliseconds that a browser may take to draw a page, even on a busy machine."""

SPINNER = re.compile(r"^\s*[⠀-⣿]")

PAGES = {
    "report": "suggest --model llama3-70b --world-size 64 --device h100 --max-global-batch-size 64",
    "report-16384": (
        "suggest --model llama3-405b --world-size 16384 --device h100 --max-global-batch-size 2048"
    ),
}
"""Jobs whose plans have a page."""


def settled(raw: str) -> str:
    """A terminal's output without overwritten lines."""
    kept = []
    for line in raw.replace("\r\n", "\n").split("\n"):
        parts = [part for part in re.split(r"\r|\x1b\[\d*[AK]|\x1b\[\?25[lh]", line) if part]
        parts = [part for part in parts if not SPINNER.match(Text.from_ansi(part).plain)]
        if parts or not line.strip("\r"):
            kept.append(parts[-1] if parts else "")
    return "\n".join(kept).strip("\n")


def draw_terminal(command: str, columns: int, file: Path) -> None:
    """Run a command in a terminal, and write an SVG of it."""
    with tempfile.TemporaryDirectory() as folder:
        shown = in_terminal(*command.split(), columns=columns, folder=Path(folder))
    if shown.code:
        raise SystemExit(f"planner {command}: {shown.text}")
    screen = Console(record=True, width=columns, file=io.StringIO())
    screen.print(Text.from_ansi(f"$ planner {command}\n{settled(shown.raw)}"))
    text = screen.export_svg(title="planner", unique_id=file.stem)
    file.write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n", encoding="utf-8")


QUESTION = {
    "model": "llama3-70b",
    "device": "h100",
    "world_size": "64",
    "global_batch_size": "256",
    "tokens": "1T",
    "price_per_hour": "$2.5",
}
"""The question on the pictured page."""


OWN_MODEL = {
    "model_type": "qwen3",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "_name_or_path": "my-lab/my-model",
}
"""The config.json that is pasted into the page in the pictures of a first visit."""


@contextmanager
def served(app: Any) -> Iterator[str]:
    """Serve an application in a thread; gives its address."""
    from planner.web.server import address, listening, make_server

    opened = listening("127.0.0.1", 0)
    server = make_server(app)
    thread = threading.Thread(target=server.run, args=([opened],), daemon=True)
    thread.start()
    try:
        yield address(opened)
    finally:
        server.should_exit = True
        thread.join()
        opened.close()


@contextmanager
def browsing() -> Iterator[Any]:
    """A headless Chromium."""
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser: Any = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


def new_tab(browser: Any, width: int, scheme: str, **context: Any) -> Any:
    """A page in a new browser context; its errors are printed."""
    opened = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, **context)
    opened.set_default_timeout(PATIENCE_MS)
    tab = opened.new_page()
    tab.on("console", lambda message: print("console:", message.text) if message.type == "error" else 0)
    return tab


def take_page(page: str, folder: Path, name: str, offline: bool = True) -> None:
    """Take screenshots of a page at two widths, in light and dark."""
    with browsing() as browser:
        for width, scheme in ((1280, "light"), (390, "dark")):
            tab = new_tab(browser, width, scheme, offline=offline)
            tab.goto(page)
            tab.locator("html[data-drawn]").wait_for()
            figures = tab.locator(".figure:visible").count()
            tab.locator(f"html[data-drawn='{figures}']").wait_for()
            write_picture(folder / f"{name}-{width}-{scheme}.png", tab.screenshot(full_page=True))


def write_picture(file: Path, content: bytes) -> None:
    """Write a screenshot with a palette of 256 colours, in a third of the bytes of 24 bits a pixel."""
    from PIL import Image

    with Image.open(io.BytesIO(content)) as whole:
        few = whole.convert("RGB").quantize(256, dither=Image.Dither.NONE)
    few.save(file, optimize=True)


def take_first_visit(target: Path) -> None:
    """Take screenshots of a first visit: the page is opened, a config.json is pasted, and Plan is pressed."""
    from planner.web.server import question_app

    with served(question_app("127.0.0.1")) as site, browsing() as browser:
        for width in (1280, 390):
            tab = new_tab(browser, width, "light", has_touch=width < 600, is_mobile=width < 600)
            begun = time.perf_counter()
            tab.goto(site)
            tab.locator("html[data-answered]").wait_for()
            tab.locator("textarea[name=config]").fill(json.dumps(OWN_MODEL, indent=2))
            tab.locator("button[type=submit]").click()
            tab.locator("h1:text-is('my-model on 8 x h100')").wait_for()
            print(f"{width} px: {time.perf_counter() - begun:.1f} s from the address to the answer")
            tab.locator("html[data-drawn='4']").wait_for()
            tab.evaluate("document.getElementById('question').scrollTop = 0")
            write_picture(target / f"web-first-{width}-light.png", tab.screenshot())


def take_question(target: Path) -> None:
    """Take screenshots of the page with an answer."""
    from planner.web.server import question_app

    with served(question_app("127.0.0.1")) as site:
        take_page(f"{site}#{urlencode(QUESTION)}", target, "web", offline=False)


def take_runs(target: Path) -> None:
    """Take screenshots of the page of two training runs."""
    from planner.report.run_figures import LoggedRun
    from planner.web.watch import watch_app
    from runtime.logs.metrics_file import FollowedMetrics

    with tempfile.TemporaryDirectory() as folder:
        for name, rate in (("lr-3e-3", "3e-3"), ("lr-1e-3", "1e-3")):
            command = TRAIN.replace("--log-dir run", f"--log-dir {name}").replace("--lr 3e-3", f"--lr {rate}")
            shown = in_terminal(*command.split(), columns=80, folder=Path(folder))
            if shown.code:
                raise SystemExit(f"planner {command}: {shown.text}")
        followed = {name: FollowedMetrics(Path(folder) / name) for name in ("lr-3e-3", "lr-1e-3")}

        def now() -> list[LoggedRun]:
            return [LoggedRun(name, one.update()) for name, one in followed.items()]

        with served(watch_app("127.0.0.1", now)) as site:
            take_page(site, target, "watch", offline=False)


def main() -> None:
    """Draw all pictures into a folder, or only those named after it."""
    target, wanted = Path(sys.argv[1]).resolve(), sys.argv[2:]
    target.mkdir(parents=True, exist_ok=True)
    for name, command in TERMINALS.items():
        for columns in WIDTHS:
            if not wanted or name in wanted:
                draw_terminal(command, columns, target / f"{name}-{columns}.svg")
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        jobs = PAGES | {"report-run": TRAIN}
        for name, command in jobs.items():
            if wanted and name not in wanted:
                continue
            source = "run" if command == TRAIN else "plan.json"
            words = command.split() + ([] if command == TRAIN else ["--save", source])
            for one in (words, ["report", source, "--out", "page.html"]):
                shown = in_terminal(*one, columns=80, folder=here)
                if shown.code:
                    raise SystemExit(f"planner {' '.join(one)}: {shown.text}")
            take_page((here / "page.html").as_uri(), target, name)
    for name, take in (("web", take_question), ("web-first", take_first_visit), ("watch", take_runs)):
        if not wanted or name in wanted:
            take(target)


if __name__ == "__main__":
    main()
