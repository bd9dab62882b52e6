"""Pasted training commands: flags of Megatron-LM's internals are set aside, and no others."""

import pytest

from planner.formats.facts.flag_catalogue import KnownFlag
from planner.formats.pasted import PastedCommand, PlanningCommand, sort_words

FOLLOWING = {"--global-batch-size": 1, "--bf16": 0, "--train-iters": 1}


def _sets_aside(kind: type[PastedCommand]):
    command = kind("command")

    def decide(flag: KnownFlag) -> bool:
        return command.sets_aside(flag)

    return decide


def test_internals_go_with_their_values():
    words = ["--bf16", "--wandb-project", "mine", "--no-load-rng", "--global-batch-size", "8"]
    found = sort_words(words, FOLLOWING, _sets_aside(PastedCommand))
    assert found.words == ["--bf16", "--global-batch-size", "8"]
    assert found.aside == ["--wandb-project", "--no-load-rng"]


@pytest.mark.parametrize(
    "words",
    (
        ["--no-load-optim"],
        ["--no-save-optim"],
        ["--window-size", "1", "0"],
        ["--fp8-format", "hybrid"],
        ["--nonsense", "3"],
    ),
)
def test_what_changes_a_result_stays_for_the_command_to_refuse(words):
    assert sort_words(words, FOLLOWING, _sets_aside(PastedCommand)).words == words


def test_planning_needs_nothing_of_what_is_learned():
    words = ["--lr", "1e-4", "--no-load-optim", "--bf16"]
    found = sort_words(words, FOLLOWING, _sets_aside(PlanningCommand), turns_samples=False)
    assert found.words == ["--bf16"]
    assert found.aside == ["--lr", "--no-load-optim"]


def test_samples_are_steps_of_the_batch():
    words = ["--train-samples", "1000", "--global-batch-size", "8"]
    found = sort_words(words, FOLLOWING, _sets_aside(PastedCommand))
    assert found.words == ["--train-iters", "125", "--global-batch-size", "8"]
    assert found.turned == ["--train-samples 1000 is --train-iters 125 of 8 sequences"]


def test_samples_without_a_batch_are_not_guessed():
    words = ["--train-samples=1000"]
    assert sort_words(words, FOLLOWING, _sets_aside(PastedCommand)).words == words


def test_a_value_that_looks_like_a_flag_stays_with_its_own():
    words = ["--global-batch-size", "--wandb-project", "--", "--wandb-project"]
    assert sort_words(words, FOLLOWING, _sets_aside(PastedCommand)).words == words
