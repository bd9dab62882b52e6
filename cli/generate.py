"""`planner generate`: text from a trained model."""

from __future__ import annotations

from cli.interrupts import leaving_at_ctrl_c
from cli.status import Status
from planner.flags import takes
from runtime.generation.options import GenerateOptions


@takes(options=GenerateOptions)
def generate(options: GenerateOptions) -> None:
    """Continue prompts with a trained checkpoint or a Hugging Face model."""
    options.check()
    options.prompts()
    with Status() as status:
        status.tell("loading PyTorch")
        with leaving_at_ctrl_c():
            from runtime.generation.command import run

        run(options, status)
