"""Sizes of a unit of a given structure that tell dimensions apart: each a product of primes of its own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import count

from costmodels.layers.shapes import CHUNK_TOKENS, PEAK_LOAD
from costmodels.spec.model import VOCAB_MULTIPLE
from costmodels.tapes.dimensions import KERNEL_ROWS, filled_tokens
from costmodels.tapes.structure import (
    ALIGNED_HEAD,
    FLOAT8_MULTIPLE,
    REACHES,
    Structure,
    heeds_groups,
    heeds_rows,
)
from runtime.dryrun.primes import Primes, is_prime

SAMPLES = 4
"""Sets of sizes that there are; two prove most tapes."""

RANKS = {
    "tp": (5, 7, 11, 13),
    "cp": (37, 41, 43, 47),
    "ep": (29, 37, 41, 43),
    "etp": (41, 43, 37, 53),
}
"""Primes that seldom are in coefficients, as 2 and 3 are; no two of a set are equal."""

LAST = ("groups", "tp", "cp", "ep", "etp", "sharers")
"""Dimensions whose primes others have too."""

OF_EXPERTS = {"ep", "etp", "choices", "groups", "top_groups"}

SIDES = {
    # Eight times as many elements are heads that every kernel takes.
    "head": (17, 19, 23, 29),
    "group": (13, 11, 7, 5),
    "keys": (7, 5, 13, 11),
    "seq": (89, 97, 101, 103),
    "batch": (107, 109, 113, 127),
    "choices": (53, 59, 61, 67),
    "groups": (71, 73, 79, 83),
    "top_groups": (43, 47, 53, 59),
}

LARGER = {
    "tp": (23, 31, 23, 31),
    "keys": (137, 139, 149, 151),
    "group": (157, 163, 167, 173),
    "head": (19, 17, 17, 19),
    "etp": (41, 23, 37, 53),
}
"""Where numbers of experts and of choices are coefficients."""

FEWER = {"cp": (7, 5, 13, 11), "keys": LARGER["keys"]}
"""Where each rank's parts of a sequence are operations of their own: graphs of many are slow to make."""

SHARING = {"cp": (11, 13, 17, 19)}
"""The same where ranks share heads, whose primes are small."""

FEW_HEADS = {"keys": (59, 61, 67, 73), "group": (13, 11, 7, 5)}
"""Where experts have sequences of many tokens, or long steps, and these have scores."""

FEW_OF_MANY = (31, 29, 19, 17)
"""Context-parallel ranks over the key heads that they repeat, where all scores would be too many to count, or
all ranks too many to group."""

FLOAT8_HEAD = (11, 13, 5, 7)
"""Of heads whose products in 8 bits are possible, over 16."""

LATENT = ((17, 13, 11, 31), (13, 11, 17, 29), (19, 7, 17, 31), (17, 7, 19, 29))
"""Of latent attention, over 8: parts of heads without position and with it, and shorter and longer values."""

FLOAT8_LATENT = {
    "keys": ((7, 5, 11), (3, 11, 13), (11, 5, 7), (5, 3, 7)),
    "values": ((5, 7, 13), (7, 3, 11), (3, 5, 13), (7, 5, 13)),
}
"""Of latent attention whose products in 8 bits are possible, over 16, by what is longer: parts of heads
without position and with it, and values. The flash kernel takes the longer ones, and the first two sums are
unequal."""

FLOAT8_LATENT_RANKS = {"tp": (17, 19, 17, 19), "keys": (23, 29, 19, 17)}
"""Beside these."""

FEWEST_STEPS = 10
"""Through a sequence, each of which takes time to record."""

FEWEST_BLOCKS = 10
"""Of queries that are a loop, with room for windows that see a part of them."""

ALL_QUERIES = 2**40
"""In one block, or in none."""

MOST_TRIES = 1000
"""Of sizes of these, before there are none."""

EIGHTHS = (3, 5, 1, 7)
"""What is left over 8 of each set's primes that it looks for, so that no two have the same."""

LEAST_BEFORE = 5
"""Least prime of the tokens before each that a convolution sees."""

LIMITS = {"": 0.0, "full": 1.103, "part": 0.907}
"""Capacity factors, of as many digits that some even numbers of rows are none of a share of others."""

SPAN = 256
"""Rows of a chunk that one set of sizes tries, then the next one, so that no two have the same."""

LONGEST = 2**16
"""Rows of a chunk that are tried before there are none: a sequence has many chunks."""

SHARED = ((3, 7), (5, 3), (5, 3), (3, 7))
"""Where ranks share a head they divide it: their number, and the prime of a head, 8 times both."""

FLOAT8_SHARED = ((3, 5), (5, 3), (3, 5), (5, 3))
"""The same where a share has sides that products in 8 bits take: a head is 16 times both, and no kernel takes
larger ones."""

FIRST = (200, 300, 450, 700)
"""Least primes of widths, so that no two sets have the same."""

WIDEST = 2**17
"""Models need not be wider for compilers to keep what they keep."""

SHARES = 4
"""Of rows: `PEAK_LOAD` is a number of these."""

MULTIPLE = 16
"""Of widths, so that kernels take them."""

SEQ_MULTIPLE = 64
"""Of sequences, so that kernels round nothing."""

FFN_SHARE = 3.5
"""Width of an MLP over that of the model, as models have it: compilers keep the smaller tensors."""


class Sizes:
    """Sizes of a model and a layout, each with a prime of its own."""

    def __init__(self, structure: Structure, number: int) -> None:
        self.structure, self.number = structure, number
        tables: dict[str, tuple[int, ...]] = {**RANKS, **SIDES}
        tables |= LARGER if structure.loop_of_experts else {}
        capped, is_linear = (name in structure.form for name in ("attention_softcap", "attention=linear"))
        # There sequences are long, and all scores would be too many to count.
        many = structure.loop_of_experts > 0 and (structure.unfused or capped)
        # Sinks take a turn of a loop for each rank.
        fewer = many and structure.context_form == "all_to_all" and "attention_sinks" not in structure.form
        tables |= FEWER if structure.context_form == "all_gather" or capped or fewer else {}
        tables |= SHARING if structure.shares_heads and tables["cp"] == FEWER["cp"] else {}
        # Steps of experts that drop rows are long.
        drops = structure.loop_of_experts > 0 and is_linear and structure.limited == "part"
        tables |= FEW_HEADS if many or drops else {}
        if structure.repeats_heads:
            # Context-parallel ranks are a multiple of these.
            tables["keys"] = SIDES["keys"]
            if structure.unfused or capped or (structure.loop_of_experts and structure.expert_ranks > 1):
                tables |= {"tp": RANKS["tp"], "cp": FEW_OF_MANY, "group": SIDES["group"]}
        shares_even = structure.shares_heads and structure.precision == "fp8" and not structure.odd_sides
        tables |= {name: LARGER[name] for name in ("tp", "group")} if shares_even else {}
        self.latent: tuple[int, ...] = LATENT[number]
        if structure.latent and structure.precision == "fp8":
            nope, rope, value = FLOAT8_LATENT[structure.longer_heads or "keys"][number]
            self.latent = nope, rope, value, value
            tables |= FLOAT8_LATENT_RANKS
            if structure.context_form == "all_gather":
                # The others are not small.
                ranks = max({*FEWER["cp"]} - {*self.latent})
                tables["cp"] = ranks, ranks, ranks, ranks
        self.primes = {name: values[number] for name, values in tables.items()}
        self.chosen = Primes(self.primes, self.latent if structure.latent else ())
        if capped:
            self.chosen.taken = self._used()
        own = self.primes
        self.tp = own["tp"] if structure.tensor_parallel else 1
        self.cp = 1
        if structure.context_form:
            self.cp = structure.context_ranks if structure.context_ranks > 1 else own["cp"]
        self.ep = own["ep"] if structure.expert_parallel else 1
        if structure.loop_of_experts and self.ep > 1:
            # Groups of experts are whole.
            groups = structure.loop_choices[1]
            self.ep *= groups // math.gcd(groups, structure.loop_of_experts)
        self.etp = structure.expert_ranks
        if structure.expert_tensor_parallel and self.etp == 1:
            self.etp = own["etp"]
        self.rows = own["batch"] if structure.several or not heeds_rows(structure) else 1
        self.keys = 1 if structure.one_key_head or structure.shares_heads else own["keys"]
        self.group = own["group"] if structure.grouped_queries or not heeds_groups(structure) else 1
        if structure.one_head:
            self.keys = self.group = 1
        if structure.latent:
            self.group = 1
        self.head = own["head"] * (1 if structure.unaligned_heads else ALIGNED_HEAD)
        if structure.precision == "fp8":
            own["head"] = own["head"] if is_linear else FLOAT8_HEAD[number]
            self.head = FLOAT8_MULTIPLE * own["head"]
        if is_linear and structure.precision == "fp8" and not structure.odd_heads:
            self.keys *= FLOAT8_MULTIPLE
        if structure.context_form == "all_to_all":
            self._exchange_heads()
        self.kv_heads = self.keys * self.tp
        if structure.shares_heads:
            # As many heads as the prime says: other tensor-parallel ranks share them.
            self.kv_heads = self.tp
            sharers, own["head"] = (FLOAT8_SHARED if shares_even else SHARED)[number]
            own["sharers"] = sharers
            multiple = FLOAT8_MULTIPLE if shares_even else ALIGNED_HEAD
            self.tp, self.head = self.tp * sharers, multiple * sharers * own["head"]
        self.heads = self.keys * self.group * self.tp
        self.entries = (
            math.lcm(VOCAB_MULTIPLE, self.tp) // self.tp * self.chosen.fresh("vocab", FIRST[number])
        )
        self.query_block = ALL_QUERIES
        # Ranks that exchange heads have no two parts of a sequence.
        whole = self.cp == 1 or (capped and structure.context_form == "all_to_all")
        chunks = self.tp * self.cp * (1 if whole else 2)
        if structure.loop_of_experts:
            # Experts have as many rows each.
            chunks *= SHARES * structure.loop_of_experts
            own["choices"], own["groups"], own["top_groups"] = structure.loop_choices
        if REACHES & {*structure.form} and not capped:
            # Two chunks, or two windows.
            chunks *= 2
        if structure.further:
            # Tokens of a rank are as many times the chunks of the loss as they have to be.
            chunks *= structure.chunks // math.gcd(structure.chunks, chunks // (self.tp * self.cp))
        odd = structure.routes and structure.precision != "fp8"
        # Ranks that repeat heads are many, and have two parts of a sequence each.
        multiple = SEQ_MULTIPLE // (2 if structure.repeats_heads else 1)
        if is_linear:
            self.seq = self._step_rows(chunks * (FLOAT8_MULTIPLE if structure.precision == "fp8" else 1))
        elif capped and not structure.few_steps:
            self.seq = self._blocks(chunks)
        elif structure.odd_rows:
            self.seq = self._unfilled(chunks)
        else:
            self.seq = chunks * (self._odd_rows(chunks) if odd else multiple * own["seq"])
        if structure.unit == "head" and not structure.further:
            # An odd number of tokens is in each chunk of the loss, so that there are not more of them.
            self.seq = self.tp * structure.chunks * self.chosen.fresh("seq", CHUNK_TOKENS + FIRST[number])
        self.hidden = MULTIPLE * self.chosen.fresh(
            "hidden", FIRST[number] + max(FIRST[number], min(WIDEST, self.heads * self.head) // MULTIPLE)
        )
        self.ffn = MULTIPLE * self.own_prime("ffn", int(FFN_SHARE * self.hidden / self.tp / MULTIPLE))

    def _exchange_heads(self) -> None:
        """Heads of which context-parallel ranks can have equal parts."""
        if self.structure.one_head and self.structure.repeats_heads:
            self.group = self.cp
        elif self.structure.one_head or (self.structure.one_key_head and not self.structure.repeats_heads):
            self.keys = self.cp
        elif self.structure.one_key_head:
            # Where tensor-parallel ranks share a head, each has one.
            self.keys = 1 if self.structure.shares_heads else self.primes["keys"]
            self.cp *= self.keys
            self.group *= self.cp // self.keys
        else:
            self.keys *= self.cp

    def _odd_rows(self, chunks: int) -> int:
        """Rows of a chunk that are a prime, so that a share of them is no product of sizes; where a kernel
        fills up all of them, what it makes has a prime of its own too."""
        for rows in range(self.primes["seq"], LONGEST):
            if not self._is_own(rows) or not is_prime(rows) or not self._is_even(rows * chunks):
                continue
            if rows != self.primes["seq"] and not self.chosen.is_free(rows):
                continue
            here = rows * chunks // self.cp
            filled = -(-here // KERNEL_ROWS)
            if here == filled * KERNEL_ROWS or not (self.structure.latent or self.structure.unfused):
                self.primes["seq"] = rows
                return rows
            own = {rows, filled} - {self.primes["seq"]}
            if is_prime(filled) and not own & self.chosen.taken:
                self.primes |= {"seq": rows, "kernel_seq": filled}
                self.chosen.taken |= own
                return rows
        raise ValueError(f"{self.structure.name}: no sample has experts with equal numbers of rows")

    def _unfilled(self, chunks: int) -> int:
        """The length of sequences whose tokens are filled up to a number that has a prime of its own."""
        for rows in range(self.primes["seq"], LONGEST):
            own = rows == self.primes["seq"] or self.chosen.is_free(rows)
            if own and self._is_own(rows) and self.chosen.take(self._filled(rows * chunks)):
                self.primes["seq"] = rows
                self.chosen.taken.add(rows)
                return rows * chunks
        raise ValueError(f"{self.structure.name}: no sample has tokens that are filled up")

    def _filled(self, seq: int) -> dict[str, int]:
        """The tokens of a rank as products in 8 bits fill them up; 1, which is no dimension, where there is
        nothing to fill."""
        if not self.structure.odd_rows:
            return {}
        tokens = self.rows * seq // self.cp
        filled = filled_tokens(tokens)
        return {"filled": filled if filled > tokens else 1}

    def _is_own(self, rows: int) -> bool:
        """Whether no other set of sizes may have so many rows: what two have would look like a constant."""
        others = SIDES["seq"]
        is_in_turn = rows // SPAN % SAMPLES == self.number
        return rows == others[self.number] or (is_in_turn and rows not in others)

    def _is_even(self, seq: int) -> bool:
        """Whether the experts of a rank have equal numbers of rows, where that matters."""
        count, limit = self.structure.loop_of_experts, LIMITS[self.structure.limited]
        if not count:
            return True
        pairs = self.rows * seq // (self.cp * self.tp) * self.primes["choices"] * self.etp
        if self.ep == 1:
            return int(pairs * min(1.0, limit or 1.0)) % count == 0
        return int(pairs // self.etp * min(PEAK_LOAD, limit or PEAK_LOAD)) * self.etp % count == 0

    def window(self) -> int:
        """What a token sees: half of a sequence, or of the part of one whose queries are together."""
        part = self.seq // self._parts()
        least = part // 2 if self.structure.short_window else self.seq // 2
        if "attention_softcap" not in self.structure.form or self.structure.few_steps:
            return least
        for window in count(least):
            values = {"seen": window + self.query_block - 1}
            if self.structure.partial_step:
                values["last_seen"] = window + part % self.query_block - 1
            if self.chosen.take(values):
                return window
        raise AssertionError("there are more primes")

    def _parts(self) -> int:
        """Of a sequence, each of whose queries attention has together."""
        return 2 * self.cp if self.structure.context_form == "all_gather" else 1

    def _used(self) -> set[int]:
        """The primes that sizes of this structure have: small ones are few."""
        structure = self.structure
        used = {prime for name, prime in self.primes.items() if structure.routes or name not in OF_EXPERTS}
        used |= {FLOAT8_HEAD[self.number]} if structure.precision == "fp8" else set()
        return used | {*(self.latent if structure.latent else ())}

    def _blocks(self, chunks: int) -> int:
        """The length of sequences whose capped scores come in few blocks of queries, each of which takes time
        to record; of how many queries the samples choose too."""
        structure, parts = self.structure, self._parts()
        # Else ranks have the same tokens.
        divides = structure.sequence_parallel or structure.routes
        together = chunks if divides else chunks // self.tp
        step = math.lcm(together, parts * (1 if structure.odd_rows else SEQ_MULTIPLE)) // parts
        find = self._smaller_block if structure.partial_step else self._whole_block
        blocks = self._mine(FEWEST_BLOCKS)
        block = step if structure.partial_step else 1
        for _ in range(MOST_TRIES):
            block = self._mine(block + 1)
            seq = find(blocks, block, step) * parts
            if seq:
                return seq
        raise ValueError(f"{structure.name}: no sample has blocks of queries that tell its sizes")

    def own_prime(self, name: str, least: int) -> int:
        """A prime of at least so much for a dimension, which no other set of sizes has for it."""
        return self.chosen.fresh(name, self._mine(least))

    def _mine(self, least: int) -> int:
        """The first free prime from a number on that no other set of sizes tries."""
        eighth = EIGHTHS[self.number]
        return next(value for value in count(least) if value % 8 == eighth and self.chosen.is_free(value))

    def _whole_block(self, blocks: int, prime: int, step: int) -> int:
        """Tokens in so many blocks that are a prime times `step`; 0 where experts have unequal rows."""
        part = blocks * prime * step
        if not self._is_even(part * self._parts()) or blocks == prime:
            return 0
        self.query_block = prime * step
        values = {"seq": blocks, "query_block": prime, **self._filled(part * self._parts())}
        return part if self.chosen.take(values) else 0

    def _smaller_block(self, blocks: int, prime: int, step: int) -> int:
        """Tokens in so many blocks of a prime of queries and in a smaller one; 0 where none tell sizes."""
        parts, whole = self._parts(), blocks * prime
        self.query_block = prime
        for rows in range(whole // step + 1, (whole + prime - 1) // step + 1):
            part = rows * step
            last = part - whole
            # No two sets have the same.
            if last // 8 % SAMPLES != self.number or not self._is_even(part * parts):
                continue
            values = {"seq": rows, "blocks": blocks, "query_block": prime, "last_block": last}
            values |= self._filled(part * parts)
            if parts > 1:
                values["block_keys"] = part * parts - last
            if self.chosen.take(values):
                return part
        return 0

    def _step_rows(self, chunks: int) -> int:
        """The length of sequences that linear attention goes through in a prime number of steps, of rows that
        are a prime over those that have to be together."""
        first = self.primes.pop("seq")
        steps = self.structure.few_steps or self.own_prime("steps", FEWEST_STEPS)
        for rows in range(first, LONGEST):
            if not self._is_own(rows) or (rows != first and not self.chosen.is_free(rows)):
                continue
            whole = steps * rows
            for length in self._partial_lengths(steps, rows) if self.structure.partial_step else (whole,):
                if not self._is_even(length * chunks):
                    continue
                self.primes |= {"step": rows} | ({"seq": length} if length < whole else {})
                self.chosen.taken |= {*self.primes.values()}
                self.step = chunks * rows
                return length * chunks
        raise ValueError(f"{self.structure.name}: no sample has experts with equal numbers of rows")

    def _partial_lengths(self, steps: int, rows: int) -> Iterator[int]:
        """Primes of tokens whose last one of so many steps is a partial one, of a large part of its rows."""
        least = steps * rows - (rows // 2 if self.structure.few_steps else steps)
        return filter(self.chosen.is_free, range(least + self.number + 1, steps * rows))

    def vocabulary(self) -> int:
        """Entries of a tokenizer, of which each tensor-parallel rank has `entries`, padding included."""
        if not self.structure.pads_vocabulary:
            return self.entries * self.tp
        # A prime less than a multiple below what is stored.
        found = self.entries * self.tp - 1
        while not is_prime(found):
            found -= 1
        self.primes["tokens"] = found
        return found

    def free_primes(self, values: Mapping[str, int]) -> dict[str, int]:
        """The primes of dimensions that are not 1, those that have others in them first."""
        own = dict(self.primes)
        rows = values["batch"] * values["seq"] * values.get("choices", 1) * self.etp
        for name in ("sent", "arrived"):
            # What is a product of other sizes is no size of its own; what is none is as good as a prime.
            if name in values and rows % values[name]:
                own[name] = values[name]
        first = ["sent", "arrived", "filled"]
        # These are many times their primes.
        if "query_block" in own:
            first += ["blocks", "last_block", "block_keys", "seen", "last_seen", "seq", "query_block"]
        if self.structure.loop_of_experts:
            for name in ("choices", "groups", "top_groups"):
                own.pop(name)
        if self.structure.context_form == "all_to_all" and self.structure.one_key_head:
            # There ranks are a multiple of the keys, and groups one of ranks.
            first += ["group", "cp"]
        order = [*first, *(name for name in own if name not in (*first, *LAST)), *LAST]
        return {name: own[name] for name in dict.fromkeys(order) if name in own and values.get(name, 1) > 1}
