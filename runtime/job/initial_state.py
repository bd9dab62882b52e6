"""The start of training from another run's weights, and the files beside the checkpoints of every run.

From a checkpoint of `planner convert`, or from any with `--finetune`, only the weights are used. Training
then begins at iteration 0 with a new optimizer and the first sample.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from costmodels import Lora, ModelSpec
from costmodels.errors import InputError
from costmodels.paths import is_folder, resolved
from runtime import checkpoint
from runtime.checkpoint.run_file import check_same_model
from runtime.data import Tokenizer
from runtime.data.record import Record, recorded_tokenizer
from runtime.huggingface.companions import copy_companions, read_companions, write_companions
from runtime.huggingface.configs import differences
from runtime.huggingface.folder_kind import COMPANIONS
from runtime.huggingface.tokenizer_files import write_tokenizer
from runtime.job.datasets import tokenizer_for
from runtime.job.job_folders import begins_anew, iteration_of
from runtime.parallel.ranks import run_on_first_rank
from runtime.settings.training_options import DataOptions, OutputOptions
from runtime.train.trainer import Trainer


def load_weights(folder: str | Path, trainer: Trainer, spec: ModelSpec, iteration: int) -> None:
    """Read the weights of a checkpoint into `trainer`; every rank calls it.

    Samples may have another length than in the checkpoint's run, up to the model's longest position.

    Raises:
        InputError: a file is missing or damaged, or the checkpoint is of another model.
    """
    source = checkpoint.iteration_folder(folder, iteration)
    stored = run_on_first_rank(lambda: checkpoint.read_run(source).model)
    _check_weights(source, stored, spec)
    checkpoint.load_weights_only(folder, trainer, stored, iteration)


def _check_weights(source: Path, stored: ModelSpec, spec: ModelSpec) -> None:
    different = [f"{name} {getattr(stored, name)}" for name in differences(stored, spec)]
    if stored.lora is not None:
        check_adapters(source, stored, spec)
    if different:
        raise InputError(
            f"checkpoint {source} is of another model ({', '.join(different)}); give the same model"
        )
    if spec.mtp_depths > stored.mtp_depths:
        raise InputError(
            f"--mtp-num-layers {spec.mtp_depths}: checkpoint {source} has weights of {stored.mtp_depths} "
            "MTP modules; ask for at most as many, or leave the flag out"
        )


def check_adapters(source: Path, stored: ModelSpec, spec: ModelSpec) -> None:
    """Raise `InputError` where a checkpoint holds other adapters than a job trains, or none."""
    if stored.lora == spec.lora:
        return
    wanted = "without --lora-rank" if spec.lora is None else f"with {_lora_flags(spec.lora)}"
    if stored.lora is None:
        raise InputError(
            f"checkpoint {source} holds no adapters, and this job trains {wanted}; give --finetune, which "
            "begins with its weights, or leave --lora-rank out"
        )
    raise InputError(
        f"checkpoint {source} holds adapters ({_lora_flags(stored.lora)}), and this job trains {wanted}; "
        "give the same, or merge them first (planner convert --merge-lora)"
    )


def _lora_flags(lora: Lora) -> str:
    targets = ",".join(lora.targets)
    base = "" if lora.quantize_base is None else f" --quantize-base {lora.quantize_base}"
    return f"--lora-rank {lora.rank} --lora-alpha {lora.alpha:g} --lora-targets {targets}{base}"


def check_loaded(output: OutputOptions, spec: ModelSpec) -> None:
    """Raise `InputError` where the initial checkpoint of a run of `spec` has another model."""
    iteration = iteration_of(output)
    if iteration is None or output.load is None:
        if spec.lora is not None:
            raise InputError(
                f"--lora-rank {spec.lora.rank}: adapters are added to a trained model; give --load FOLDER of "
                "its checkpoint (planner convert makes one of a Hugging Face model)"
            )
        return
    source = checkpoint.iteration_folder(output.load, iteration)
    run = checkpoint.read_run(source)
    if begins_anew(output, iteration):
        _check_weights(source, run.model, spec)
    else:
        check_adapters(source, run.model, spec)
        check_same_model(source, run, spec)


def known_tokenizer(
    options: DataOptions, vocab: int, own: Tokenizer | None = None, record: Record | None = None
) -> Tokenizer | None:
    """The tokenizer of the training data: the one in flags or in its `record`, or that of the default corpus.

    Args:
        own: the model's tokenizer, which the default corpus uses.
    """
    named = (options.tokenizer_type, options.vocab_file, options.merge_file, options.tokenizer_model)
    prepared = [field.name for field in fields(options) if field.name.endswith("data_path")]
    if not any(named) and any(getattr(options, name) for name in prepared):
        try:
            return None if record is None else recorded_tokenizer(record)
        except InputError:
            return None  # The tokenizer's files are gone.
    return tokenizer_for(options, vocab, own)


def keep_companions(
    output: OutputOptions,
    data: DataOptions,
    spec: ModelSpec,
    own: Tokenizer | None = None,
    record: Record | None = None,
) -> None:
    """Write the files that generation and export need beside the checkpoints of this run; one rank calls it.

    These are config.json, tokenizer and licence of the loaded model, or else the tokenizer of the training
    data, if known.
    """
    if output.save is None:
        return
    target, tokenizer = Path(output.save) / COMPANIONS, known_tokenizer(data, spec.vocab, own, record)
    try:
        if tokenizer is not None:
            write_tokenizer(target, tokenizer)
        source = None if output.load is None else Path(output.load) / COMPANIONS
        if source is None or not is_folder(source) or resolved(source) == resolved(target):
            return
        carried = read_companions(source)
        if carried is not None and not differences(carried.spec, spec):
            write_companions(target, carried.config, carried.names)
        copy_companions(source, target)
    except OSError as error:
        raise InputError(f"--save {output.save}: {target} cannot be written: {error.strerror}") from None
