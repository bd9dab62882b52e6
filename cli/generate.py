"""`planner generate`: text from a trained model."""

from __future__ import annotations

from planner.flags import takes
from runtime.generation.options import GenerateOptions


@takes(options=GenerateOptions)
def generate(options: GenerateOptions) -> None:
    """Continue prompts with a trained checkpoint or a Hugging Face model."""
    from runtime.generation.command import run

    run(options)
