"""Continue prompts, token by token.

Examples:
    >>> from runtime.generation.generator import Generator, Sampling
    >>> generator = Generator("checkpoints")  # doctest: +SKIP
    >>> print(generator.complete(["Once upon a time"], max_new_tokens=50)[0].text)  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from costmodels.errors import InputError
from runtime.generation.sampling import Sampling
from runtime.generation.stage import GeneratingStage, Split
from runtime.generation.text import Text, text_of
from runtime.huggingface.stored_model import ModelFiles, open_model

__all__ = ["Completion", "Generator", "Sampling", "Split"]

OnTokens = Callable[[list[int | None]], None]
"""Called with each row's next token; None for a row that has ended."""


class Completion(NamedTuple):
    """The text that continues one prompt."""

    prompt: str
    text: str
    """The generated text after the prompt."""
    tokens: list[int]
    """The completion's token ids, with the end-of-text id where it was reached."""
    ended: str
    """The reason of the end: `end` of the text, or `length`."""


class Generator:
    """A trained model that continues texts, on one device or as one rank of several.

    Args:
        model: a folder of checkpoints or of a Hugging Face model, or the result of `open_model`.
        dtype: number format of weights and activations.
        device: device of the computation.
        split: the split over ranks, in an initialised process group of that size; all ranks call the same
            methods.
        text: the tokenizer; the one beside the model when not given.

    Raises:
        InputError: no model, no tokenizer, or a model that cannot be split so.
    """

    def __init__(
        self,
        model: str | Path | ModelFiles,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        split: Split = Split(),  # noqa: B008
        text: Text | None = None,
    ) -> None:
        files = open_model(model) if isinstance(model, str | Path) else model
        self.text = text_of(files) if text is None else text
        self.stage = GeneratingStage(files, split, dtype, torch.device(device))

    def complete(
        self,
        prompts: Sequence[str],
        max_new_tokens: int = 100,
        sampling: Sampling = Sampling(),  # noqa: B008
        on_tokens: OnTokens | None = None,
        ignore_end: bool = False,
        cached: bool = True,
    ) -> list[Completion]:
        """Continue `prompts` together.

        Args:
            on_tokens: called with the tokens as they are generated.
            ignore_end: continue after the end of the text.
            cached: keep keys and values; without a cache, all tokens are computed again for each new one.
        """
        ids = [self.text.encode(prompt) for prompt in prompts]
        rows = self.continue_ids(ids, max_new_tokens, sampling, on_tokens, ignore_end, cached)
        ends = frozenset() if ignore_end else self.text.ends
        return [
            Completion(
                prompt,
                self.text.decode([token for token in row if token not in ends]),
                row,
                "end" if row[-1] in ends else "length",
            )
            for prompt, row in zip(prompts, rows, strict=True)
        ]

    def continue_ids(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int = 100,
        sampling: Sampling = Sampling(),  # noqa: B008
        on_tokens: OnTokens | None = None,
        ignore_end: bool = False,
        cached: bool = True,
    ) -> list[list[int]]:
        """Continue prompts of token ids; returns the ids that follow each prompt.

        Raises `InputError` for a prompt without tokens, an id that the model does not have, or texts longer
        than a learned table of positions.
        """
        self._check(prompts, max_new_tokens)
        ends = frozenset() if ignore_end else self.text.ends
        rows: list[list[int]] = [[] for _ in prompts]
        open_rows = set(range(len(rows)))
        generators = sampling.generators(len(rows))
        step = self._cached_step(prompts, max_new_tokens) if cached else self._plain_step(prompts)
        for _ in range(max_new_tokens):
            logits = step(rows)
            chosen = None if logits is None else sampling.choose(logits, generators)
            tokens: list[int] = self.stage.agree(chosen, len(rows)).tolist()
            for row, token in zip(rows, tokens, strict=True):
                # Rows that have ended go on unseen, in step with the others.
                row.append(token)
            if on_tokens is not None:
                on_tokens([token if row in open_rows else None for row, token in enumerate(tokens)])
            open_rows -= {row for row in open_rows if tokens[row] in ends}
            if not open_rows:
                break
        return [_up_to_end(row, ends) for row in rows]

    def _check(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        spec = self.stage.spec
        for prompt in prompts:
            if not prompt:
                raise InputError("a prompt without tokens: give at least one")
            if not 0 <= min(prompt) <= max(prompt) < spec.vocab:
                raise InputError(
                    f"token {max(prompt)} of a prompt: the model's vocabulary holds {spec.vocab}; give the "
                    "tokenizer that it was trained with"
                )
            length = len(prompt) + max_new_tokens
            if spec.position == "learned" and length > spec.max_positions:
                raise InputError(
                    f"a prompt of {len(prompt)} tokens and --max-new-tokens {max_new_tokens}: the model has "
                    f"{spec.max_positions} positions; give at most "
                    f"{max(0, spec.max_positions - len(prompt))} new tokens, or a shorter prompt"
                )

    def _cached_step(self, prompts: Sequence[Sequence[int]], most: int) -> Callable[..., Tensor | None]:
        """A step function that computes logits from each row's new token only, with a cache."""
        stage, device = self.stage, self.stage.device
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        longest = max(map(len, prompts))

        def step(rows: list[list[int]]) -> Tensor | None:
            made = len(rows[0])
            if made == 0:
                stage.cache.begin(lengths, longest, longest + most)
                return stage.logits(_filled(prompts, device), lengths - 1)
            stage.cache.go_to(lengths + made - 1, longest + made - 1)
            tokens = torch.tensor([[row[-1]] for row in rows], device=device)
            return stage.logits(tokens, torch.zeros_like(lengths))

        return step

    def _plain_step(self, prompts: Sequence[Sequence[int]]) -> Callable[..., Tensor | None]:
        """A step function that computes logits from all tokens, as in training."""
        stage, device = self.stage, self.stage.device

        def step(rows: list[list[int]]) -> Tensor | None:
            texts = [[*prompt, *row] for prompt, row in zip(prompts, rows, strict=True)]
            longest = max(map(len, texts))
            lengths = torch.tensor([len(text) for text in texts], device=device)
            stage.cache.begin(lengths, longest, longest)
            return stage.logits(_filled(texts, device), lengths - 1)

        return step


def _filled(texts: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Texts as one tensor [B, S], with zeros after the shorter ones, which no earlier token sees."""
    longest = max(map(len, texts))
    return torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts], device=device)


def _up_to_end(row: list[int], ends: frozenset[int]) -> list[int]:
    number = next((place for place, token in enumerate(row) if token in ends), len(row) - 1)
    return row[: number + 1]
