"""The server of the pages: it sends the form, and answers one question per request. It needs the extra
`web`."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from importlib.resources import files
from string import Template
from typing import Any

from costmodels.errors import InputError
from costmodels.files import MIB
from planner.inputs.huggingface.hub import HubUse
from planner.report.page import asset, plotly_script
from planner.web.answer_page import answer_text
from planner.web.form import FIRST, form
from planner.web.workers import Workers

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.requests import Request
    from starlette.responses import HTMLResponse, Response
    from starlette.routing import Route
except ImportError:
    raise InputError(
        "the page wants starlette and uvicorn, which are not installed; "
        "pip install 'llm-parallelism-planner[web]'"
    ) from None

MOST_BYTES = MIB
"""Most bytes of a question."""

LOOPBACK = ("127.0.0.1", "localhost", "::1")

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src data: blob:; "
    "connect-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
)
"""The content security policy of a page: only files of this server, and no script inside the data that it
shows."""

HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def own_asset(name: str) -> str:
    """The text of a file of this folder that pages include."""
    return files("planner.web").joinpath(name).read_text(encoding="utf-8")


def question_app(host: str, workers: Workers | None = None, hub: HubUse = "cached") -> Starlette:
    """The application that answers questions.

    Args:
        host: name or address of the server; on a loopback address, requests with other host names are
            refused.
        workers: number of processes that answer.
        hub: reach of the look-up of ids on the Hugging Face Hub.
    """
    shared = workers or Workers()

    async def answer(request: Request) -> Response:
        try:
            question = await _question(request)
            text = await shared.made(partial(answer_text, question, hub))
        except InputError as error:
            text = json.dumps({"error": str(error)})
        return Response(text, headers=HEADERS, media_type="application/json")

    page = Template(own_asset("ask.html")).substitute(form=form(), first=json.dumps(FIRST))
    scripts = {"ask.js": own_asset("ask.js")}
    return application(host, page, scripts, [Route("/answer", answer, methods=["POST"])], shared.close)


async def _question(request: Request) -> dict[str, Any]:
    """The values of a question; raises `InputError` for a body without a question, or one that is too
    large."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        # A page of another server can send no such body without asking first.
        raise InputError("a question is sent as application/json")
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MOST_BYTES:
            raise InputError(f"a question has at most {MOST_BYTES // MIB} MiB")
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        raise InputError("a question is one JSON object") from None
    if not isinstance(found, dict):
        raise InputError("a question is one JSON object")
    return found


def application(
    host: str,
    page: str,
    scripts: Mapping[str, str],
    routes: Sequence[Route],
    close: Callable[[], None] = lambda: None,
) -> Starlette:
    """The application of a page: its scripts, its plotting library, and further routes.

    Args:
        close: function that is called when the server ends.
    """
    texts = {
        "plotly.js": plotly_script("the page"),
        "figures.js": asset("figures.js"),
        "page.css": asset("page.css"),
        "form.css": own_asset("form.css"),
        **scripts,
    }
    kinds = {"js": "text/javascript", "css": "text/css"}

    async def index(request: Request) -> Response:
        return HTMLResponse(page, headers=HEADERS)

    async def file(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in texts:
            return Response("no such file\n", 404, HEADERS, "text/plain")
        cached = {"Cache-Control": "max-age=86400"} if name == "plotly.js" else {}
        return Response(texts[name], 200, HEADERS | cached, kinds[name.rpartition(".")[2]])

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        close()

    hosts = [*LOOPBACK, "[::1]", host] if host in LOOPBACK else ["*"]
    return Starlette(
        routes=[Route("/", index), Route("/assets/{name}", file), *routes],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False)],
        lifespan=lifespan,
    )


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens; raises `InputError` where it cannot."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    opened = socket.socket(family, socket.SOCK_STREAM)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind((host, port))
        opened.listen(128)
    except (OSError, OverflowError) as error:
        opened.close()
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"--host {host} --port {port}: {reason}; name another port, or 0 for a free one"
        ) from None
    return opened


def address(opened: socket.socket) -> str:
    """The URL of a page that a socket serves."""
    host, port = opened.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/"


def make_server(app: Starlette) -> uvicorn.Server:
    """A server of an application; it logs only errors."""
    return uvicorn.Server(
        uvicorn.Config(app, log_level="error", access_log=False, timeout_graceful_shutdown=2)
    )
