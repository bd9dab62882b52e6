"""AdamW with 8-bit moments (arXiv:2110.02861), from torchao."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from costmodels.errors import InputError
from runtime.optimizers.shards import MOMENTS, ParameterShard, parameter_groups
from runtime.parallel.local_tensors import like_parameter, local_part


def check_adam8bit() -> None:
    """Raise `InputError` when torchao is not installed."""
    if importlib.util.find_spec("torchao") is None:
        raise InputError(
            "optimizer adam8bit needs torchao: pip install 'llm-parallelism-planner[fp8]', or train with "
            "--optimizer adam"
        )


class Adam8bit:
    """torchao's AdamW8bit:

    8-bit codes of moments, with one scale per 256 neighbouring elements of a shard. Blocks depend on the
    shards, and shards of fewer than 4096 elements keep fp32, so layouts agree only up to quantisation errors.
    """

    slots: tuple[str, ...] = MOMENTS

    def __init__(self, owned: Sequence[ParameterShard], betas: tuple[float, float], eps: float) -> None:
        from torchao.optim import AdamW8bit

        self.owned = [o for o in owned if o.shard.numel()]
        self.empty = [o for o in owned if not o.shard.numel()]
        self.torch: Any = AdamW8bit(parameter_groups(self.owned), lr=0.0, betas=betas, eps=eps)
        for group in self.torch.param_groups:
            # As a tensor it is an input of the compiled step, not a constant to compile anew for.
            group["weight_decay"] = torch.zeros(())

    def step(self, learning_rate: float, weight_decay: float) -> None:
        for group in self.torch.param_groups:
            group["lr"].fill_(learning_rate)
            group["weight_decay"].fill_(weight_decay if group["decayed"] else 0.0)
        self.torch.step()

    def states(self) -> dict[str, Tensor]:
        """Moments in fp32, copies in host memory."""
        found = {
            (o, slot): moment_values(moment).cpu()
            for o in self.owned
            for slot, moment in self._moments(o).items()
        }
        found |= {(o, slot): torch.empty_like(o.shard, device="cpu") for o in self.empty for slot in MOMENTS}
        return {
            f"{o.name}.{slot}": like_parameter(moment, o.parameter) for (o, slot), moment in found.items()
        }

    @torch.no_grad()
    def load(self, states: Mapping[str, Tensor], updates: int) -> None:
        for owned in self.owned:
            for slot, moment in self._moments(owned).items():
                store_moment(moment, local_part(states[f"{owned.name}.{slot}"]).to(moment.device))
            self.torch.state[owned.shard]["step"].fill_(updates)

    def _moments(self, owned: ParameterShard) -> dict[str, Tensor]:
        state = self.torch.state[owned.shard]
        if not state:
            state["step"] = torch.tensor(0.0)
            for slot in MOMENTS:
                state[slot] = self.torch._new_buffer(owned.shard, slot == "exp_avg")
        return {slot: state[slot] for slot in MOMENTS}


def moment_values(moment: Tensor) -> Tensor:
    """The fp32 values of a moment, which is stored in 8 bits, or in fp32 for small shards."""
    from torchao.optim.subclass_8bit import OptimState8bit

    if not isinstance(moment, OptimState8bit):
        return moment.detach()
    result: Tensor = moment.dequantize()
    return result


def store_moment(moment: Tensor, numbers: Tensor) -> None:
    """Write fp32 `numbers` into a moment; numbers that were read from an 8-bit moment are restored exactly.
    torchao scales a block by its largest magnitude.

    The codes of signed values reach 1 but not -1. So a block whose largest magnitude is negative would get a
    smaller scale each time. The earlier scale of a block is its largest value over that value's code, up to
    rounding. All candidates are tried, and the best one is used for each block.
    """
    from torchao.optim.quant_utils import quantize_8bit_with_qmap
    from torchao.optim.subclass_8bit import OptimState8bit

    if not isinstance(moment, OptimState8bit):
        moment.copy_(numbers)
        return
    blocks = numbers.reshape(moment.scale.numel(), -1)
    lowest = moment.qmap[0] if moment.signed else -moment.qmap[-1]
    scale = torch.maximum(blocks.amax(-1), blocks.amin(-1) / lowest).clamp(min=1e-12)
    above, below = (torch.nextafter(scale, torch.full_like(scale, end)) for end in (torch.inf, 0.0))
    best = torch.full_like(scale, torch.inf)
    for candidate in (scale, above, below):
        codes = quantize_8bit_with_qmap(blocks / candidate.unsqueeze(-1), moment.qmap)
        error = (moment.qmap[codes.int()] * candidate.unsqueeze(-1) - blocks).abs().sum(-1)
        better = error < best
        best = torch.where(better, error, best)
        moment.scale.copy_(torch.where(better, candidate, moment.scale))
        kept = moment.codes.view_as(codes)
        kept.copy_(torch.where(better.unsqueeze(-1), codes, kept))
