"""`planner mcp`: the planner's tools for agents."""

from __future__ import annotations

from costmodels.errors import InputError


def mcp() -> None:
    """Answer agents over the Model Context Protocol, on standard input and output.

    Tools: suggest, explain, check, export, models, devices. Start it from the configuration of an agent: the
    command is `planner`, its argument `mcp`. Nothing is written or run, and no file of this machine is read
    but the config.json of models in its Hugging Face cache.
    """
    try:
        from planner.service.mcp_server import serve
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.partition(".")[0] in ("mcp", "mcp_types", "anyio"):
            raise InputError(
                "planner mcp needs the package mcp; pip install 'llm-parallelism-planner[mcp]'"
            ) from None
        raise
    serve()
