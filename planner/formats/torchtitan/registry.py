"""torchtitan's configurations in Python: functions of a `config_registry.py` that return `Trainer.Config`.

They have the sections of the files that they replaced in 2026; the model is the argument of `model_registry`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path

from planner.formats.facts.entries import Entries, Entry
from planner.formats.facts.reading import Problems, Reading
from planner.formats.facts.source import Source, Surroundings
from planner.formats.python.following import Style
from planner.formats.python.recipes import Recipe, chosen, recipes
from planner.formats.torchtitan.flags import CONFIG
from planner.formats.torchtitan.names import FLAVORS
from planner.formats.torchtitan.reader import read_torchtitan

_SECTIONS = ("training.", "parallelism.", "activation_checkpoint.")

STYLE = Style(
    lambda entries: "model_spec" in entries or any(path.startswith(_SECTIONS) for path in entries),
    re.compile(r"(?:\w+\.)*\w*Trainer\.Config"),
    nested=True,
)
"""The form in which torchtitan's configurations are written."""

POLICIES = {"FullAC": "full", "SelectiveAC": "selective", "MemoryBudgetAC": "memory_budget"}
"""Classes of `activation_checkpoint` by their word in files."""

_NAMED = ("model.name", "model.flavor")
"""Keys of a command that only name its configuration."""

MOST_NAMED = 8
"""Most configurations that are listed if none is chosen."""

_OWN = re.compile(r"(?:torchtitan)?\.")


def has_configurations(file: str, text: str) -> bool:
    """Return whether a program has functions that return configurations of torchtitan."""
    return "Trainer.Config" in text and bool(recipes(((file, text),), style=STYLE))


def read_registry(source: Source, around: Surroundings, flags: Entries | None = None) -> Reading:
    """The job of one configuration: the one named by `--define recipe=NAME`, or the first.

    Args:
        flags: keys of a command, which names the configuration and overrides its values.
    """
    texts = ((source.file, source.text), *source.others)
    given = flags or {}
    if CONFIG in given and "recipe" not in around.define:
        define = {**around.define, "recipe": given[CONFIG].text}
        around = dataclasses.replace(around, define=define)
    recipe, others = chosen(texts, around.define, STYLE)
    problems = Problems(source.file)
    if others and "recipe" not in around.define:
        text = f"the file has {len(others) + 1} configurations, and which one trains is not known"
        names = sorted((recipe.name, *others), key=lambda name: "debug" in name)
        more = ", ..." if len(names) > MOST_NAMED else ""
        some = ", ".join(names[:MOST_NAMED])
        problems.add("unknown", text, "recipe", None, f"give --define recipe=NAME ({some}{more})")
    for base in recipe.bases:
        text = f"comes from {base}(), which is in no file that is given"
        problems.add("unknown", text, recipe.name, base.line, f"give the file of {base} too", recipe.file)
    for function in recipe.changed_by:
        own = bool(_OWN.match(function.module))
        text = f"{function}() changes the configuration, and is in no file that is given"
        remedy = f"give the file of {function} too"
        problems.add("note" if own else "unknown", text, recipe.name, function.line, remedy, recipe.file)
    if "model_spec" not in recipe.entries and around.model is None:
        text = "the configuration has no model"
        problems.add("unknown", text, "model_spec", None, "give --model")
    define = {name: value for name, value in around.define.items() if name != "recipe"}
    changes = {path: entry for path, entry in given.items() if path != CONFIG and path not in _NAMED}
    reading = read_torchtitan(
        dataclasses.replace(source, text="", entries=_as_file(recipe) | changes),
        dataclasses.replace(around, define=define),
    )
    placed = [
        dataclasses.replace(problem, file=recipe.files.get(problem.flag, recipe.file))
        for problem in reading.problems
    ]
    return dataclasses.replace(
        reading,
        program=recipe.name,
        files=recipe.files,
        assumed=(f"recipe {recipe.name}", *reading.assumed),
        problems=(*problems.found, *placed),
    )


def _as_file(recipe: Recipe) -> Entries:
    """The keys of a configuration in the form of a file's keys."""
    found: Entries = {}
    for path, entry in recipe.entries.items():
        section, _, rest = path.partition(".")
        if section == "model_spec":
            continue
        if path == "activation_checkpoint":
            found |= _policy(entry)
        elif rest:
            found[path] = entry
    return found | _model(recipe)


def _policy(entry: Entry) -> Entries:
    """The keys of a recompute policy: a class, or nothing where there is none."""
    words = entry.text.split(".")
    mode = next((mode for name, mode in POLICIES.items() if name in words), "")
    if entry.text == "null":
        mode = "none"
    if not mode:
        return {}  # Its own keys say it.
    path = "activation_checkpoint.mode"
    found = {path: Entry(path, mode, entry.line)}
    if mode == "selective":
        path = "activation_checkpoint.selective_ac_option"
        found[path] = Entry(path, "op", entry.line)  # It chooses operators.
    return found


def _model(recipe: Recipe) -> Entries:
    """The family and flavor of the model, and the converters of its layers."""
    entries = recipe.entries
    made = entries.get("model_spec")
    if made is None:
        return {}
    found = {"model.name": Entry("model.name", _family(recipe, made.text), made.line)}
    flavor = next(
        (entries[f"model_spec.{key}"] for key in ("0", "flavor", "name") if f"model_spec.{key}" in entries),
        None,
    )
    found["model.flavor"] = Entry("model.flavor", made.text if flavor is None else flavor.text, made.line)
    converters = {
        path: entry
        for path, entry in entries.items()
        if re.fullmatch(r"model_spec\.converters(?:\.\d+)?", path) and entry.text not in ("", "null")
    }
    if converters:
        words = [re.sub(r"\.Config$", "", entry.text).rpartition(".")[2] for entry in converters.values()]
        line = next(iter(converters.values())).line
        found["model.converters"] = Entry("model.converters", ",".join(words), line, tuple(words))
    for path, entry in entries.items():
        if path.startswith("model_spec.converters.") and path.endswith(".recipe_name"):
            found["float8.recipe_name"] = Entry("float8.recipe_name", entry.text, entry.line)
    return found


def _family(recipe: Recipe, made: str) -> str:
    """The family of the model: from the module of `model_registry`, from the file's folder, or from the
    name."""
    families: Mapping[str, None] = dict.fromkeys(family for family, _ in FLAVORS)
    named = re.search(r"torchtitan\.models\.(\w+)\.", made)
    folder = Path(recipe.files.get("model_spec", recipe.file)).parent.name
    if named is not None:
        return named[1]
    if folder in families:
        return folder
    return next((family for family in families if recipe.name.startswith(f"{family}_")), recipe.name)
