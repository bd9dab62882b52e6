"""Checks of the folders that a job loads from and saves in, before PyTorch is loaded."""

from __future__ import annotations

from pathlib import Path

from costmodels.errors import InputError
from costmodels.paths import exists, is_folder, resolved
from planner.inputs.huggingface.hub import cached_folder, hub_model
from runtime import checkpoint
from runtime.huggingface.folder_kind import is_hugging_face
from runtime.processes.start_variables import is_elastic, is_restarted
from runtime.settings.training_options import OutputOptions


def check_load(output: OutputOptions) -> None:
    """Raise `InputError` where `--load` or `--save` names a Hugging Face model, which is not a checkpoint."""
    named = None if output.load is None else hub_model(output.load)
    in_cache = named is not None and cached_folder(named) is not None
    if output.load is not None and (in_cache or is_hugging_face(output.load)):
        raise InputError(
            f"--load {output.load}: a Hugging Face model; turn it into a checkpoint first: planner convert "
            f"--input {output.load} --output FOLDER"
        )
    if output.save is not None and is_hugging_face(output.save):
        raise InputError(f"--save {output.save}: holds a Hugging Face model; give a folder of its own")


def check_save(output: OutputOptions) -> None:
    """Raise `InputError` where a new run would save among the checkpoints of another run.

    A restarted job continues from its own checkpoints.
    """
    if output.save is None or is_restarted() or is_elastic():
        return
    if output.load is not None and resolved(output.load) == resolved(output.save):
        return
    there = checkpoint.iterations(output.save)
    if there:
        raise InputError(
            f"--save {output.save}: holds checkpoints of an earlier run (the newest: iteration {there[-1]}), "
            f"and those of this one would lie among them; go on from them with --load {output.save}, or give "
            "a fresh folder"
        )


def iteration_of(output: OutputOptions) -> int | None:
    """The iteration whose checkpoint `--load` continues; None where the run may begin anew.

    Raises:
        InputError: there is no checkpoint, and no flag allows that.
    """
    if output.load is None:
        return None
    check_load(output)
    folder = Path(output.load)
    if exists(folder) and not is_folder(folder):
        raise InputError(f"--load {output.load}: a file; name the folder that --save wrote checkpoints into")
    iteration = checkpoint.iteration_to_load(folder, output.ckpt_step)
    if iteration is not None or output.load_or_start:
        return iteration
    what = "holds no checkpoint" if is_folder(folder) else "there is no such folder of checkpoints"
    if output.save is None or resolved(output.save) != resolved(folder):
        raise InputError(
            f"--load {output.load}: {what}; give another folder, or --load-or-start to begin anew where "
            "there is none"
        )
    if output.exit_on_missing_checkpoint:
        raise InputError(f"--load {output.load}: {what}, and --exit-on-missing-checkpoint is given")
    return None


def begins_anew(output: OutputOptions, iteration: int) -> bool:
    """Return whether a run that loads the checkpoint of `iteration` takes its weights only."""
    assert output.load is not None
    run = checkpoint.read_run(checkpoint.iteration_folder(output.load, iteration))
    return output.finetune or run.run_state().get("weights_only") is True
