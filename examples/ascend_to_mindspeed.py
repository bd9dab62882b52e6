"""A plan for Ascend 910B, written as the flags of MindSpeed-LLM.

python examples/ascend_to_mindspeed.py [MODEL] [DEVICES]
"""

from __future__ import annotations

import sys

import planner


def main(model: str = "qwen3-8b", devices: str = "64") -> None:
    """Plan for the engine that trains on Ascend; print its flags, and beside them what they cannot say."""
    plan = planner.suggest(
        model, world_size=int(devices), device="ascend-910b", engine="mindspeed", global_batch_size=256
    )
    found = planner.export(plan, to="mindspeed")
    print(plan, file=sys.stderr)
    print(found.text, end="")
    for line in (*found.inexpressible, *found.notes):
        print(f"note: {line}", file=sys.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:])
