"""The peak of layers of experts under FSDP2, on tensors without memory: prints its size in such layers."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

EXPERTS, WIDTH, TOKENS, CHOSEN, LAYERS, RANKS = 32, 256, 32, 4, 4, 32


class Layer(torch.nn.Module):
    """Experts with grouped products, recomputed in backward."""

    def __init__(self) -> None:
        super().__init__()
        narrow = torch.bfloat16
        self.up = torch.nn.Parameter(torch.empty(EXPERTS, WIDTH, 2 * WIDTH, dtype=narrow))
        self.down = torch.nn.Parameter(torch.empty(EXPERTS, WIDTH, WIDTH, dtype=narrow))

    def experts(self, x: torch.Tensor) -> torch.Tensor:
        ends = torch.arange(1, EXPERTS + 1, dtype=torch.int32)
        gate, up = torch._grouped_mm(x.repeat_interleave(CHOSEN, 0), self.up, offs=ends).chunk(2, -1)
        rows = torch._grouped_mm(torch.nn.functional.silu(gate) * up, self.down, offs=ends)
        return x + rows.view(TOKENS, CHOSEN, WIDTH).sum(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = checkpoint(self.experts, x, use_reentrant=False)
        return found


def main() -> None:
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    mesh = init_device_mesh("cpu", (RANKS,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    with FakeTensorMode():
        model = torch.nn.Sequential(*(Layer() for _ in range(LAYERS)))
        for one in (*model, model):
            fully_shard(one, mesh=mesh, mp_policy=policy)
        tracker = MemTracker()
        tracker.track_external(model)
        with tracker:
            model(
                torch.zeros(TOKENS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
            ).float().sum().backward()
    (peak,) = tracker.get_tracker_snapshot("peak").values()
    print(peak["Total"] / (2 * EXPERTS * 3 * WIDTH**2))


if __name__ == "__main__":
    main()
