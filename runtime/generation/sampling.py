"""The choice of the next token: the likeliest one, or a random draw."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """Settings for choosing tokens from logits.

    Logits are divided by `temperature`. Then the `top_k` largest are kept, and of these the largest whose
    probabilities add up to at least `top_p` (nucleus sampling, arXiv:1904.09751). With none of the three, or
    a temperature of 0, the likeliest token is taken.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 1234

    @property
    def greedy(self) -> bool:
        """True if the likeliest token is taken and nothing is drawn."""
        return self.temperature == 0 or (self.temperature, self.top_k, self.top_p) == (None, None, None)

    def generators(self, rows: int) -> list[torch.Generator]:
        """One random generator for each row, so that a text does not depend on the other rows."""
        return [torch.Generator().manual_seed(self.seed + row) for row in range(rows)]

    def choose(self, logits: Tensor, generators: list[torch.Generator]) -> Tensor:
        """The next tokens [B] from logits [B, V]."""
        logits = logits.float()
        if self.greedy:
            return logits.argmax(-1)
        kept = self.probabilities(logits).cpu()
        drawn = [
            torch.multinomial(row, 1, generator=source) for row, source in zip(kept, generators, strict=True)
        ]
        return torch.cat(drawn).to(logits.device)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Probabilities [B, V] of tokens in the draw; zero for excluded tokens."""
        logits = logits / (self.temperature or 1.0)
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k, -1).values[:, -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        probabilities = logits.softmax(-1)
        if self.top_p is not None and self.top_p < 1:
            largest, order = probabilities.sort(dim=-1, descending=True, stable=True)
            # The token that reaches the sum stays.
            beyond = largest.cumsum(-1) - largest >= self.top_p
            largest = largest.masked_fill(beyond, 0.0)
            probabilities = torch.zeros_like(probabilities).scatter(-1, order, largest)
        return probabilities
