"""The tools of `planner.service.tools` over the Model Context Protocol, on standard input and output."""

from __future__ import annotations

import json

import anyio
import mcp_types as types
from mcp.server.lowlevel.server import Server
from mcp.server.stdio import stdio_server

from costmodels.errors import InputError
from planner.service.tools import TOOLS, call
from planner.version import version

INSTRUCTIONS = (
    "Plans how to split the training of a language model over a cluster. Ask `suggest` with a model, the "
    "number of devices, their kind and the batch size; `models` and `devices` list the names that are known. "
    "Times are in seconds, memory in bytes."
)


def make_server() -> Server:
    """The MCP server; it runs one call at a time, as each call uses a processor."""
    one = anyio.CapacityLimiter(1)

    async def list_tools(
        context: object, given: types.PaginatedRequestParams | None
    ) -> types.ListToolsResult:
        tools = [
            types.Tool(
                name=tool.name,
                description=tool.description,
                input_schema=tool.schema,
                annotations=types.ToolAnnotations(read_only_hint=True, open_world_hint=False),
            )
            for tool in TOOLS.values()
        ]
        return types.ListToolsResult(tools=tools)

    async def call_tool(context: object, given: types.CallToolRequestParams) -> types.CallToolResult:
        try:
            found = await anyio.to_thread.run_sync(call, given.name, given.arguments, limiter=one)
        except InputError as error:
            line = types.TextContent(type="text", text=" ".join(str(error).split()))
            return types.CallToolResult(content=[line], is_error=True)
        text = types.TextContent(type="text", text=json.dumps(found))
        return types.CallToolResult(content=[text], structured_content=json.loads(text.text))

    return Server(
        "planner",
        version=version() or "0",
        instructions=INSTRUCTIONS,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )


def serve() -> None:
    """Answer on standard input and output until the input ends."""

    async def run() -> None:
        server = make_server()
        async with stdio_server() as (reads, writes):
            await server.run(reads, writes, server.create_initialization_options())

    anyio.run(run)
