"""Flags of training, with Megatron-LM's spelling; `planner launch` and `runtime.pretrain` share them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from costmodels import Layout
from costmodels.errors import InputError
from costmodels.layout import SPLIT_BACKWARD
from planner.flags import flag
from runtime.learning_rate import DECAY_STYLES, LearningRate


@dataclass(frozen=True)
class TrainingOptions:
    """Optimizer, schedule and length of a run."""

    train_iters: int = flag(100, "Optimizer steps to run.")
    lr: float = flag(6.0e-4, "Peak learning rate.")
    min_lr: float = flag(0.0, "Learning rate after decay.")
    lr_decay_style: str = flag("cosine", f"Decay of the learning rate: {', '.join(DECAY_STYLES)}.")
    lr_decay_iters: int | None = flag(None, "Iterations of the decay; all of the run when not given.")
    lr_warmup_iters: int | None = flag(None, "Iterations of linear warm-up.")
    lr_warmup_fraction: float | None = flag(None, "Warm-up as a share of the decay iterations.")
    weight_decay: float = flag(0.01, "Weight decay of matrices; biases and norms have none.")
    adam_beta1: float = flag(0.9, "Decay of the first moment.")
    adam_beta2: float = flag(0.999, "Decay of the second moment.")
    adam_eps: float = flag(1e-8, "Term added to the denominator of Adam.")
    clip_grad: float = flag(1.0, "Largest global gradient norm; 0 turns clipping off.")
    seed: int = flag(1234, "Seed of initial weights and data order.")
    init_method_std: float = flag(0.02, "Standard deviation of initial weights.")
    loss_scale: float | None = flag(None, "Constant loss scale of fp16; a dynamic one when not given.")
    initial_loss_scale: float = flag(2.0**32, "First dynamic loss scale of fp16.")
    min_loss_scale: float = flag(1.0, "Smallest dynamic loss scale.")
    loss_scale_window: int = flag(1000, "Steps in a row without overflow that double the loss scale.")
    hysteresis: int = flag(2, "Overflows until the loss scale halves.")
    compile: bool = flag(False, "Compile the layers with torch.compile; the default on GPUs.")
    no_compile: bool = flag(False, "Do not compile the layers; the default on CPUs.")
    attention_dropout: float = flag(0.0, "Only 0: a layout must not change the loss.")
    hidden_dropout: float = flag(0.0, "Only 0: a layout must not change the loss.")

    def check(self) -> None:
        """Raise `InputError` for values that cannot be trained with."""
        if self.train_iters < 1:
            raise InputError(f"--train-iters {self.train_iters}: must be at least 1")
        if self.lr_decay_style not in DECAY_STYLES:
            raise InputError(
                f"--lr-decay-style {self.lr_decay_style}: choose one of {', '.join(DECAY_STYLES)}"
            )
        if not (0 < self.lr < math.inf and 0 <= self.min_lr <= self.lr):
            raise InputError(f"--lr {self.lr} --min-lr {self.min_lr}: need 0 <= min-lr <= lr and lr > 0")
        for name in ("attention_dropout", "hidden_dropout"):
            if getattr(self, name):
                raise InputError(
                    f"--{name.replace('_', '-')} {getattr(self, name)}: must be 0, as the loss must not "
                    "depend on the layout"
                )
        if self.lr_decay_iters is not None and self.lr_decay_iters < 1:
            raise InputError(f"--lr-decay-iters {self.lr_decay_iters}: must be at least 1")
        if self.lr_warmup_fraction is not None and not 0 <= self.lr_warmup_fraction < 1:
            raise InputError(
                f"--lr-warmup-fraction {self.lr_warmup_fraction}: must be at least 0 and below 1"
            )
        if self.lr_warmup_iters is not None and self.lr_warmup_fraction is not None:
            raise InputError("--lr-warmup-iters and --lr-warmup-fraction exclude each other; give one")
        for name in ("clip_grad", "weight_decay"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InputError(
                    f"--{name.replace('_', '-')} {getattr(self, name)}: must be 0 (off) or positive"
                )
        for name in ("adam_eps", "init_method_std", "loss_scale", "initial_loss_scale", "min_loss_scale"):
            if getattr(self, name) is None:
                continue
            if not 0 < getattr(self, name) < math.inf:
                raise InputError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be positive")
        if self.initial_loss_scale < self.min_loss_scale:
            raise InputError(
                f"--initial-loss-scale {self.initial_loss_scale}: must be at least --min-loss-scale "
                f"{self.min_loss_scale}"
            )
        for name in ("loss_scale_window", "hysteresis"):
            if getattr(self, name) < 1:
                raise InputError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be at least 1")
        if self.compile and self.no_compile:
            raise InputError("--compile and --no-compile exclude each other; give one")
        for name, value in (("beta1", self.adam_beta1), ("beta2", self.adam_beta2)):
            if not 0 <= value < 1:
                raise InputError(f"--adam-{name} {value}: must be at least 0 and below 1")
        schedule = self.learning_rate()
        if not 0 <= schedule.warmup_iters < schedule.decay_iters:
            raise InputError(
                f"warm-up of {schedule.warmup_iters} iterations does not fit into {schedule.decay_iters} "
                "decay iterations; lower --lr-warmup-iters or raise --lr-decay-iters"
            )

    def compiles(self, layout: Layout, on_gpu: bool) -> bool:
        """Whether the layers are compiled: by default on GPUs, where the schedule can run compiled layers.

        Raises:
            InputError: compilation is asked for with a schedule that splits backward.
        """
        splits = layout.schedule in SPLIT_BACKWARD
        if self.compile and splits:
            raise InputError(
                f"--compile: schedule {layout.schedule} splits backward, which PyTorch does not do with "
                "compiled layers; leave the flag out, or pin schedule 1f1b or interleaved"
            )
        return self.compile or (on_gpu and not splits and not self.no_compile)

    def learning_rate(self) -> LearningRate:
        """The schedule that the flags describe."""
        decay = self.train_iters if self.lr_decay_iters is None else self.lr_decay_iters
        warmup = self.lr_warmup_iters or 0
        if self.lr_warmup_fraction is not None:
            warmup = int(self.lr_warmup_fraction * decay)
        return LearningRate(self.lr, self.min_lr, self.lr_decay_style, warmup, decay)


@dataclass(frozen=True)
class DataOptions:
    """Where the text comes from."""

    data_path: list[str] = flag(
        [],
        "Prefix of a .bin/.idx pair, or several with weights, as '0.3 PREFIX 0.7 PREFIX' in quotes; the "
        "standard library of Python when not given.",
    )
    split: str = flag("969,30,1", "Shares of training, validation and test.")
    tokenizer_type: str | None = flag(
        None, "GPT2BPETokenizer, HuggingFaceTokenizer or ByteTokenizer; used for the default corpus."
    )
    vocab_file: str | None = flag(None, "GPT-2's vocab.json.")
    merge_file: str | None = flag(None, "GPT-2's merges.txt.")
    tokenizer_model: str | None = flag(None, "tokenizer.json of a Hugging Face tokenizer.")


@dataclass(frozen=True)
class OutputOptions:
    """What a run writes, and when."""

    log_interval: int = flag(10, "Iterations between log lines.")
    eval_interval: int = flag(100, "Iterations between evaluations on the validation split.")
    eval_iters: int = flag(10, "Global batches of one evaluation; 0 turns evaluation off.")
    save: str | None = flag(None, "Folder to save checkpoints in.", metavar="FOLDER")
    load: str | None = flag(None, "Folder to resume from, if it holds a checkpoint.", metavar="FOLDER")
    save_interval: int | None = flag(None, "Iterations between checkpoints; the end of the run always.")
    exit_interval: int | None = flag(None, "Stop after the first iteration that this divides.")
    log_dir: str | None = flag(None, "Folder for metrics.jsonl and the plan.", metavar="FOLDER")
    tensorboard_dir: str | None = flag(None, "Folder for TensorBoard event files.", metavar="FOLDER")

    def check(self) -> None:
        """Raise `InputError` for intervals that make no sense."""
        for name in ("log_interval", "eval_interval", "save_interval", "exit_interval"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"--{name.replace('_', '-')} {value}: must be at least 1")
        if self.eval_iters < 0:
            raise InputError(f"--eval-iters {self.eval_iters}: must be 0 (off) or positive")
        if self.save_interval is not None and self.save is None:
            raise InputError("--save-interval needs --save FOLDER")
