"""Training under layouts against that of one rank: `python -m benchmarks.parity --layout tp=2,pp=2`.

Losses, gradient norms and final weights are compared, over steps in which an error shows: the tokens can be
learnt, the rate is large, weights decay, and gradients are clipped.
"""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import typer

from benchmarks.worker_pool import WorkerPool
from costmodels import SHORT_NAMES, LatentAttention, Layout, ModelSpec, RopeScaling, Router, even_split
from costmodels.errors import InputError
from costmodels.spec.layout import V_SCHEDULES
from planner.options.flags import run
from runtime.settings.preflight import check_job

if TYPE_CHECKING:
    from runtime.train.trainer import Trainer

LLAMA = ModelSpec(
    name="parity-llama",
    layers=4,
    hidden=64,
    heads=8,
    kv_heads=4,
    ffn=176,
    vocab=250,
    seq=32,
    gated=True,
    activation="silu",
    norm="rmsnorm",
    position="rope",
    tied=False,
    linear_bias=False,
)

MODELS = {
    "gpt2": ModelSpec(
        name="parity-gpt2", layers=4, hidden=64, heads=4, vocab=250, seq=32, activation="gelu_tanh"
    ),
    "llama": LLAMA,
    "mixtral": LLAMA.model_copy(
        update={"name": "parity-mixtral", "experts": 4, "top_k": 2, "expert_ffn": 96}
    ),
    "qwen": LLAMA.model_copy(
        update={
            "name": "parity-qwen",
            "qkv_bias": True,
            "qk_norm": True,
            "head_dim": 16,
            "experts": 8,
            "top_k": 3,
            "expert_ffn": 32,
            "shared_expert_ffn": 64,
            "shared_expert_gate": True,
            "router": Router(normalised=False),
        }
    ),
    "deepseek": LLAMA.model_copy(
        update={
            "name": "parity-deepseek",
            "heads": 4,
            "kv_heads": 4,
            "head_dim": 24,
            "rope_scaling": RopeScaling(
                kind="yarn", factor=4.0, original_positions=8, mscale=1.0, mscale_all_dim=0.7
            ),
            "latent_attention": LatentAttention(
                q_lora_rank=32, kv_lora_rank=24, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12
            ),
            "experts": 8,
            "top_k": 2,
            "expert_ffn": 32,
            "shared_expert_ffn": 32,
            "dense_layers": 1,
            "router": Router(
                score="sigmoid", scale=2.5, groups=4, top_groups=2, group_score="top2", expert_bias=True
            ),
        }
    ),
}
"""Small models with every kind of layer; their vocabularies need padding."""

ROUTING: dict[str, Any] = {
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 1e-2,
    "moe_z_loss_coeff": 1e-3,
    "moe_router_bias_update_rate": 1e-2,
}
"""Options of routing, so that parity covers what they do; other kinds of balancing look at micro batches."""

BITING: dict[str, Any] = {
    "lr": 5e-3,
    "lr_decay_style": "constant",
    "weight_decay": 0.3,
    "clip_grad": 0.5,
    "adam_eps": 1e-3,
}
"""Options under which errors show. Adam divides out a wrong factor of all gradients, so that losses may hide
it: gradient norms show it, and so does an epsilon as large as small gradients are."""

COUNTS = (
    "tensor_parallel",
    "pipeline_parallel",
    "virtual_pipeline_parallel",
    "context_parallel",
    "expert_parallel",
    "expert_tensor_parallel",
    "data_parallel",
    "micro_batch_size",
)

LISTS = ("layers_per_stage", "recompute_modules")
"""Fields whose values are separated by semicolons."""

NAMES = [*SHORT_NAMES, *(name for name in Layout.model_fields if name not in SHORT_NAMES.values())]
"""What a layout's text may name."""

GLOBAL_BATCH_SIZE = 8
SEED = 1234


def parse_layout(text: str, spec: ModelSpec) -> Layout:
    """A layout from `tp=2,pp=2`-style text; what is not said is 1, 0 or the even split.

    A schedule of several chunks means two pipeline ranks of two chunks, and the batch is the least from 8
    sequences on that the schedule runs, unless other numbers are given. Data-parallel ranks are as many as
    the experts need besides the others.
    """
    fields = _fields(text)
    fields.setdefault("layers_per_stage", even_split(spec.layers, _stages(fields)))
    return Layout.model_validate(fields)


def deep_enough(text: str, spec: ModelSpec) -> ModelSpec:
    """`spec`, with a layer for each stage of the layout that `text` describes."""
    return spec.model_copy(update={"layers": max(spec.layers, _stages(_fields(text)))})


def _fields(text: str) -> dict[str, Any]:
    fields: dict[str, Any] = {"precision": "fp32"}
    for item in filter(None, text.split(",")):
        name, _, value = item.partition("=")
        name = SHORT_NAMES.get(name, name)
        if name not in Layout.model_fields or not value:
            raise InputError(f"--layout {text}: {item!r} is not name=value with a name of {', '.join(NAMES)}")
        if name in COUNTS and not (value.isdigit() and int(value)):
            raise InputError(f"--layout {text}: {item!r} is not a whole number of at least 1")
        fields[name] = value.split(";") if name in LISTS else int(value) if value.isdigit() else value
    if fields.get("schedule", "1f1b") != "1f1b":
        fields.setdefault("virtual_pipeline_parallel", 2)
    chunks = fields.get("virtual_pipeline_parallel", 1)
    if chunks != 1:
        fields.setdefault("pipeline_parallel", 2)
    fields.setdefault("schedule", "interleaved" if chunks > 1 else "1f1b")
    holders = fields.get("expert_parallel", 1) * fields.get("expert_tensor_parallel", 1)
    group = fields.get("tensor_parallel", 1) * fields.get("context_parallel", 1)
    fields.setdefault("data_parallel", holders // math.gcd(holders, group))
    fields.setdefault("global_batch_size", _least_batch(fields))
    return fields


def _stages(fields: dict[str, Any]) -> int:
    stages: int = fields.get("pipeline_parallel", 1) * fields.get("virtual_pipeline_parallel", 1)
    return stages


def _least_batch(fields: dict[str, Any]) -> int:
    """Sequences of one step: a micro batch for each rank and stage that needs one, and at least 8."""
    of_ranks: int = fields.get("micro_batch_size", 1) * fields.get("data_parallel", 1)
    ranks = fields.get("pipeline_parallel", 1)
    once = of_ranks * (ranks if fields["schedule"].startswith("interleaved") else 1)
    least = of_ranks * (2 * ranks if fields["schedule"] in V_SCHEDULES else ranks)
    batch: int = -(-max(least, GLOBAL_BATCH_SIZE) // once) * once
    return batch


def losses_of(spec: ModelSpec, layout: Layout, steps: int, compiled: bool = False) -> list[float]:
    """Losses of `steps` training steps on random tokens; runs on every rank of a process group."""
    import torch

    from runtime.settings.options import TrainingOptions
    from runtime.train.trainer import Trainer

    options = TrainingOptions(train_iters=steps, lr=1e-3, seed=SEED, compile=compiled, **ROUTING)
    trainer = Trainer(spec, layout, options, torch.device("cpu"))
    tokens = np.random.RandomState(SEED)
    losses = []
    for _ in range(steps):
        batch = tokens.randint(0, spec.vocab, (layout.global_batch_size, spec.seq + 1)).astype(np.int64)
        losses.append(float(trainer.train_step(batch[trainer.rows]).loss))
    return losses


def relative_difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Largest relative difference of two loss curves."""
    # Not max(), which may overlook a NaN.
    return float(np.max(np.abs(np.subtract(losses, reference)) / np.abs(reference)))


class Training(NamedTuple):
    """What a rank has seen of a short training."""

    losses: list[float]
    norms: list[float]
    """Of the gradient, before it is clipped."""
    weights: dict[str, npt.NDArray[np.float32]]
    """After the last step: those of this rank, whole."""


class Difference(NamedTuple):
    """Largest relative differences of two trainings."""

    losses: float
    norms: float
    weights: float
    """Norm of a tensor's difference, over the norm of the tensor."""

    @property
    def largest(self) -> float:
        """Of all three; NaN where one is."""
        return float(np.max(self))


def trained(spec: ModelSpec, layout: Layout, steps: int, compiled: bool = False) -> Training:
    """Train `steps` steps on tokens that can be learnt; runs on every rank of a process group."""
    import torch

    from runtime.settings.options import TrainingOptions
    from runtime.train.trainer import Trainer

    options = TrainingOptions(train_iters=steps, seed=SEED, compile=compiled, **BITING, **ROUTING)
    trainer = Trainer(spec, layout, options, torch.device("cpu"))
    random, losses, norms = np.random.RandomState(SEED), [], []
    for _ in range(steps):
        result = trainer.train_step(learnable(spec, layout.global_batch_size, random)[trainer.rows])
        losses.append(float(result.loss))
        norms.append(float(result.grad_norm))
    return Training(losses, norms, _whole_weights(trainer))


def learnable(spec: ModelSpec, batch: int, random: np.random.RandomState) -> npt.NDArray[np.int64]:
    """Sequences of which each token follows from the one before, but for one in eight: [batch, S + 1]."""
    follows = np.random.RandomState(SEED).permutation(spec.vocab)
    drawn = random.randint(0, spec.vocab, (batch, spec.seq + 1))
    surprises = random.rand(batch, spec.seq + 1) < 1 / 8
    for position in range(1, spec.seq + 1):
        after = follows[drawn[:, position - 1]]
        drawn[:, position] = np.where(surprises[:, position], drawn[:, position], after)
    return drawn.astype(np.int64)


def _whole_weights(trainer: Trainer) -> dict[str, npt.NDArray[np.float32]]:
    from torch.distributed.tensor import DTensor

    # It warns of each gather that takes two steps, which is how they are made whole here.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    whole = {}
    for owned in trainer.optimizer.owned:
        weight = owned.parameter.detach()
        full = weight.full_tensor() if isinstance(weight, DTensor) else weight
        whole[owned.name] = full.float().cpu().numpy().copy()
    return whole


def difference(by_rank: Sequence[Training], alone: Training) -> Difference:
    """How far the training of a layout's ranks is from that of one rank."""
    weights = [0.0]
    for rank in by_rank:
        for name, found in rank.weights.items():
            # A tied head is the embedding, and vocabularies are padded for tensor parallelism.
            known = name if name in alone.weights else "embedding.tokens.weight"
            # Key biases, which a softmax cancels, move by rounding alone.
            scale = np.linalg.norm(alone.weights[known.replace("key.bias", "query.bias")])
            rows = min(len(found), len(alone.weights[known]))
            weights.append(float(np.linalg.norm(found[:rows] - alone.weights[known][:rows]) / scale))
    losses = [relative_difference(rank.losses, alone.losses) for rank in by_rank]
    norms = [relative_difference(rank.norms, alone.norms) for rank in by_rank]
    return Difference(*(float(np.max(kind)) for kind in (losses, norms, weights)))


app = typer.Typer(add_completion=False)


@app.command()
def parity(
    layout: Annotated[list[str], typer.Option(help="Layout such as tp=2,pp=2 (repeatable).")],
    model: Annotated[str, typer.Option(help=f"One of {', '.join(MODELS)}.")] = "gpt2",
    steps: Annotated[int, typer.Option(help="Training steps.")] = 20,
    compiled: Annotated[bool, typer.Option("--compile", help="Compile the layers of the layouts.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Train each layout and one rank on the same tokens; compare losses, gradient norms and weights."""
    if model not in MODELS:
        raise InputError(f"--model {model}: choose one of {', '.join(MODELS)}")
    if steps < 1:
        raise InputError(f"--steps {steps}: must be at least 1")
    spec = MODELS[model]
    jobs = {}
    for text in layout:
        deep = deep_enough(text, spec)
        jobs[text] = deep, parse_layout(text, deep)
        check_job(*jobs[text], jobs[text][1].world_size)
    pool = WorkerPool(max(one.world_size for _, one in jobs.values()))

    @cache
    def reference(layers: int, batch: int) -> Training:
        same = spec.model_copy(update={"layers": layers})
        alone: Training = pool.run(trained, 1, same, parse_layout(f"gbs={batch}", same), steps)[0]
        return alone

    results = {}
    for text, (deep, one) in jobs.items():
        by_rank = pool.run(trained, one.world_size, deep, one, steps, compiled)
        batch = one.global_batch_size
        alone = reference(deep.layers, batch)
        found = difference(by_rank, alone)
        results[text] = {
            "max_relative_difference": found.largest,
            "max_relative_differences": found._asdict(),
            "losses": by_rank[0].losses,
            "gradient_norms": by_rank[0].norms,
            "reference": alone.losses,
            "reference_gradient_norms": alone.norms,
        }
        if not as_json:
            of_each = (
                f"losses {found.losses:.1e}, gradient norms {found.norms:.1e}, weights {found.weights:.1e}"
            )
            print(
                f"{text}: largest relative difference {found.largest:.2e} over {steps} steps ({of_each})",
                flush=True,
            )
    if as_json:
        usual = reference(spec.layers, GLOBAL_BATCH_SIZE).losses
        json.dump({"model": model, "reference": usual, "layouts": results}, sys.stdout)
        print()


if __name__ == "__main__":
    run(app, "benchmarks.parity")
