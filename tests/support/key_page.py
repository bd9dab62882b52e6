"""The page of keys of other software, which `python -m tests.support.key_page` writes from the tables."""

from __future__ import annotations

from planner.formats.facts.key_table import FOLDER, key_table
from tests.support import ROOT

PAGE = ROOT / "docs" / "keys-of-other-software.md"

HEAD = """\
# Keys of other software

These tables list the keys that `planner check` reads and `planner export` writes. Each is named by its
field of `Layout` or `ModelSpec`, or by the equivalent flag of Megatron-LM. A few names are the reader's
own, such as `split_points`. Files of every release are read: earlier names are listed beside present
ones. The tables are in `planner/formats/keys/*.yaml`, which also describe all other keys. To add
software, write such a table and a reader. Flags of Megatron-LM and MindSpeed are in
`planner/formats/facts/megatron_flags.yaml`.
"""

NAMES = {
    "accelerate": "accelerate",
    "axolotl": "axolotl",
    "deepspeed": "DeepSpeed",
    "gpt-neox": "GPT-NeoX",
    "megatron-bridge": "Megatron-Bridge, and NeMo's names",
    "mindformers": "MindFormers, static graph",
    "mindformers-dynamic": "MindFormers, dynamic graph",
    "ms-swift": "ms-swift under Megatron-LM",
    "nanotron": "nanotron",
    "nemo-rl": "NeMo-RL, DTensor",
    "primus": "Primus",
    "torchtitan": "torchtitan",
    "transformers": "Hugging Face's trainer",
    "verl": "verl's actor",
    "verl-sft": "verl's trainer of given answers",
}
"""Titles of the tables that have fields; other keys are flags of Megatron-LM, spelled otherwise."""


def page() -> str:
    """The text of the page."""
    parts = [HEAD]
    for software in sorted(path.stem for path in FOLDER.glob("*.yaml")):
        table = key_table(software)
        rows = {**table.fields, **table.flags}
        if not rows:
            continue
        before: dict[str, list[str]] = {}
        for name, key in table.earlier.items():
            before.setdefault(key, []).append(f"`{name}`")
        earlier = any(before)
        parts.append(f"\n## {NAMES[software]}\n\n| says | key |" + (" earlier |" if earlier else ""))
        parts.append("\n| --- | --- |" + (" --- |" if earlier else "") + "\n")
        for field, key in rows.items():
            more = f" {', '.join(before.get(key, []))} |" if earlier else ""
            parts.append(f"| `{field}` | `{key}` |{more}\n")
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
