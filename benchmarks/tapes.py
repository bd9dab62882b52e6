"""How many of the plans that searches find have tapes, and which tapes are worth recording next?

python -m benchmarks.tapes [--searches N] [--seed S] [--missing N] [--choices] [--json]

Half of the searches are those of `benchmarks.first_plans`; the others are of any model of the catalogue, some
of them with long sequences and in other number formats. Of each the plans that are ranked first are looked
at. `--choices` counts what they do, which orders `costmodels.tapes.coverage`.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from benchmarks.first_plans import DEVICES, jobs
from costmodels import Layout, ModelSpec
from costmodels.catalogue import load_model, model_names
from costmodels.errors import InputError
from costmodels.spec.layout import SPLIT_BACKWARD
from costmodels.tapes import player, store
from costmodels.tapes.structure import LAYERS, Structure, structure_of
from planner import search

PLACES = 20
"""Plans of each search that are looked at."""

WORLD_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

PRECISIONS = (*(None,) * 14, *("fp8",) * 3, *("fp16",) * 2, "fp32")
"""What is asked for; mostly nothing."""

LENGTHS = (*(0,) * 9, 16384, 32768, 131072)
"""Positions of a sequence; mostly those of the model."""


@dataclass
class Coverage:
    """What some plans need."""

    plans: int = 0
    played: int = 0
    """Plans with tapes of all units."""
    first: int = 0
    first_played: int = 0
    missing: Counter[str] = field(default_factory=Counter)
    """Structures without a tape, by the number of plans that have them."""
    choices: dict[str, Counter[str]] = field(default_factory=dict)

    def add(self, model: ModelSpec, layout: Layout, place: int) -> None:
        """Count a plan."""
        compiled = layout.schedule not in SPLIT_BACKWARD
        lacks = player.missing(model, layout, compiled)
        is_played = player.plays(model, layout, compiled)
        self.plans += 1
        self.played += is_played
        self.first += place == 0
        self.first_played += is_played and place == 0
        self.missing.update(structure.name for structure in lacks)
        for unit in LAYERS if model.experts else LAYERS[:1]:
            for name, value in _choices(structure_of(model, layout, unit, compiled)):
                self.choices.setdefault(name, Counter())[value] += 1


def _choices(structure: Structure) -> Iterator[tuple[str, str]]:
    """What a layer does, in the kinds of choices that `costmodels.tapes.coverage` combines."""
    tp, ep = structure.tensor_parallel, structure.expert_parallel
    ranks = f" of {structure.context_ranks}" * (structure.context_ranks > 1)
    yield "precision", structure.precision
    yield "recomputation", "+".join(structure.recompute) or "none"
    yield "context parallel", (structure.context_form or "none") + ranks
    yield "tensor parallel", "sequence" if structure.sequence_parallel else "yes" if tp else "none"
    if structure.unit == "experts":
        shared = " with tensor parallel" * structure.expert_tensor_parallel
        yield "expert parallel", ("yes" if ep else "none") + shared


def problems(seed: int) -> Iterator[tuple[ModelSpec, dict[str, Any]]]:
    """Random searches without end: a model, and arguments of `planner.search`."""
    chosen, drawn = random.Random(seed), jobs(seed)
    while True:
        job = next(drawn)
        size = "max_global_batch_size" if job.maximum else "global_batch_size"
        yield load_model(job.model), {"world_size": job.world_size, "device": job.device, size: job.batch}
        model, world_size = load_model(chosen.choice(model_names())), chosen.choice(WORLD_SIZES)
        length, precision = chosen.choice(LENGTHS), chosen.choice(PRECISIONS)
        if length and model.position != "learned":
            model = model.model_copy(update={"seq": length})
        size = chosen.choice(("max_global_batch_size", "global_batch_size"))
        yield (
            model,
            {"world_size": world_size, "device": chosen.choice(DEVICES)}
            | {size: world_size * chosen.choice((1, 2, 4, 8))}
            | ({"precision": precision} if precision else {}),
        )


def coverage(searches: int, seed: int) -> Coverage:
    """What the first plans of random searches need."""
    found = Coverage()
    for model, arguments in islice(problems(seed), searches):
        try:
            result = search(model, **arguments)
        except InputError:
            continue
        for place, row in enumerate(result.places[:PLACES].tolist()):
            found.add(model, result.prices.table.layout(row), place)
    return found


def main() -> None:
    """Print how many plans are played, and what is missing most."""
    parser = argparse.ArgumentParser(prog="benchmarks.tapes", description=str(__doc__).split("\n")[0])
    parser.add_argument("--searches", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--missing", type=int, default=10, help="structures to list that lack a tape")
    parser.add_argument("--choices", action="store_true", help="count what plans do")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    found = coverage(options.searches, options.seed)
    missing = found.missing.most_common(options.missing)
    if options.json:
        counts = {"plans": found.plans, "played": found.played}
        counts |= {"first": found.first, "first_played": found.first_played}
        print(json.dumps(counts | {"missing": dict(missing), "choices": found.choices}, indent=2))
        return
    tapes = len(store.known_structures(store.default_version()))
    print(f"{tapes} tapes of PyTorch {store.default_version()} in the package")
    print(f"{found.first_played} of {found.first} first plans are played")
    print(f"{found.played} of {found.plans} plans in the first {PLACES} places are played")
    print(f"{len(found.missing)} structures lack a tape" + ", most often" * bool(missing))
    for name, count in missing:
        print(f"  {count:5} {name}")
    for kind, choices in found.choices.items() if options.choices else ():
        usual = max(choices.values())
        print(f"{kind}, and minus the logarithm of its number over that of the most usual")
        for name, count in choices.most_common():
            print(f"  {count:6} {math.log(usual / count):5.1f} {name}")


if __name__ == "__main__":
    main()
