"""Limits on the tokens that a layer's tokens attend to. Shapes: see `runtime.model`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Reach(NamedTuple):
    """Limits on the earlier tokens that a layer's tokens see; no limits if window and chunk are 0."""

    window: int = 0
    """The number of tokens that a token sees, itself included."""
    chunk: int = 0
    """The length of a chunk; a token only sees earlier tokens of its own chunk."""
    softcap: float = 0.0
    """The cap c of scores x, which become c tanh(x / c); 0 for no cap."""

    def is_everything(self, keys: int) -> bool:
        """Return whether tokens of a sequence of `keys` tokens see all earlier tokens, with uncapped
        scores."""
        return not (self.softcap or self.binds(keys))

    def binds(self, keys: int) -> bool:
        """Return whether tokens of a sequence of `keys` tokens do not see all earlier tokens."""
        return 0 < max(self.window, self.chunk) < keys

    def mask(
        self, queries_T: Tensor, keys: int, dtype: torch.dtype, starts_BT: Tensor | None = None
    ) -> Tensor:
        """The mask [T, P] or [B, T, P] that is added to scores: 0, or -inf to hide.

        Args:
            queries_T: the positions of the queries.
            keys: P, the keys are those of the first P positions.
            starts_BT: the position at which the document of each query begins. The query sees nothing before
                that position, and chunks are counted from there.
        """
        keys_P, at_T1 = torch.arange(keys, device=queries_T.device), queries_T.unsqueeze(1)
        hidden, since = keys_P > at_T1, at_T1
        if starts_BT is not None:
            starts_BT1 = starts_BT.unsqueeze(-1)
            hidden, since = hidden | (keys_P < starts_BT1), at_T1 - starts_BT1
        if self.window:
            hidden |= keys_P <= at_T1 - self.window
        if self.chunk:
            hidden |= keys_P < at_T1 - since % self.chunk
        return torch.zeros(hidden.shape, dtype=dtype, device=queries_T.device).masked_fill_(
            hidden, -torch.inf
        )


EVERYTHING = Reach()
