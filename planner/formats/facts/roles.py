"""Problems about flags and keys that the planner does not read, if they matter to the user."""

from __future__ import annotations

import re
from collections.abc import Iterable

from planner.formats.facts.flag_catalogue import GivenFlag
from planner.formats.facts.reading import Problems

NOT_SUPPORTED = "not supported: it changes the model or the job beyond the ones that are priced"
NOT_PRICED = "not priced: it changes memory or time, which the estimates leave out"

_DECIDES = re.compile(
    r"parallel|pipeline|shard|ulysses|fsdp|zero|(?<![a-z])(tp|pp|cp|sp|ep|etp|dp|vpp)(?![a-z])|n?nodes?(?![a-z])"
    r"|num_?gpus|devices|bf16|fp16|fp8|fp4|fp32|dtype|precision|quant|[48]_?bit|batch|accumulation|seq(?![a-z])"
    r"|seq_?len|sequence|max_len|max_.*length|cutoff|block_size|recompute|gradient_checkpoint|activation_checkpoint"
    r"|offload|lora|adapter|peft|dora|galore|freeze|layers?(?![a-z])|hidden|heads?(?![a-z])|ffn|intermediate|vocab"
    r"|head_dim|experts?(?![a-z])|top_?k|mamba|optimizer"
)
"""Words in names of keys about parallelism, precision, batches, sequences, recomputation, adapters or a
model."""

_ASIDE = re.compile(
    r"eval|valid|test|log|save|load|path|(?<![a-z])dirs?(?![a-z])|file|wandb|tensorboard|profil|monitor|metric|tokenizer"
    r"|dataset|data(?![a-z_]*parallel)|template|timeout|worker|debug|port|address|endpoint|host|seed|lr(?![a-z])"
    r"|init|dropout|overlap|fusion|prefetch|bucket|temperature|generat|sampl|reward|rollout|inference"
)
"""Words in names of keys about logs, files and data; they outweigh other words in the name."""

_OFF = ("false", "no", "off", "none", "null", "0", "")


def decides(name: str, text: str) -> bool:
    """Return whether an unknown key could affect the price, by its name and its value."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().strip("-").replace("-", "_")
    off = text.strip().lower() in _OFF
    return not off and bool(_DECIDES.search(words)) and not _ASIDE.search(words)


def name_others(given: Iterable[GivenFlag], problems: Problems, unknown: str, file: str = "") -> None:
    """Add a problem for each flag or key that the planner does not read.

    A key that could affect the price makes the answer unknown; the others are notes.

    Args:
        unknown: the text for flags that are in no list.
        file: the file of the flags, if it is not the file of `problems`.
    """
    named = {problem.flag for problem in problems.found}
    for flag in given:
        if flag.name in named:
            continue  # Something more is said of it.
        # A switch of a command has no value where it is on.
        text = flag.text if flag.values or not flag.name.startswith("-") else "true"
        where = flag.name, flag.line
        leave_out = f"give --define {flag.name.lstrip('-')}= where it changes nothing that is priced"
        if flag.known.role == "unsupported":
            if text.strip().lower() in _OFF:
                problems.add("note", NOT_SUPPORTED, *where, file=file)
            else:
                problems.add("unknown", NOT_SUPPORTED, *where, leave_out, file)
        elif flag.known.role == "unpriced":
            if text.strip().lower() not in ("false", "none", "null"):
                problems.add("note", NOT_PRICED, *where, file=file)
        elif flag.known.role == "unknown" and decides(flag.name, text):
            about = f" ({flag.known.about})" if flag.known.about else ""
            problems.add(
                "unknown", f"{unknown}{about}, and its name suggests that it matters", *where, leave_out, file
            )
        elif flag.known.role == "unknown":
            problems.add("note", unknown, *where, flag.known.about, file)
