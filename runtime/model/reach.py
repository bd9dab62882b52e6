"""What the tokens of a layer attend to. Shapes: see `runtime.model`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Reach(NamedTuple):
    """What the tokens of a layer see besides themselves: all before them where window and chunk are 0."""

    window: int = 0
    """So many tokens, the own one included."""
    chunk: int = 0
    """Those before it in its own chunk of so many."""
    softcap: float = 0.0
    """Scores x become cap tanh(x / cap); 0 for as they are."""

    def is_everything(self, keys: int) -> bool:
        """Whether tokens of a sequence of `keys` see all before them by plain scores."""
        return not (self.softcap or self.binds(keys))

    def binds(self, keys: int) -> bool:
        """Whether tokens of a sequence of `keys` do not see all before them."""
        return 0 < max(self.window, self.chunk) < keys

    def mask(self, queries_T: Tensor, keys: int, dtype: torch.dtype) -> Tensor:
        """The mask [T, P] that is added to the scores of queries at these positions: 0, or -inf to hide."""
        keys_P, at_T1 = torch.arange(keys, device=queries_T.device), queries_T.unsqueeze(1)
        hidden_TP = keys_P > at_T1
        if self.window:
            hidden_TP |= keys_P <= at_T1 - self.window
        if self.chunk:
            hidden_TP |= keys_P < at_T1 - at_T1 % self.chunk
        return torch.zeros(hidden_TP.shape, dtype=dtype, device=queries_T.device).masked_fill_(
            hidden_TP, -torch.inf
        )


EVERYTHING = Reach()
