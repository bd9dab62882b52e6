"""`planner generate`: in this process, or on several ranks of this machine, with text shown as it is
generated."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import typer

from costmodels.catalogue.local_machine import CONTEXT_BYTES, torch_build
from costmodels.errors import InputError
from planner.options.flags import arguments
from runtime.generation.generate_options import GenerateOptions
from runtime.generation.generator import Completion, Generator
from runtime.generation.sampling import Sampling
from runtime.generation.stage import Split
from runtime.generation.text import Stream, text_of
from runtime.huggingface.stored_model import open_model
from runtime.job.devices import local_device_count, torch_device
from runtime.launch.supervisor import JobStopped, run_job
from runtime.launch.torchrun import torchrun_command
from runtime.logs.console import PROGRESS, progress, say
from runtime.model.number_formats import WEIGHT_DTYPES
from runtime.parallel.accelerator import accelerator_type
from runtime.parallel.ranks import (
    Ranks,
    is_lost_connection,
    leave_process_group,
    run_on_first_rank,
    run_together,
    start_process_group,
)
from runtime.settings.checks import check_host, check_job

EVENTS_VARIABLE = "PLANNER_GENERATE_EVENTS"
"""Environment variable that makes ranks print pieces of text as JSON lines for their parent process."""

TIMEOUT_MINUTES = 30.0
"""Minutes after which a rank without an answer gives up; reading a large model takes long."""


class StatusDisplay(Protocol):
    """A display of the current work while there is no text yet."""

    def tell(self, what: str) -> None:
        """Show the current work."""

    def clear(self) -> None:
        """Remove the display before text is shown."""


class _FirstRank:
    """A display that sends the first rank's messages to its parent process."""

    def tell(self, what: str) -> None:
        if dist.get_rank() == 0:
            progress(what)

    def clear(self) -> None:
        """Do nothing, as the parent process removes its own display."""


def run(options: GenerateOptions, waiting: StatusDisplay) -> None:
    """Continue the prompts, as `options` say."""
    options.check()
    prompts = options.prompts()
    if options.world_size == 1:
        on_cpu = options.device == "cpu" or not local_device_count()
        here = accelerator_type() or "cpu"
        if options.device not in (None, "cpu") and (on_cpu or options.device != here):
            raise InputError(f"--device {options.device}: this machine has no such devices; leave it out")
        generate(options, prompts, torch.device("cpu" if on_cpu else here), waiting)
    else:
        _start_ranks(options, waiting)


def run_rank(options: GenerateOptions) -> None:
    """Continue prompts on the ranks that torchrun started."""
    options.check()
    prompts = options.prompts()
    ranks = Ranks.from_environment()
    if ranks.world_size != options.world_size:
        raise InputError(
            f"torchrun started {ranks.world_size} ranks, but --tensor-model-parallel-size "
            f"{options.tensor_model_parallel_size} times --pipeline-model-parallel-size "
            f"{options.pipeline_model_parallel_size} is {options.world_size}; start as many"
        )
    device = torch_device(options.device == "cpu" or not local_device_count(), ranks)
    start_process_group(ranks, device, TIMEOUT_MINUTES)
    try:
        generate(options, prompts, device, _FirstRank())
    except InputError:
        dist.destroy_process_group()
        raise
    except RuntimeError as error:
        if not is_lost_connection(error):
            raise
        say(f"runtime.generation: rank {ranks.rank} lost the connection to another rank", sys.stderr)
        raise typer.Exit(1) from None
    leave_process_group(device)


def generate(
    options: GenerateOptions, prompts: list[str], device: torch.device, waiting: StatusDisplay
) -> None:
    """Continue `prompts` on this rank; the first one prints."""
    waiting.tell("reading the model")
    generator = _generator(options, device)
    first = not dist.is_initialized() or dist.get_rank() == 0
    printer = None
    if first and not options.json:
        waiting.clear()
        printer = _Printer(generator, prompts)
    else:
        waiting.tell("generating")
    completions = generator.complete(
        prompts,
        options.max_new_tokens,
        Sampling(options.temperature, options.top_k, options.top_p, options.seed),
        None if printer is None else printer.tokens,
        ignore_end=options.ignore_eos,
        cached=not options.no_cache,
    )
    if printer is not None:
        printer.end(completions)
    elif first:
        waiting.clear()
        for completion in completions:
            _show(json.dumps(completion._asdict(), ensure_ascii=False) + "\n")


def _generator(options: GenerateOptions, device: torch.device) -> Generator:
    split = _split(options)

    def build(verified: bool) -> Generator:
        files = open_model(options.load, options.ckpt_step, verify=not verified)
        text = text_of(
            files,
            options.tokenizer_type,
            options.vocab_file,
            options.merge_file,
            options.tokenizer_model,
            special_tokens=not options.no_special_tokens,
        )
        usual = "fp32" if device.type == "cpu" else "bf16"
        return Generator(files, WEIGHT_DTYPES[options.dtype or usual], device, split, text)

    if not dist.is_initialized():
        return build(verified=False)
    # One rank compares the files with their checksums.
    run_on_first_rank(lambda: open_model(options.load, options.ckpt_step) and None)
    return run_together(lambda: build(verified=True))


class _Printer:
    """A printer that shows a single text while it grows, and several texts when all are complete."""

    def __init__(self, generator: Generator, prompts: list[str]) -> None:
        self.alone = len(prompts) == 1
        self.stream = Stream(generator.text)
        self.ends = generator.text.ends
        if self.alone:
            _show(prompts[0])

    def tokens(self, tokens: list[int | None]) -> None:
        """Take the next token of each row."""
        if self.alone and tokens[0] is not None and tokens[0] not in self.ends:
            _show(self.stream.add(tokens[0]))

    def end(self, completions: list[Completion]) -> None:
        """Show the remaining text."""
        if self.alone:
            _show(completions[0].text[len(self.stream.shown) :] + "\n")
            return
        for number, completion in enumerate(completions, start=1):
            _show(f"--- {number}\n{completion.prompt}{completion.text}\n")


def _show(piece: str) -> None:
    if EVENTS_VARIABLE in os.environ:
        print(json.dumps({"piece": piece}), flush=True)
    else:
        print(piece, end="", flush=True)


def _start_ranks(options: GenerateOptions, waiting: StatusDisplay) -> None:
    """Run torchrun on this machine and show the messages of its first rank."""
    ranks = options.world_size
    gpus = 0 if options.device == "cpu" else local_device_count()
    if gpus and ranks > gpus:
        raise InputError(f"{ranks} ranks on a machine of {gpus} GPUs; split the model over at most {gpus}")
    _check_split(options, on_cpu=not gpus)
    command = torchrun_command(ranks, arguments(options), "runtime.generation")
    waiting.tell(f"starting {ranks} ranks")

    def pass_on(line: str) -> None:
        """Show a piece of text, or the current work; other lines are kept for error messages."""
        try:
            piece = json.loads(line)["piece"]
        except (ValueError, KeyError, TypeError):
            phase = PROGRESS.fullmatch(line)
            if phase:
                waiting.tell(phase[1])
            else:
                say(line, sys.stderr)
            return
        waiting.clear()
        print(piece, end="", flush=True)

    with tempfile.TemporaryDirectory(prefix="planner-generate-", ignore_cleanup_errors=True) as folder:
        os.environ[EVENTS_VARIABLE] = "1"
        try:
            outcome = run_job(command, ranks, Path(folder), pass_on, _ignore)
        except JobStopped as stop:
            say(f"\nplanner: stopped by {stop.number.name}; all ranks have ended", sys.stderr)
            raise typer.Exit(128 + stop.number) from None
        finally:
            del os.environ[EVENTS_VARIABLE]
    if outcome.exit_code:
        print(f"planner: error: {outcome.message.split('; all ranks')[0]}", file=sys.stderr)
        raise typer.Exit(outcome.exit_code)


def _check_split(options: GenerateOptions, on_cpu: bool) -> None:
    """Raise `InputError`, before ranks start, if the stored model cannot be split in this way."""
    split = _split(options)
    spec = open_model(options.load, options.ckpt_step, verify=False).spec
    check_job(spec, split.layout(spec), split.world_size)
    if on_cpu:
        words = f"{options.tensor_model_parallel_size} x {options.pipeline_model_parallel_size}"
        weights = spec.parameters * WEIGHT_DTYPES[options.dtype or "fp32"].itemsize / split.world_size
        check_host(split.world_size, f"--tp x --pp {words}", CONTEXT_BYTES[torch_build()] + weights)


def _split(options: GenerateOptions) -> Split:
    return Split(
        options.tensor_model_parallel_size,
        options.pipeline_model_parallel_size,
        options.expert_model_parallel_size,
    )


def _ignore(_: dict[str, Any]) -> None:
    """Ignore metrics, which generation does not have."""
