"""Sizes that tapes are recorded with: they have the structure that is wanted, and tell dimensions apart."""

from __future__ import annotations

import random

import pytest

from costmodels.tapes.player import is_playable
from costmodels.tapes.player.stage_units import structures_of_stage
from costmodels.tapes.structure import Structure
from runtime.dryrun import sample_sizes
from runtime.dryrun.loops import FEWEST_TURNS
from runtime.dryrun.prime_sizes import SAMPLES
from runtime.dryrun.sample_sizes import MOST_RANKS, sample
from runtime.dryrun.tape_recorder import MOST_BYTES, PROOF, score_bytes
from runtime.model.attention_kernels import FLASH_HEAD_SIZE
from tests.support.played_memory import draw

EXAMPLES = 250


def structures(seed: int) -> set[Structure]:
    """Those of random models and layouts."""
    chosen, found, count = random.Random(seed), set[Structure](), 0
    while count < EXAMPLES:
        example = draw(chosen.choice)
        if example is None or not is_playable(example.model, example.layout, example.compiled):
            continue
        model, layout, _, compiled = example
        count += 1
        for stage in range(len(layout.layers_per_stage)):
            for wanted in structures_of_stage(model, layout, stage, compiled):
                found |= {one for one in (wanted.structure, wanted.plain) if one is not None}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1))
def test_there_are_two_samples_of_every_structure_whose_dimensions_differ(seed: int) -> None:
    for structure in structures(seed):
        first, second = (sample(structure, number) for number in range(2))
        alike = [name for name in first.primes if first.primes[name] == second.primes.get(name)]
        assert not {*alike} - {"cp", "etp"}, (structure.name, alike)
        for one in (first, second):
            own = [prime for name, prime in one.primes.items() if name not in ("sent", "arrived")]
            assert len(own) == len(set(own)), (structure.name, one.primes)


EXPERTS = Structure(
    "experts",
    "fp32",
    tensor_parallel=True,
    norm="layernorm",
    unfused=True,
    loop_of_experts=8,
    score="softmax",
)

HEAD = Structure("head", "fp32", several=True, norm="rmsnorm", unfused=True, further=1, chunks=1)

FLOAT8_LATENT = Structure(
    "dense", "fp8", norm="rmsnorm", latent=True, longer_heads="keys", context_form="all_gather"
)


LINEAR = Structure("dense", "bf16", norm="rmsnorm", grouped_queries=True, form=("attention=linear",))

STEPS_OF_EXPERTS = EXPERTS._replace(
    precision="bf16",
    unfused=False,
    grouped_queries=True,
    expert_parallel=True,
    expert_tensor_parallel=True,
    expert_ranks=2,
    loop_choices=(1, 1, 1),
    one_choice=True,
    limited="part",
    form=("attention=linear",),
)

CAPPED = Structure("dense", "bf16", norm="rmsnorm", form=("attention=window", "attention_softcap"))


@pytest.mark.parametrize(
    "structure",
    [
        # No prime number of rows is divided evenly for limits of few digits.
        EXPERTS._replace(expert_parallel=True, loop_choices=(1, 1, 1), one_choice=True, limited="part"),
        EXPERTS._replace(expert_parallel=True, loop_choices=(1, 1, 1), one_choice=True, limited="full"),
        EXPERTS._replace(loop_choices=(1, 1, 1), one_choice=True, limited="part", several=True),
        # The same of sequences that are a number of steps, the last of them whole or not.
        STEPS_OF_EXPERTS,
        STEPS_OF_EXPERTS._replace(partial_step=True),
        STEPS_OF_EXPERTS._replace(partial_step=True, few_steps=2, expert_parallel=False, expert_ranks=1),
        # So many rows that the loss of layers alone would be in more chunks.
        HEAD._replace(
            further_experts=True,
            loop_of_experts=8,
            loop_choices=(1, 1, 1),
            one_choice=True,
            score="softmax",
        ),
        HEAD._replace(context_form="all_gather", chunks=2),
        Structure("dense", "fp8", tensor_parallel=True, norm="rmsnorm", shares_heads=True),
        # Heads of linear attention whose number is one that products in 8 bits take, and one that is not.
        LINEAR._replace(precision="fp8", tensor_parallel=True),
        LINEAR._replace(precision="fp8", partial_step=True, odd_heads=True),
        # As many steps as there are to be.
        LINEAR._replace(few_steps=3),
        LINEAR._replace(few_steps=1, partial_step=True),
        # The last block of queries is smaller, of the one part of a sequence or of both.
        CAPPED._replace(partial_step=True),
        CAPPED._replace(partial_step=True, tensor_parallel=True, context_form="all_gather"),
        CAPPED._replace(partial_step=True, context_form="all_gather", short_window=True),
        CAPPED._replace(partial_step=True, precision="fp8", sequence_parallel=True, tensor_parallel=True),
        CAPPED._replace(partial_step=True, precision="fp8", context_form="all_to_all", odd_rows=True),
        Structure("dense", "fp8", norm="rmsnorm", context_form="all_gather", odd_rows=True),
        # All queries in a block, and all tokens on ranks that repeat key heads.
        CAPPED._replace(few_steps=1),
        CAPPED._replace(
            grouped_queries=True, one_key_head=True, context_form="all_to_all", repeats_heads=True
        ),
        FLOAT8_LATENT,
        FLOAT8_LATENT._replace(longer_heads="values", tensor_parallel=True),
    ],
    ids=[
        *("part", "full", "part-of-one-rank", "part-of-steps", "part-of-partial-steps", "part-of-few-steps"),
        *("chunks-of-experts", "chunks-of-parts", "fp8-shared-heads"),
        *("fp8-heads", "fp8-odd-heads", "three-steps", "part-of-a-step"),
        *("smaller-block", "smaller-blocks", "short-window", "fp8-smaller-block"),
        *("fp8-filled-block", "fp8-filled-rows"),
        *("one-block", "repeated-keys", "fp8-keys", "fp8-values"),
    ],
)
def test_a_structure_with_narrow_demands_has_samples(structure: Structure) -> None:
    every = [sample(structure, number).dimensions for number in range(SAMPLES)]
    assert len({own["seq"] for own in every}) == SAMPLES
    if structure.loop_of_experts:
        # Experts have equal numbers of rows.
        rows = [own["arrived"] * (own["etp"] if structure.expert_parallel else 1) for own in every]
        assert not any(count % structure.loop_of_experts for count in rows)


MANY_SCORES = EXPERTS._replace(several=True, grouped_queries=True, loop_choices=(4, 1, 1))


@pytest.mark.parametrize(
    "structure",
    [
        MANY_SCORES._replace(
            one_key_head=True,
            context_form="all_to_all",
            repeats_heads=True,
            expert_parallel=True,
            form=("attention=window",),
        ),
        MANY_SCORES._replace(
            tensor_parallel=False, context_form="all_to_all", loop_of_experts=16, form=("attention=window",)
        ),
        # A block of queries at a time.
        MANY_SCORES._replace(
            tensor_parallel=False,
            context_form="all_gather",
            expert_parallel=True,
            loop_of_experts=2,
            limited="full",
            form=CAPPED.form,
        ),
    ],
    ids=["repeated-keys", "exchanged-heads", "blocks"],
)
def test_scores_can_be_counted(structure: Structure) -> None:
    for number in range(SAMPLES):
        assert score_bytes(sample(structure, number)) < MOST_BYTES


def test_enough_samples_have_scores_that_can_be_counted_where_they_are_those_of_steps() -> None:
    """Experts have equal numbers of rows then, and each step is long."""
    structure = MANY_SCORES._replace(
        unfused=False,
        several=True,
        expert_parallel=True,
        loop_of_experts=8,
        loop_choices=(2, 1, 1),
        limited="part",
        partial_step=True,
        form=("attention=linear",),
    )
    sizes = [score_bytes(sample(structure, number)) for number in range(SAMPLES)]
    assert sum(size < MOST_BYTES for size in sizes) >= PROOF


@pytest.mark.parametrize("longer", ["keys", "values", ""])
def test_latent_heads_in_eight_bits_are_of_the_kernel_that_models_have(longer: str) -> None:
    sums = set[int]()
    for number in range(2):
        sizes = sample(FLOAT8_LATENT._replace(longer_heads=longer), number).model.latent_attention
        assert sizes is not None
        keys = sizes.qk_nope_head_dim + sizes.qk_rope_head_dim
        assert max(keys, sizes.v_head_dim) <= FLASH_HEAD_SIZE
        sums.add(keys)
    # Equal ones would look like a constant.
    assert len(sums) == 2


@pytest.mark.parametrize("number", range(4))
def test_sinks_of_repeated_heads_take_enough_turns_to_be_a_loop(number: int) -> None:
    structure = Structure(
        "dense",
        "fp32",
        norm="rmsnorm",
        grouped_queries=True,
        one_head=True,
        one_key_head=True,
        unfused=True,
        context_form="all_to_all",
        repeats_heads=True,
        form=("attention_sinks",),
    )
    assert sample(structure, number).layout.context_parallel >= FEWEST_TURNS


REPEATED = Structure(
    "experts",
    "bf16",
    tensor_parallel=True,
    norm="layernorm",
    grouped_queries=True,
    one_key_head=True,
    context_form="all_to_all",
    repeats_heads=True,
    expert_parallel=True,
    loop_of_experts=2,
    loop_choices=(1, 2, 1),
    score="softmax",
    group_score="top2",
    one_choice=True,
)


@pytest.mark.parametrize(
    "structure",
    [
        REPEATED._replace(shares_heads=True),
        REPEATED._replace(expert_tensor_parallel=True, expert_ranks=2),
    ],
    ids=["shared", "several-ranks"],
)
def test_enough_samples_have_ranks_that_can_be_grouped_where_these_repeat_heads(structure: Structure) -> None:
    for number in range(SAMPLES):
        assert sample(structure, number).layout.world_size < MOST_RANKS // 2


def test_a_sample_of_more_ranks_than_can_be_grouped_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_sizes, "MOST_RANKS", 1000)
    with pytest.raises(ValueError, match=r"need [0-9]+ ranks"):
        sample(REPEATED, 0)
