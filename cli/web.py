"""`planner web`: a page in the browser that answers questions."""

from __future__ import annotations

import sys
from typing import Annotated, cast, get_args

import typer

from costmodels.errors import InputError
from planner.inputs.huggingface.hub import HubUse

HOST = "127.0.0.1"
"""Address that pages are served at unless a flag says another: this machine alone."""

MOST_PORT = 65_535


def check_port(port: int) -> None:
    """Raise `InputError` for an impossible port number."""
    if not 0 <= port <= MOST_PORT:
        raise InputError(f"--port {port}: expected a number from 0 (a free one) to {MOST_PORT}")


def web(
    port: Annotated[
        int, typer.Option("--port", help="Number of the port to listen at; 0 for a free one.")
    ] = 8000,
    host: Annotated[
        str,
        typer.Option("--host", help="Address to listen at; 0.0.0.0 lets every machine of the network ask."),
    ] = HOST,
    workers: Annotated[
        int, typer.Option("--workers", help="Number of questions that are answered at once.")
    ] = 2,
    hub: Annotated[
        str | None,
        typer.Option(
            "--hub",
            help="Where to look up a model's id, such as Qwen/Qwen3-8B: never, cached (in this machine's "
            "Hugging Face cache) or fetched (from the Hub). Unless given: cached, or never with "
            "another --host.",
        ),
    ] = None,
) -> None:
    """Serve a page that answers questions: plan, alternatives, memory, time, pipeline, cost and script."""
    check_port(port)
    if not 1 <= workers <= 64:
        raise InputError(f"--workers {workers}: expected a number from 1 to 64")
    if hub is not None and hub not in get_args(HubUse):
        raise InputError(f"--hub {hub!r}: expected {', '.join(get_args(HubUse))}")
    from planner.web.server import LOOPBACK, address, listening, make_server, question_app
    from planner.web.workers import Workers

    opened = listening(host, port)
    # A cache may hold private models: strangers see it only where whoever serves them says so.
    followed = cast(HubUse, hub or ("cached" if host in LOOPBACK else "never"))
    app = question_app(host, Workers(workers), followed)
    print(f"planner: {address(opened)} (Ctrl-C ends it)", file=sys.stderr, flush=True)
    if host not in LOOPBACK:
        print("planner: every machine that reaches this one can ask", file=sys.stderr, flush=True)
    make_server(app).run(sockets=[opened])
