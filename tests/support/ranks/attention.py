"""Ranks that choose a kernel of attention by trials that differ among them."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from runtime.job import attention_choice
from runtime.model.attention_switches import PREFERENCE, Preference
from runtime.parallel.attention_trial import Trial
from tests.support.layouts import parse_layout
from tests.support.models import LLAMA

SECONDS = ({"flash": 2.0, "cudnn": 1.0}, {"flash": 1.0, "cudnn": 2.0})
"""Seconds of kernels on each rank."""

OFFERS = (["flash", "cudnn", "fa3"], ["flash", "cudnn"])


def chosen(failing: int | None) -> dict[str, Any]:
    """The choice of two ranks with GPUs that are none; rank `failing` cannot use it."""
    rank, tried = dist.get_rank(), []
    use = Preference.use

    def trial(given: Any, name: str) -> Trial:
        tried.append(name)
        return Trial(SECONDS[rank][name], 1, 1)

    def using(self: Preference, kernel: str | None) -> None:
        if kernel is not None and rank == failing:
            raise RuntimeError("no library\nfound")
        use(self, kernel)

    stand_ins: dict[str, Any] = {
        "trial": trial,
        "operands": lambda call, device: (None,) * 4,
        "default_kernel": lambda *operands: "flash",
        "settle_order": lambda device: None,
        "offered_kernels": lambda device, replaces_flash: OFFERS[rank],
        "_clean": lambda device: None,
    }
    try:
        with (
            patch.multiple(attention_choice, **stand_ins),
            patch.object(torch.cuda, "is_available", lambda: True),
            patch.object(Preference, "use", using),
        ):
            layout = parse_layout("dp=2,precision=bf16", LLAMA)
            line = attention_choice.use_attention("auto", LLAMA, layout, torch.device("cuda", 0))
        order = list(torch._C._get_sdp_priority_order())
        return {"kernel": PREFERENCE.kernel, "order": order, "line": line, "tried": tried}
    finally:
        PREFERENCE.use(None)
