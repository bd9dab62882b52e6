"""`planner generate`: text from a trained model."""

from __future__ import annotations

import sys

from cli.interrupts import leaving_at_ctrl_c
from cli.status import Status
from planner.options.flags import flag_groups
from runtime.generation.options import GenerateOptions
from runtime.settings.no_effect import without_effect


@flag_groups(options=GenerateOptions)
def generate(options: GenerateOptions) -> None:
    """Continue prompts with a trained checkpoint or a Hugging Face model."""
    options.check()
    options.prompts()
    for line in (*options.notes(), *without_effect(options)):
        print(f"planner: note: {line}", file=sys.stderr)
    with Status() as status:
        status.tell("loading PyTorch")
        with leaving_at_ctrl_c():
            from runtime.generation.command import run

        run(options, status)
