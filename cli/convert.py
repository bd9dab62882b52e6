"""`planner convert`: Hugging Face models to checkpoints and back."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from cli.waiting import waiting
from costmodels.dataclass import dataclass
from costmodels.errors import InputError
from planner.options.flags import flag, flag_groups
from runtime.huggingface.folder_kind import check_model_folder, is_hugging_face, model_folder
from runtime.huggingface.new_folder import check_new

MOST_NAMES = 3
"""Largest number of tensors that a note names."""


@dataclass(frozen=True)
class ConvertOptions:
    """The model to convert and the format to write."""

    input: str = flag(
        "",
        "To make a checkpoint for --load: folder of a Hugging Face model (config.json and safetensors "
        "files), or its id in the cache of the Hub. To make a Hugging Face model: folder of checkpoints.",
        "--input",
        "--load-dir",
        metavar="FOLDER",
    )
    output: str = flag("", "New folder to write.", "--output", "--save-dir", metavar="FOLDER")
    ckpt_step: int | None = flag(None, "Iteration of the checkpoint; the newest when not given.")
    dtype: str | None = flag(None, "fp32, bf16 or fp16; every tensor keeps its number format when not given.")
    max_shard_size: str | None = flag(None, "Largest safetensors file, such as 5GB (the default) or 500MB.")
    merge_lora: bool = flag(
        False,
        "Merge adapters into their model; without the flag they become a folder of peft.",
    )
    seq_length: int | None = flag(
        None, "Sequence length to write into the checkpoint of a Hugging Face model."
    )


@flag_groups(options=ConvertOptions)
def convert(options: ConvertOptions) -> None:
    """Turn a Hugging Face model into a checkpoint of this runtime, or a checkpoint into such a model.

    GPT-2, Llama, Mistral, Mixtral, Qwen 2 and 3 (with experts too), DeepSeek V2 and V3. Tensors are converted
    one by one, so memory holds only a few of them. Tokenizer files are copied too.
    """
    for name in ("input", "output"):
        if not getattr(options, name):
            raise InputError(f"--{name}: none given: name a folder")
    options = replace(options, input=model_folder(options.input))
    check_model_folder(options.input, None if is_hugging_face(options.input) else options.ckpt_step)
    check_new(Path(options.output), "--output")
    # Imported here so that wrong input need not wait for PyTorch.
    from runtime import convert as conversion
    from runtime.huggingface.stored_model import has_adapters

    start = time.perf_counter()
    if is_hugging_face(options.input):
        for flag_name in ("ckpt_step", "max_shard_size", "merge_lora"):
            given = getattr(options, flag_name)
            if given not in (None, False):
                value = "" if given is True else f" {given}"
                raise InputError(
                    f"--{flag_name.replace('_', '-')}{value}: of no use here, as "
                    f"--input {options.input} is a Hugging Face model; leave it out"
                )
        with waiting("converting"):
            done = conversion.from_hugging_face(
                options.input, options.output, dtype=options.dtype, seq=options.seq_length
            )
        kind = "checkpoint"
    else:
        if options.seq_length is not None:
            raise InputError(
                f"--seq-length {options.seq_length}: of no use here, as --input {options.input} is no "
                "Hugging Face model; leave it out"
            )
        size = options.max_shard_size or conversion.MAX_SHARD_SIZE
        if has_adapters(options.input, options.ckpt_step) and not options.merge_lora:
            if options.max_shard_size is not None:
                raise InputError(
                    f"--max-shard-size {options.max_shard_size}: of no use here, as adapters are one file; "
                    "add --merge-lora, or leave it out"
                )
            with waiting("converting"):
                done = conversion.to_peft(options.input, options.output, options.ckpt_step, options.dtype)
            kind = "adapters for peft"
        else:
            with waiting("converting"):
                done = conversion.to_hugging_face(
                    options.input, options.output, options.ckpt_step, options.dtype, size
                )
            kind = "Hugging Face model"
    seconds = time.perf_counter() - start
    if done.left_out:
        more = len(done.left_out) - MOST_NAMES
        names = ", ".join(done.left_out[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
        print(f"left out, as the model has no such part here: {names}")
    print(
        f"{done.folder}: {kind} of {done.spec.name}, {done.spec.parameters / 1e6:,.1f} M parameters in "
        f"{done.tensors:,} tensors, {done.bytes / 1e9:,.2f} GB, in {seconds:.1f} s"
    )
