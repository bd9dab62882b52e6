"""`planner generate`: text from a trained model."""

from __future__ import annotations

import sys
from dataclasses import replace

from cli.status import Status
from planner.options.flags import flag_groups
from runtime.generation.generate_options import GenerateOptions
from runtime.huggingface.folder_kind import check_model_folder, model_folder
from runtime.processes.interrupts import exit_on_ctrl_c
from runtime.settings.idle_flags import idle_flag_notes


@flag_groups(options=GenerateOptions)
def generate(options: GenerateOptions) -> None:
    """Continue prompts with a trained checkpoint or a Hugging Face model."""
    options.check()
    options.prompts()
    options = replace(options, load=model_folder(options.load))
    check_model_folder(options.load, options.ckpt_step)
    for line in (*options.notes(), *idle_flag_notes(options)):
        print(f"planner: note: {line}", file=sys.stderr)
    with Status() as status:
        status.tell("loading PyTorch")
        with exit_on_ctrl_c():
            from runtime.generation.command import run

        run(options, status)
