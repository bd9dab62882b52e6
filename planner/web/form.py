"""The form of a question as HTML, made of the fields that a question has."""

from __future__ import annotations

import html
from collections.abc import Sequence

from costmodels.catalogue import engine_names
from planner.options.lora import FORMATS
from planner.service.commands import targets
from planner.service.fields import PRECISIONS, Field, fields

SCRIPT = "script"
"""Name of a field that only the page has: the file format in which the plan is written."""

MAIN = {
    "Model": {
        "model": "Catalogue name or Hugging Face id",
        "config": "Or paste its config.json",
        "seq_length": "Tokens of a sequence",
    },
    "Devices": {
        "device": "Device",
        "world_size": "Number of devices",
        "local_world_size": "Devices of a node",
    },
    "Training": {
        "global_batch_size": "Sequences of a step",
        "max_global_batch_size": "Or at most so many",
        "precision": "Number format",
        "engine": "Engine",
    },
    "Fine-tuning": {"lora_rank": "LoRA rank", "quantize_base": "Base in 4 bits"},
    "Run": {"tokens": "Tokens to train on", "price_per_hour": "Price of a device and hour"},
}
"""Labels of the fields that are shown at once, by heading."""

EXAMPLES = {
    "model": "llama3-8b",
    "device": "h100",
    "world_size": "8, or 64..512",
    "seq_length": "as the model",
    "local_world_size": "as usual",
    "global_batch_size": "64",
    "max_global_batch_size": "64",
    "lora_rank": "none",
    "tokens": "300B",
    "price_per_hour": "$2.5",
    "config": '{"model_type": "llama", ...}',
}
"""Placeholders of empty fields."""

CHOICES: dict[str, Sequence[str]] = {"precision": PRECISIONS, "quantize_base": FORMATS}
"""Fields with a list of values to choose from."""

BUTTONS = (
    '<p class="buttons"><button type="submit">Plan</button> '
    '<button type="button" id="copy">Copy the link</button> '
    '<button type="button" id="clear">Start over</button></p>'
)

FIRST = {"model": "llama3-8b", "device": "h100", "world_size": "8", "global_batch_size": "64"}
"""The question of a page if its address has no question."""


def form() -> str:
    """The fields under their headings, the usual ones first; the others are collapsed."""
    known, shown = fields(), [name for group in MAIN.values() for name in group]
    choices = {**CHOICES, "engine": engine_names()}
    parts = [
        f"<fieldset><legend>{heading}</legend>"
        + "".join(_field(known[name], label, choices) for name, label in group.items())
        + "</fieldset>"
        for heading, group in MAIN.items()
    ]
    options = "".join(f"<option>{html.escape(name)}</option>" for name in targets())
    parts.append(
        '<fieldset><legend>File to write</legend><label class="field"><span>Scheduler or software</span>'
        f'<select name="{SCRIPT}"><option value="">as the engine</option>{options}</select></label>'
        "</fieldset>"
    )
    sections: dict[str, list[str]] = {}
    for field in known.values():
        # A number format is one choice here, and no file of the server is read.
        if field.name not in shown and field.name not in (*PRECISIONS, "network_table", "task_type"):
            sections.setdefault(field.section or "More", []).append(_further(field, choices))
    further = "".join(
        f"<fieldset><legend>{html.escape(section)}</legend>{''.join(found)}</fieldset>"
        for section, found in sections.items()
    )
    parts += [BUTTONS, f"<details><summary>All other flags</summary>{further}</details>"]
    return "".join(parts)


def _field(field: Field, label: str, choices: dict[str, Sequence[str]]) -> str:
    hint = html.escape(f"{' '.join(field.spellings)} {field.help}".strip())
    wide = " wide" if field.name in ("model", "config", "device") else ""
    return (
        f'<label class="field{wide}" title="{hint}"><span>{html.escape(label)}</span>'
        f"{_control(field, choices)}</label>"
    )


def _further(field: Field, choices: dict[str, Sequence[str]]) -> str:
    flag = html.escape(field.spellings[0])
    return (
        f'<label class="field wide"><span><code>{flag}</code></span>{_control(field, choices)}'
        f"<small>{html.escape(field.help)}</small></label>"
    )


def _control(field: Field, choices: dict[str, Sequence[str]]) -> str:
    name, example = html.escape(field.name), html.escape(EXAMPLES.get(field.name, ""))
    if field.name == "config":
        return f'<textarea name="{name}" rows="2" spellcheck="false" placeholder=\'{example}\'></textarea>'
    if field.kind == "boolean":
        return f'<input type="checkbox" name="{name}" value="true">'
    if field.name in choices:
        options = "".join(f"<option>{html.escape(value)}</option>" for value in choices[field.name])
        return f'<select name="{name}"><option value="">as usual</option>{options}</select>'
    numeric = ' inputmode="numeric"' if field.kind == "integer" else ""
    known, listed = "", ""
    if field.values:
        known = f' list="values-{name}"'
        options = "".join(f'<option value="{html.escape(value)}">' for value in field.values)
        listed = f'<datalist id="values-{name}">{options}</datalist>'
    return (
        f'<input name="{name}" autocomplete="off" autocapitalize="off" spellcheck="false"{numeric}{known} '
        f'placeholder="{example}">{listed}'
    )
