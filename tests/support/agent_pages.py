"""The pages for agents, made of the descriptions of the tools and of the command line's examples."""

from __future__ import annotations

import json

from cli.help_examples import EXAMPLES
from planner.service.tools import TOOLS, Tool
from tests.support import ROOT

SKILL = ROOT / "skills" / "planner" / "SKILL.md"
LLMS = ROOT / "docs" / "llms.txt"

SHOWN = ("suggest", "explain", "check", "export", "script", "models", "devices")
"""Commands whose examples stand in the pages."""

WHAT = (
    "Plans how to split the training of a large language model over accelerators: tensor, sequence, "
    "pipeline, context, expert and data parallelism, pipeline schedule, ZeRO stage, microbatch, "
    "recomputation. It ranks every legal layout by predicted seconds and bytes, says why, and writes the "
    "winner for Megatron-LM, NeMo, torchtitan, DeepSpeed and others."
)

USE = (
    "Use it to answer: does a model fit on these devices, how should it be split, how fast is a step, how "
    "many days and how much money does a run take, is this training script legal, what would be faster."
)

INSTALL = "pip install llm-parallelism-planner"

UNITS = (
    "Names of fields end in their unit: `_s` seconds, `_bytes` bytes, `_per_s` per second. `step_time_low_s` "
    "and `step_time_high_s` hold four of five measured steps. `peak_memory_bytes` must be within the memory "
    "of a device. What was assumed stands under `assumed`; tell it to the user."
)

FIRST = (
    *("model", "config", "world_size", "local_world_size", "device", "global_batch_size"),
    *("max_global_batch_size", "seq_length", "precision", "pin", "forbid", "engine", "tokens"),
    "price_per_hour",
)
"""Fields of a question that most callers need."""


def tool_section(tool: Tool) -> str:
    """A tool: what it answers, what it must be given, and an example."""
    needed = ", ".join(f"`{name}`" for name in tool.schema.get("required", ())) or "nothing"
    every = list(tool.schema["properties"])
    own = every if len(every) < 20 else every[: every.index("config")]
    named = [*own, *(name for name in FIRST if name in every and name not in own)]
    usual = ", ".join(f"`{name}`" for name in named)
    more = len(every) - len(named)
    rest = f" and {more} more, which the schema describes" if more > 0 else ""
    example = json.dumps(tool.example, indent=2)
    return (
        f"### {tool.name}\n\n{tool.description}\n\nRequired: {needed}. Fields: {usual}{rest}.\n\n"
        f"```json\n{example}\n```\n"
    )


def commands() -> str:
    """Commands that can be typed, those that write files first."""
    lines = [line for name in SHOWN for line in EXAMPLES[name]]
    return (
        "```console\n"
        + "\n".join(f"$ {line}" if line.startswith("planner") else line for line in lines)
        + "\n```\n"
    )


def skill() -> str:
    """The skill file."""
    head = f"---\nname: planner\ndescription: {json.dumps(USE)}\n---\n"
    protocol = "the Model Context Protocol on standard input and output"
    parts = (
        head,
        "# Planning how to train a language model\n",
        f"{WHAT}\n\n{USE}\n",
        f"Install it with `{INSTALL}`; it needs no GPU and answers in about a second. Ask it at the command "
        f"line, or by the tools of `planner mcp` ({protocol}; `{INSTALL}[mcp]`).\n",
        "## At the command line\n",
        "`--json` prints one object, and `planner COMMAND --help` all flags. A plan that is saved is what "
        "`export`, `script` and `launch` take.\n",
        commands(),
        "## Reading an answer\n",
        f"{UNITS}\n",
        "Exit codes: 0, 2 for wrong input (one line says what and what instead), 3 where nothing fits.\n",
        "## Tools\n",
        *map(tool_section, TOOLS.values()),
    )
    return "\n".join(parts)


def llms() -> str:
    """The page `llms.txt` of the documentation."""
    pages = (
        ("planning.md", "how to ask, and how to read an answer"),
        ("planning-inputs.md", "models, devices, number formats"),
        ("planning-pins.md", "degrees that are fixed"),
        ("planning-sizes.md", "days, cost, numbers of devices, checkpoints and failures"),
        ("scripts-that-you-have.md", "judging scripts of other software"),
        ("clusters.md", "Slurm, Kubernetes and others"),
        ("agents.md", "the tools of `planner mcp`, notebooks"),
        ("reference.md", "Python"),
        ("glossary.md", "symbols and terms"),
    )
    listed = "\n".join(f"- [{page}]({page}): {what}" for page, what in pages)
    tools = "\n".join(f"- `{tool.name}`: {tool.description}" for tool in TOOLS.values())
    return (
        f"# LLM parallelism planner\n\n> {WHAT}\n\n{USE}\n\nInstall: `{INSTALL}`. {UNITS}\n\n"
        f"## Commands\n\nFrom a question to a plan and a Slurm script:\n\n{commands()}\n"
        f"## Tools of `planner mcp`\n\n{tools}\n\n## Pages\n\n{listed}\n"
    )


PAGES = {SKILL: skill, LLMS: llms}

if __name__ == "__main__":
    for path, made in PAGES.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(made())
