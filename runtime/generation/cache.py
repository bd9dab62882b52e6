"""Caches of attention for earlier tokens: keys and values, the latents from which these are made, or a state.

A model gets its caches from outside: the core of each attention, or the whole latent attention, is replaced.
Every row of a batch has its own length. Prompts are processed together, padded at the end with tokens that no
earlier token sees. Then each row's new tokens are written after its own prompt, over the padding.

Shapes: B rows, L tokens of the cache's capacity, N and K query and key/value heads of this rank, H head size,
C and R the latent and the rotary part of latent attention.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.model.attention import LatentAttention, MakeTables, MultiHeadAttention, Tables
from runtime.model.delta_rule import delta_rule
from runtime.model.fused_attention import reaching_attention
from runtime.model.gated_delta import GatedDelta
from runtime.model.reach import Reach
from runtime.model.rotary import rotate
from runtime.model.transformer import Transformer
from runtime.parallel.tensor import local_weight


class Cache:
    """The positions of a batch's rows, and the caches of all layers.

    Args:
        stage: the model or a part of it, whose attention is replaced.
        device: the device of the stage.
    """

    def __init__(self, stage: Transformer, device: torch.device) -> None:
        self.stage, self.device = stage, device
        self.room = 0
        self.at: Tensor | None = None
        """[B] position of each row's one new token; None while whole prompts go through."""
        self.end = 0
        """The number of tokens that attention has to look at: one more than the largest position."""
        self.lengths = torch.zeros(0, dtype=torch.int64)
        """[B] tokens of each row's prompt."""
        self.layers = [_kept_by(block.attention, self) for block in stage.blocks]

    def begin(self, lengths: Tensor, tokens: int, room: int) -> None:
        """Clear the cache for prompts of `lengths` [B], at most `tokens` tokens each; no row will exceed
        `room` tokens."""
        self.lengths, self.room, self.at = lengths, room, None
        for layer in self.layers:
            layer.forget()
        self.stage.place(torch.arange(tokens, device=self.device))

    def go_to(self, positions: Tensor, longest: int) -> None:
        """Prepare for one token of each row at `positions` [B]; `longest` is the largest position."""
        self.at, self.end = positions, longest + 1
        if self.stage.embedding is not None:
            self.stage.embedding.at = positions.unsqueeze(1)

        def tables(make: MakeTables) -> Tables:
            # A table [S, H] is broadcast over [B, N, S, H]; here each row has its own.
            return tuple(table[:, None, None] for table in make(positions))

        self.stage.turn(tables)

    def visible(self) -> Tensor:
        """A mask [B, 1, 1, end] of each row's new token and the tokens before it."""
        assert self.at is not None
        seen = torch.arange(self.end, device=self.device) <= self.at.unsqueeze(1)
        return seen[:, None, None]

    def reached(self, reach: Reach, dtype: torch.dtype) -> Tensor:
        """A mask [B, 1, 1, end] that is -inf for tokens hidden from each row's new token, otherwise 0."""
        assert self.at is not None
        return reach.mask(self.at, self.end, dtype)[:, None, None]

    def write(self, kept: Tensor, new: Tensor) -> None:
        """Put `new` [B, K, S, H] into `kept` [B, K, L, H]: at the start, or at each row's position."""
        if self.at is None:
            kept[:, :, : new.shape[2]] = new
        else:
            kept[torch.arange(len(self.at), device=self.device), :, self.at] = new[:, :, 0]

    def make(self, like: Tensor) -> Tensor:
        """Zeros [B, K, room, H] for keys or values of the form of `like` [B, K, S, H]."""
        batch, heads, _, size = like.shape
        return like.new_zeros(batch, heads, self.room, size)


def _kept_by(attention: MultiHeadAttention, cache: Cache) -> _KeysAndValues | _Latents | _States:
    if isinstance(attention, LatentAttention):
        return _Latents(attention, cache)
    if isinstance(attention, GatedDelta):
        return _States(attention, cache)
    return _KeysAndValues(attention, cache)


class _States:
    """The cache of one layer of linear attention: a state of each head, and the last inputs of its
    convolution."""

    def __init__(self, attention: GatedDelta, cache: Cache) -> None:
        self.inputs, self.cache, self.chunk = attention.inputs, cache, attention.core.chunk
        self.tails: dict[str, Tensor] = {}
        self.state: Tensor | None = None
        self.inputs.mixed = self.mix  # type: ignore[method-assign]
        attention.core.forward = self.attend  # type: ignore[method-assign,assignment]

    def forget(self) -> None:
        self.tails, self.state = {}, None

    def mix(self, name: str, projected_BSI: Tensor) -> Tensor:
        """The result of `DeltaInputs.mixed`, computed with the cache: [B, S, I]."""
        before = self.inputs.weight(f"{name}_conv").shape[1] - 1
        if self.cache.at is None:
            seen_BSI = F.pad(projected_BSI, (0, 0, before, 0))
            # Rows end before what filled them up.
            last = self.cache.lengths.unsqueeze(1) + torch.arange(before, device=seen_BSI.device)
            tail = seen_BSI.gather(1, last.unsqueeze(-1).expand(-1, -1, seen_BSI.shape[-1]))
        else:
            seen_BSI = torch.cat((self.tails[name], projected_BSI), dim=1)
            tail = seen_BSI[:, 1:]
        self.tails[name] = tail
        return self.inputs.convolved(name, seen_BSI)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, decay_BNS: Tensor, strength_BNS: Tensor) -> Tensor:
        """Replacement of the delta rule: [B, N, S, Z]."""
        if self.cache.at is None:
            # Filling tokens leave the state of a row as it is.
            filling_B1S = torch.arange(q.shape[2], device=q.device) >= self.cache.lengths[:, None, None]
            decay_BNS, strength_BNS = (x.masked_fill(filling_B1S, 0.0) for x in (decay_BNS, strength_BNS))
        chunk = self.chunk if self.cache.at is None else 1
        result, self.state = delta_rule(q, k, v, decay_BNS, strength_BNS, chunk, self.state)
        return result


class _KeysAndValues:
    """The cache of one attention layer with key and value heads."""

    def __init__(self, attention: MultiHeadAttention, cache: Cache) -> None:
        self.cache, self.core = cache, attention.core
        self.plain = attention.core.forward
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        attention.core.forward = self.attend  # type: ignore[method-assign]

    def forget(self) -> None:
        self.keys = self.values = None

    def attend(self, q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor) -> Tensor:
        """Replacement of the core of attention: [B, N, S, H]."""
        cache = self.cache
        if self.keys is None or self.values is None:
            self.keys, self.values = cache.make(k_BKSH), cache.make(v_BKSH)
        cache.write(self.keys, k_BKSH)
        cache.write(self.values, v_BKSH)
        if cache.at is None:
            return self.plain(q_BNSH, k_BKSH, v_BKSH)
        keys, values = (kept[:, :, : cache.end] for kept in (self.keys, self.values))
        if not self.core.is_plain:
            reach, sinks_N = self.core.reach, self.core.own_sinks()
            mask = cache.reached(reach, q_BNSH.dtype)
            return reaching_attention(q_BNSH, keys, values, reach, sinks_N, mask)
        grouped = q_BNSH.shape[1] != k_BKSH.shape[1]
        return F.scaled_dot_product_attention(q_BNSH, keys, values, cache.visible(), enable_gqa=grouped)


class _Latents:
    """The cache of one latent attention layer:

    C + r elements for each token, for any number of heads. The matrices from latents to keys and values are
    applied to the query and to the result instead (DeepSeek-V2, arXiv:2405.04434, section 2.1.2). A new token
    then takes N (C + r) multiplications for each token that it sees.
    """

    def __init__(self, attention: LatentAttention, cache: Cache) -> None:
        self.attention, self.cache = attention, cache
        self.plain, self.plain_compress = attention.forward, attention.compress.forward
        self.kept: Tensor | None = None
        attention.forward = self.attend  # type: ignore[method-assign]
        attention.compress.forward = self.compress  # type: ignore[method-assign]

    def forget(self) -> None:
        self.kept = None

    def compress(self, x_BSD: Tensor) -> tuple[Tensor, ...]:
        """Queries, latents and keys of tokens [B, S, D]; writes the latents into the cache."""
        q_BSQ, latent_BSC, k_BSr = self.plain_compress(x_BSD)
        new = torch.cat((latent_BSC.unsqueeze(1), self._turned(k_BSr.unsqueeze(1))), dim=-1)
        if self.kept is None:
            self.kept = self.cache.make(new)
        self.cache.write(self.kept, new)
        return q_BSQ, latent_BSC, k_BSr

    def attend(self, x_BSD: Tensor) -> Tensor:
        """Replacement of latent attention: [B, S, D]."""
        if self.cache.at is None:
            return self.plain(x_BSD)
        own = self.attention
        q_BSQ, latent_BSC, _ = own.compress(x_BSD)
        assert self.kept is not None
        seen, rank = self.kept[:, :, : self.cache.end], latent_BSC.shape[-1]
        q = own.query(q_BSQ).unflatten(-1, (-1, own.nope + own.rope)).transpose(1, 2)
        q_BNSU, q_BNSr = q.split((own.nope, own.rope), dim=-1)
        weight = local_weight(own.key_value.weight).view(-1, own.nope + own.value, rank)
        to_keys, to_values = weight.split((own.nope, own.value), dim=1)
        q = torch.cat((torch.einsum("bnsh,nhc->bnsc", q_BNSU, to_keys), self._turned(q_BNSr)), dim=-1)
        attended_BNSC = F.scaled_dot_product_attention(
            q * own.score_factor,
            seen,
            seen[..., :rank],
            self.cache.visible(),
            scale=(own.nope + own.rope) ** -0.5,
            enable_gqa=True,
        )
        values_BNSH = torch.einsum("bnsc,nvc->bnsv", attended_BNSC, to_values)
        result_BSD: Tensor = own.output(values_BNSH.transpose(1, 2).flatten(2))
        return result_BSD

    def _turned(self, x_BNSr: Tensor) -> Tensor:
        """`x_BNSr` after rotary embedding at the positions of its tokens."""
        if not self.attention.rotates:
            return x_BNSr
        assert self.attention.tables is not None
        cos, sin = self.attention.tables
        return rotate(x_BNSr, cos, sin)
