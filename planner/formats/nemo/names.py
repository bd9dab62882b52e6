"""Names of Megatron-LM's flags in NeMo and Megatron-Bridge."""

from __future__ import annotations

from planner.formats.facts.key_table import key_table

TABLE = key_table("megatron-bridge")

_LAST_WORDS = {key.rpartition(".")[2]: (key, flag) for key, flag in TABLE.flag_of.items()}

FLAGS = {
    leaf: flag
    for leaf, (key, flag) in _LAST_WORDS.items()
    if leaf != flag[2:].replace("-", "_") and key not in TABLE.opposite
}
"""Flags by the last word of a key, if it is not the flag's name with underscores."""

OFF = {leaf: flag for leaf, (key, flag) in _LAST_WORDS.items() if key in TABLE.opposite}
"""Switches that are given where a key is false."""

NOT_MEGATRONS = {
    "name",
    "type",
    "seed",
    "split",
    "data_path",
    "optimizer",
    "vocab_file",
    "merge_file",
    "save",
    "load",
    "spec",
    "model_parallel_size",
}
"""Last words of keys whose flags have another meaning, or do not concern the layout."""  # fmt: skip
