"""Checks whether the first plan is the best, by random legal layouts of random questions, priced one by one.

python -m benchmarks.brute_force [--questions N | --only NUMBER...] [--seed S] [--layouts N] [--json]

A question is a model, devices (an odd or prime number of them too), nodes, a global batch or its maximum, an
engine and sometimes pins. Layouts are drawn from all degrees at random, and from the neighbours of the first
plan. Drawn layouts are compared with the first plan if they break no rule, agree with the pins and fit by
`planner.evaluate`. Rules that only remove layouts known to be no better do not count. A layout beats the
first plan by more than 2 % of its tokens per second, which is less than the estimates' error, or by fitting
if the search says that no layout fits. Those that are a thousandth to 2 % faster are listed too. Layouts that
offload are drawn where the search offloads, or where it finds none that fits.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from pydantic import ValidationError

import planner
from costmodels.catalogue import engine_names, load_device, load_engine
from costmodels.dataclass import dataclass
from costmodels.errors import InputError
from costmodels.memory.host import host_bytes
from costmodels.pricing import peak_memory, price
from costmodels.spec.layout import Layout, even_split
from costmodels.spec.table import (
    CONTEXT_FORMS,
    RECOMPUTE_MODULES,
    SCHEDULES,
    UNIFORM,
    LayoutTable,
    code_of,
    value_of,
)
from planner.inputs.choice import Choice
from planner.inputs.engine import DEFAULT_ENGINE
from planner.problem import Problem, resolve_problem
from planner.ranking.result import SearchResult
from planner.space.rule import divisors
from planner.space.rules import RULES
from planner.space.shared_stages import less_layers

CORE_ATTENTION = code_of("recompute_modules", ("core_attention",))

MODELS = (
    *("gpt2-small", "gpt2-xl", "gpt3-125m", "gpt3-2.7b", "gpt3-13b", "gpt-22b", "gpt3-175b", "llama2-7b"),
    *("llama2-13b", "llama2-70b", "llama3-8b", "llama3-70b", "qwen2.5-0.5b", "qwen2.5-32b", "qwen3-8b"),
    *("mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v2-lite", "qwen1.5-moe-a2.7b", "mindformers-gpt-13b"),
    *("mindformers-gpt-70b", "sc21-39.1b", "korthikanti-175b"),
)

DEVICES = (
    *("v100-32g", "a100-40g", "a100-80g", "a100-pcie-80g", "h100", "h200", "b200", "mi300x", "l40s", "t4"),
    *("rtx-4090", "rtx-pro-6000", "ascend-910b", "tpu-v5p", "gaudi3"),
)

WORLD_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 16, 17, 20, 24, 30, 32, 36, 40, 48, 60, 63, 64, 96, 128)

BATCHES = (1, 2, 3, 4, 6, 7, 8, 12, 16, 20, 30, 32, 48, 60, 64, 96, 100, 120, 128, 200, 256, 360, 512, 1000)

PINS = (
    *("schedule=zbv", "schedule=interleaved", "schedule=1f1b", "recompute=none", "recompute=full", "mbs=1"),
    *("mbs=2..5", "zero=3", "zero=1", "cp=1", "tp=1", "pp=1", "pp=2..", "tp=2..4", "recompute=selective"),
)

PINNED = 0.25
"""Share of the questions that pin something."""

OTHER_ENGINE = 0.3
"""Share of the questions that name an engine."""

BETTER = 1e-3
"""Smallest relative lead with which a layout is listed."""

BEATEN = 0.02
"""Smallest relative lead with which a layout counts as better than the first plan."""

LAYOUTS = 3000
"""Layouts that are drawn for a question."""


@dataclass(frozen=True)
class Question:
    """The arguments of one search."""

    model: str
    device: str
    world_size: int
    local_world_size: int
    batch: int
    maximum: bool
    engine: str = DEFAULT_ENGINE
    pin: tuple[str, ...] = ()
    memory_margin_gib: float | None = None

    def keywords(self) -> dict[str, Any]:
        """The keywords of `planner.search`."""
        size = f"{'max_' if self.maximum else ''}global_batch_size"
        given: dict[str, Any] = {
            name: getattr(self, name) for name in ("world_size", "local_world_size", "device", "engine")
        }
        if self.memory_margin_gib is not None:
            given["memory_margin_gib"] = self.memory_margin_gib
        return {**given, size: self.batch, "pin": list(self.pin)}

    def __str__(self) -> str:
        words = [f"{self.model}, {self.world_size} x {self.device} (nodes of {self.local_world_size})"]
        words.append(f"{'at most ' if self.maximum else ''}{self.batch} sequences")
        words += [f"engine {self.engine}"] * (self.engine != DEFAULT_ENGINE)
        words += [f"pin {each}" for each in self.pin]
        words += [f"margin {self.memory_margin_gib} GiB"] * (self.memory_margin_gib is not None)
        return ", ".join(words)


@dataclass(frozen=True)
class Answer:
    """The answer of a search, and the best of the layouts that were drawn."""

    question: Question
    first: str | None
    """The first plan; None where nothing fits."""
    tokens_per_s: float
    drawn: int
    """Layouts that are legal and fit."""
    better: str | None = None
    """A layout that beats the first plan."""
    lead: float = 0.0
    """The best layout's lead as a share of the first plan's tokens/s; infinite where nothing fits."""


def ask(rng: random.Random) -> Question:
    """Draw a random question."""
    device = rng.choice(DEVICES)
    kind = load_device(device).kind
    engines = [name for name in engine_names() if kind in load_engine(name).runs.devices]
    engine = rng.choice(engines) if engines and rng.random() < OTHER_ENGINE else DEFAULT_ENGINE
    if engines and DEFAULT_ENGINE not in engines:
        engine = rng.choice(engines)
    world = rng.choice(WORLD_SIZES)
    local = max(each for each in divisors(world) if each <= rng.choice((4, 8, 16)))
    pins = (rng.choice(PINS),) if rng.random() < PINNED else ()
    margin = rng.choice((None, None, None, 0.0, 6.0))
    asked = rng.choice(MODELS), device, world, local, rng.choice(BATCHES), rng.random() < 0.5
    return Question(*asked, engine=engine, pin=pins, memory_margin_gib=margin)


def draws(problem: Problem, best: Layout | None, offloads: bool, rng: random.Random) -> Iterator[Layout]:
    """Endless random layouts whose degrees are consistent; half of them are neighbours of `best`."""
    while True:
        start = None if best is None or rng.random() < 0.5 else best
        values = _degrees(problem, start, offloads, rng)
        try:
            yield Layout(**values)
        except (ValidationError, InputError):
            continue


def _degrees(problem: Problem, near: Layout | None, offloads: bool, rng: random.Random) -> dict[str, Any]:
    """Random degrees of a layout; if a layout is given, its degrees with one to three of them changed."""
    model, world = problem.model, problem.cluster.world_size
    values: dict[str, Any] = {} if near is None else near.model_dump()
    groups = ("mesh", "chunks", "batch", "sequence", "recompute", "zero", "experts", "split", "offload")
    wanted = groups if near is None else rng.sample(groups, rng.randint(1, 3))
    if "mesh" in wanted:
        values |= _mesh(world, rng)
    pipeline = values["pipeline_parallel"]
    if "chunks" in wanted or "mesh" in wanted:
        most = max(1, model.layers // pipeline)
        values["schedule"] = rng.choice(SCHEDULES) if pipeline > 1 else "1f1b"
        values["virtual_pipeline_parallel"] = {"1f1b": 1, "zbv": 2, "dualpipev": 2}.get(
            values["schedule"], rng.randint(2, max(2, most))
        )
    stages = pipeline * values["virtual_pipeline_parallel"]
    if {"chunks", "mesh", "split"} & set(wanted) and stages <= model.layers:
        values["layers_per_stage"] = _split(
            model.layers, stages, "split" in wanted and rng.random() < 0.5, rng
        )
    if "batch" in wanted or "mesh" in wanted:
        values |= _batch(problem, values, rng)
    if "sequence" in wanted:
        values["sequence_parallel"] = values["tensor_parallel"] > 1 and rng.random() < 0.7
    if "zero" in wanted or "mesh" in wanted:
        replicas = values["data_parallel"] * values["context_parallel"]
        values["zero_stage"] = rng.randint(0, 3) if replicas > 1 else 0
        copies = replicas > 3 and values["zero_stage"] and rng.random() < 0.2
        values["zero_replicas"] = rng.choice(divisors(replicas)[:-1]) if copies else 1
    if model.experts and ("experts" in wanted or "mesh" in wanted):
        values["expert_parallel"] = rng.choice(divisors(model.experts))
        values["expert_tensor_parallel"] = rng.choice((1, values["tensor_parallel"]))
    if "recompute" in wanted:
        values |= _recompute(max(values.get("layers_per_stage", (1,))), rng)
    if offloads and "offload" in wanted:
        values["offload_activations"], values["offload_optimizer"] = rng.random() < 0.5, rng.random() < 0.5
    return values | {"precision": problem.precision}


def _mesh(world: int, rng: random.Random) -> dict[str, Any]:
    """Degrees of tensor, pipeline, context and data parallelism of `world` devices, and their forms."""
    rest, sizes = world, {}
    for name in rng.sample(("tensor_parallel", "pipeline_parallel", "context_parallel"), 3):
        sizes[name] = rng.choice([1, *divisors(rest)])
        rest //= sizes[name]
    form = rng.choice(CONTEXT_FORMS) if sizes["context_parallel"] > 1 else CONTEXT_FORMS[0]
    splits = sizes["tensor_parallel"] > 1 and rng.random() < 0.7
    forms = {"context_parallel_form": form, "sequence_parallel": splits}
    return {**sizes, "data_parallel": rest, **forms}


def _split(layers: int, stages: int, uneven: bool, rng: random.Random) -> tuple[int, ...]:
    """Layers of each stage: an even split, or one with one to three layers moved."""
    split = list(even_split(layers, stages))
    for _ in range(rng.randint(1, 3) if uneven else 0):
        source, target = rng.randrange(stages), rng.randrange(stages)
        if split[source] > 1:
            split[source], split[target] = split[source] - 1, split[target] + 1
    return tuple(split)


def _batch(problem: Problem, values: Mapping[str, Any], rng: random.Random) -> dict[str, int]:
    """Sequences of a microbatch and of a step, for the degrees in `values`."""
    replicas, pipeline = values["data_parallel"], values["pipeline_parallel"]
    own = max(1, problem.batch.size // replicas)
    if problem.batch.maximum:
        micro = min(own, rng.randint(1, rng.choice((2, 4, 8, 16, own))))
        most = max(1, own // micro)
        count = most if rng.random() < 0.7 else rng.randint(1, most)
        if values["schedule"].startswith("interleaved") and count > pipeline:
            count = count // pipeline * pipeline
    else:
        micro = rng.choice(divisors(own))
        count = own // micro
    return {"micro_batch_size": micro, "global_batch_size": micro * count * replicas}


def _recompute(deepest: int, rng: random.Random) -> dict[str, Any]:
    """Recomputation of all layers or of up to `deepest` ones of each stage."""
    kind = rng.choice(("none", "selective", "selective", "full"))
    some = rng.sample(RECOMPUTE_MODULES, rng.randint(1, len(RECOMPUTE_MODULES)))
    block = kind != "none" and rng.random() < 0.5
    return {
        "recompute": kind,
        "recompute_modules": tuple(some) if kind == "selective" else (),
        "recompute_method": "block" if block else "uniform",
        "recompute_num_layers": rng.randint(1, deepest) if block else 1,
    }


def legal(problem: Problem, table: LayoutTable) -> Any:
    """Mask of the rows that agree with the pins and break no rule, [n]. Rules that only remove layouts known
    to be no better do not count."""
    good = np.ones(len(table), dtype=np.bool_)
    for rule in (*RULES, *problem.further):
        if not rule.redundant:
            good &= ~np.broadcast_to(rule.broken(problem.model, table), good.shape)
    device = problem.cluster.device
    if device.kind != "cpu":
        good &= (
            host_bytes(problem.model, problem.engine.for_device(device), table) <= device.host_memory_bytes
        )
    if problem.engine.runs.stages_alike:
        # Other splits are lists of modules, which no flag of torchtitan takes.
        layouts = map(table.layout, range(len(table)))
        good &= [less_layers(d.layers_per_stage, d.virtual_pipeline_parallel) is not None for d in layouts]
    size = table.global_batch_size
    good &= size <= problem.batch.size if problem.batch.maximum else size == problem.batch.size
    for name, pin in problem.pins.items():
        values = [value_of(name, code) for code in getattr(table, name).tolist()]
        good &= [value in pin if isinstance(pin, Choice) else value == pin for value in values]
    if problem.pins.get("recompute") == "full" and "recompute_method" not in problem.pins:
        # The pin stands for all layers, one by one.
        good &= (table.recompute_method == UNIFORM) & (table.recompute_num_layers == 1)
    if problem.pins.get("recompute") == "selective" and "recompute_modules" not in problem.pins:
        # The pin stands for the modules that answers write in these words: core attention of all layers.
        good &= (table.recompute_modules == CORE_ATTENTION) & (table.recompute_method == UNIFORM)
    return good


def beat(question: Question, count: int, rng: random.Random) -> Answer | None:
    """The answer to a question and the best of `count` layouts; None where the question is refused."""
    asked = question.keywords()
    try:
        problem = resolve_problem(question.model, **asked)
        result = planner.search(question.model, prefer="fastest", **asked)
    except InputError:
        return None
    best = result.best
    speed = 0.0 if best is None else best.estimate.tokens_per_s
    first = None if best is None else best.layout
    offloads = best is None or result.offloads
    stream = draws(problem, first or result.closest()[0].layout, offloads, rng)
    table = LayoutTable.of([next(stream) for _ in range(count)])
    table = table.take(legal(problem, table))
    known = Answer(question, None if first is None else first.describe(), speed, len(table))
    if not len(table):
        return known
    where = problem.model, problem.cluster, problem.engine
    # Closed forms are near enough to tell which layouts are worth an estimate of their own.
    near = peak_memory(*where, table) <= 1.2 * problem.cluster.memory_bytes
    table = table.take(near)
    speeds = price(*where, table).tokens_per_s
    rivals = np.argsort(-speeds)[:40]
    for row in rivals[speeds[rivals] > 0.9 * speed].tolist():
        lead = _lead(question, result, table.layout(row), speed)
        if lead > max(known.lead, BETTER):
            known = Answer(question, known.first, speed, len(table), _words(table.layout(row), problem), lead)
    return known


def _words(layout: Layout, problem: Problem) -> str:
    split = layout.layers_per_stage
    uneven = split != even_split(problem.model.layers, len(split))
    return f"{layout.describe()} {split}" if uneven else layout.describe()


def _lead(question: Question, result: SearchResult, layout: Layout, speed: float) -> float:
    """The share by which a layout is faster than the first plan; below 0 where it does not fit."""
    given = question.keywords()
    names = ("local_world_size", "device", "engine", "memory_margin_gib")
    where = {name: given[name] for name in names if name in given}
    estimate = planner.evaluate(layout, model=question.model, **where)
    if estimate.peak_memory_bytes > result.problem.cluster.memory_bytes:
        return -1.0
    return estimate.tokens_per_s / speed - 1 if speed else float("inf")


def main(arguments: Sequence[str] | None = None) -> int:
    """Ask, draw and print; the exit code is 1 where a first plan was beaten."""
    parser = argparse.ArgumentParser(description="Hold first plans against random legal layouts.")
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--only", type=int, nargs="+", metavar="NUMBER", help="questions to ask, by number")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layouts", type=int, default=LAYOUTS, help="drawn for each question")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    started, answers = time.perf_counter(), []
    numbers = given.only or range(given.questions)
    for number in numbers:
        rng = random.Random(f"{given.seed}/{number}")
        answer = beat(ask(rng), given.layouts, rng)
        if answer is None:
            continue
        answers.append(answer)
        if answer.better is not None and not given.json:
            print(
                f"#{number} {answer.question}\n  first  {answer.first}, {answer.tokens_per_s:,.0f} tokens/s"
            )
            print(f"  behind {answer.better}, {100 * answer.lead:+.1f} %", flush=True)
    ahead = [answer for answer in answers if answer.better is not None]
    beaten = [answer for answer in ahead if answer.lead > BEATEN]
    if given.json:
        print(
            json.dumps(
                [{"question": str(each.question), "lead": each.lead, "better": each.better} for each in ahead]
            )
        )
    else:
        layouts = sum(answer.drawn for answer in answers)
        unanswered = sum(answer.first is None for answer in answers)
        print(
            f"{len(numbers)} questions, seed {given.seed}: {len(numbers) - len(answers)} have no legal "
            f"layout, {unanswered} none that fits; of {len(answers)} answers {len(beaten)} were beaten by "
            f"more than {BEATEN:.0%} and {len(ahead) - len(beaten)} by {BETTER:.1%} to {BEATEN:.0%} "
            f"by one of {layouts:,} legal layouts ({time.perf_counter() - started:.0f} s)"
        )
    return 1 if beaten else 0


if __name__ == "__main__":
    sys.exit(main())
