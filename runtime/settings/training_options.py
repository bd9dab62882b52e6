"""Flags of training, with Megatron-LM's spelling; `planner launch` and `runtime.pretrain` share them."""

from __future__ import annotations

from typing import ClassVar

from costmodels import Layout
from costmodels.dataclass import dataclass
from costmodels.errors import InputError
from costmodels.spec.layout import SPLIT_BACKWARD
from costmodels.spelling import or_nearest
from planner.options.flags import flag
from planner.options.limits import (
    AT_LEAST_1,
    NOT_NEGATIVE,
    OFF_OR_POSITIVE,
    OFF_OR_STEPS,
    POSITIVE,
    SHARE,
    STEPS,
    Bounds,
    check_bounds,
)
from runtime.settings.batch_ramp import BatchRamp, batch_ramp, check_numbers
from runtime.settings.job_rules import compile_refusal
from runtime.settings.learning_rate import (
    DECAY_STYLES,
    WEIGHT_DECAY_STYLES,
    WSD_DECAY_STYLES,
    LearningRate,
    WeightDecay,
)

LOAD_BALANCING = ("aux_loss", "seq_aux_loss", "none")
"""Units over which a balancing loss is computed: each microbatch, each sequence, or none."""

LOSS_REDUCTIONS = ("mean", "sum")

LOG_FORMATS = ("megatron", "mindformers")
"""Log formats, by the software whose step lines they use."""

MUON_SCALE_MODES = ("spectral", "shape_scaling", "unit_rms_norm")
"""Scales of Muon's update of a matrix of r rows and c columns, in Megatron-LM's words.

spectral: sqrt(max(r, c)); with the factor 0.2 the `match_rms_adamw` of PyTorch (arXiv:2502.16982, eq. 4);
shape_scaling: sqrt(max(1, r / c)); with the factor 1 the `original` of PyTorch;
unit_rms_norm: sqrt(r / c).
"""

ATTENTION_KERNELS = ("auto", "flash", "cudnn", "efficient", "fa3", "fa4")
"""Kernels of attention on GPUs, by PyTorch's names of backends and of FlashAttention's packages."""

CLIP_GRAD = 1.0
"""Default largest global gradient norm."""


@dataclass(frozen=True)
class TrainingOptions:
    """Optimizer, schedule and length of a run."""

    SECTIONS: ClassVar[dict[str, str]] = {
        "train_iters": "Training",
        "lr": "Learning rate",
        "weight_decay": "Optimizer",
        "loss_reduction": "Training",
        "clip_grad": "Optimizer",
        "moe_aux_loss_coeff": "Experts",
        "seed": "Training",
        "loss_scale": "Precision",
        "compile": "Training",
    }

    train_iters: int = flag(100, "Optimizer steps to run.", within=STEPS)
    rampup_batch_size: tuple[int, int, int] | None = flag(
        None,
        "Start the global batch at START sequences and add INCREMENT in even steps, until the plan's "
        "batch is reached after SAMPLES sequences. Schedules still count iterations.",
        metavar="START INCREMENT SAMPLES",
    )
    lr: float = flag(6.0e-4, "Peak learning rate.", within=POSITIVE)
    min_lr: float = flag(0.0, "Learning rate after decay.", within=NOT_NEGATIVE)
    lr_decay_style: str = flag("cosine", f"Decay of the learning rate: {', '.join(DECAY_STYLES)}.")
    lr_decay_iters: int | None = flag(
        None, "Iterations of the decay; all of the run when not given.", within=AT_LEAST_1
    )
    lr_wsd_decay_style: str = flag("exponential", f"Last part of WSD: {', '.join(WSD_DECAY_STYLES)}.")
    lr_wsd_decay_iters: int | None = flag(None, "Iterations of the last part of WSD.", within=AT_LEAST_1)
    lr_warmup_iters: int | None = flag(None, "Iterations of linear warm-up.", within=NOT_NEGATIVE)
    lr_warmup_fraction: float | None = flag(None, "Warm-up as a share of the decay iterations.", within=SHARE)
    lr_warmup_init: float = flag(0.0, "Learning rate that warm-up rises from.", within=NOT_NEGATIVE)
    weight_decay: float = flag(
        0.01, "Weight decay of matrices; biases and norms have none.", within=OFF_OR_POSITIVE
    )
    start_weight_decay: float | None = flag(
        None, "Weight decay of the first step, if it is to grow.", within=OFF_OR_POSITIVE
    )
    end_weight_decay: float | None = flag(
        None, "Weight decay of the last step, if it is to grow.", within=OFF_OR_POSITIVE
    )
    weight_decay_incr_style: str = flag(
        "constant", f"Growth of weight decay over the run: {', '.join(WEIGHT_DECAY_STYLES)}."
    )
    no_decoupled_weight_decay: bool = flag(
        False, "Adam as first published, with weight decay as a part of the gradient, instead of AdamW."
    )
    adam_beta1: float = flag(0.9, "Decay of the first moment.", within=SHARE)
    adam_beta2: float = flag(0.999, "Decay of the second moment.", within=SHARE)
    adam_eps: float = flag(1e-8, "Term added to the denominator of Adam.", within=POSITIVE)
    sgd_momentum: float = flag(0.9, "Momentum of SGD.", within=SHARE)
    muon_momentum: float = flag(0.95, "Momentum of Muon.", within=SHARE)
    no_muon_nesterov: bool = flag(False, "Muon without Nesterov's look ahead.")
    muon_num_ns_steps: int = flag(
        5, "Newton-Schulz steps that make Muon's update orthogonal.", within=Bounds("at least 1", 1, 1000)
    )
    muon_scale_mode: str = flag(
        "spectral",
        f"Scale of Muon's update: {', '.join(MUON_SCALE_MODES)}. PyTorch calls spectral match_rms_adamw, "
        "and shape_scaling with a factor of 1 original.",
    )
    muon_extra_scale_factor: float = flag(
        0.2,
        "Extra factor on Muon's update; with 0.2, learning rates of Adam suit it.",
        within=POSITIVE,
    )
    came_beta1: float = flag(0.9, "Decay of CAME's momentum.", within=SHARE)
    came_decay_rate: float = flag(
        0.8,
        "Step t of CAME keeps 1 - t^-RATE of the means of squared gradients.",
        metavar="RATE",
        within=Bounds("at least 0 and at most 1", 0, 1),
    )
    came_beta3: float = flag(0.99, "Decay of CAME's means of instability.", within=SHARE)
    came_clip_threshold: float = flag(
        1.0,
        "Largest root mean square of CAME's update of a weight, before the learning rate.",
        within=POSITIVE,
    )
    loss_reduction: str = flag(
        "mean",
        f"Objective over the tokens of a batch: {', '.join(LOSS_REDUCTIONS)}. The reported loss is always "
        "the mean; the gradient norm is that of the objective.",
    )
    clip_grad: float | None = flag(
        None,
        f"Largest global gradient norm; 0 turns clipping off, {CLIP_GRAD} when not given.",
        within=OFF_OR_POSITIVE,
    )
    clip_grad_value: float | None = flag(
        None,
        "Largest absolute value of a gradient's element, instead of clipping by norm.",
        within=POSITIVE,
    )
    moe_aux_loss_coeff: float = flag(
        0.0, "Weight of the loss that balances the load of experts.", within=OFF_OR_POSITIVE
    )
    moe_z_loss_coeff: float = flag(
        0.0, "Weight of the loss that keeps router logits small.", within=OFF_OR_POSITIVE
    )
    moe_router_load_balancing_type: str = flag(
        "aux_loss",
        "Scope of the balancing loss (a microbatch, each sequence, or no such loss): "
        f"{', '.join(LOAD_BALANCING)}.",
    )
    moe_router_bias_update_rate: float = flag(
        1e-3, "Step of expert biases towards an even load.", within=OFF_OR_POSITIVE
    )
    seed: int = flag(
        1234,
        "Seed of initial weights and data order.",
        within=Bounds(f"a whole number from 0 to {2**32 - 1}", 0, 2**32 - 1),
    )
    init_method_std: float = flag(0.02, "Standard deviation of initial weights.", within=POSITIVE)
    loss_scale: float | None = flag(
        None, "Constant loss scale of fp16; a dynamic one when not given.", within=POSITIVE
    )
    initial_loss_scale: float = flag(
        2.0**16,
        "First dynamic loss scale of fp16; Megatron-LM's 2^32 skips the first steps while it falls.",
        within=POSITIVE,
    )
    min_loss_scale: float = flag(1.0, "Smallest dynamic loss scale.", within=POSITIVE)
    loss_scale_window: int = flag(
        1000, "Steps in a row without overflow that double the loss scale.", within=AT_LEAST_1
    )
    hysteresis: int = flag(2, "Overflows until the loss scale halves.", within=AT_LEAST_1)
    compile: bool = flag(False, "Compile the layers with torch.compile; the default on GPUs.")
    no_compile: bool = flag(False, "Do not compile the layers; the default on CPUs.")
    attention_kernel: str = flag(
        "auto",
        f"Kernel of attention on GPUs: {', '.join(ATTENTION_KERNELS)}. auto measures at the start those that "
        "PyTorch has, on the job's own shapes, and takes the fastest one that is right; fa3 and fa4 need the "
        "package flash_attn_interface or flash_attn.",
        metavar="NAME",
    )
    attention_dropout: float = flag(
        0.0, "Only 0 is allowed, so that a layout does not change the loss.", within=SHARE
    )
    hidden_dropout: float = flag(0.0, "Only 0: a layout must not change the loss.", within=SHARE)

    def check(self) -> None:
        """Raise `InputError` for values with which training is impossible."""
        check_bounds(self)
        if self.min_lr > self.lr:
            raise InputError(f"--lr {self.lr} --min-lr {self.min_lr}: need 0 <= min-lr <= lr and lr > 0")
        for name in ("attention_dropout", "hidden_dropout"):
            if getattr(self, name):
                raise self._refusal(name, "must be 0, as the loss must not depend on the layout")
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                hint = or_nearest(str(value), choices)
                raise self._refusal(name, f"choose one of {', '.join(choices)}{hint}")
        if self.initial_loss_scale < self.min_loss_scale:
            raise self._refusal(
                "initial_loss_scale", f"must be at least --min-loss-scale {self.min_loss_scale}"
            )
        for first, second in _EXCLUSIVE:
            if getattr(self, first) and getattr(self, second):
                raise InputError(f"{_flag(first)} and {_flag(second)} exclude each other; give one")
        if self.rampup_batch_size is not None:
            check_numbers(self.rampup_batch_size)
        self._check_learning_rate()
        self._check_weight_decay()

    def _check_learning_rate(self) -> None:
        if self.lr_warmup_iters is not None and self.lr_warmup_fraction is not None:
            raise InputError("--lr-warmup-iters and --lr-warmup-fraction exclude each other; give one")
        schedule = self.learning_rate()
        if not 0 <= schedule.warmup_iters < schedule.decay_iters:
            raise InputError(
                f"warm-up of {schedule.warmup_iters} iterations does not fit into {schedule.decay_iters} "
                "decay iterations; lower --lr-warmup-iters or raise --lr-decay-iters"
            )
        if not 0 <= self.lr_warmup_init <= self.lr:
            raise self._refusal("lr_warmup_init", f"must be at least 0 and at most --lr {self.lr}")
        after = schedule.decay_iters - schedule.warmup_iters
        if schedule.style == "WSD" and not 1 <= schedule.wsd_decay_iters <= after:
            raise InputError(
                f"--lr-decay-style WSD needs --lr-wsd-decay-iters of 1 to {after}, the decay iterations that "
                "warm-up leaves"
            )
        if schedule.style != "WSD" and self.lr_wsd_decay_iters is not None:
            raise self._refusal("lr_wsd_decay_iters", "needs --lr-decay-style WSD")

    def _check_weight_decay(self) -> None:
        start, end, style = self.start_weight_decay, self.end_weight_decay, self.weight_decay_incr_style
        if style == "constant" and (start, end) != (None, None):
            raise InputError(
                "--start-weight-decay and --end-weight-decay need --weight-decay-incr-style linear or "
                "cosine; give it, or --weight-decay alone"
            )
        if style != "constant" and (start is None or end is None or start > end):
            raise self._refusal(
                "weight_decay_incr_style",
                "needs --start-weight-decay and an --end-weight-decay that is not below it",
            )

    def _refusal(self, name: str, what: str) -> InputError:
        return InputError(f"{_flag(name)} {getattr(self, name)}: {what}")

    def check_optimizer(self, layout: Layout) -> None:
        """Raise `InputError` when a flag contradicts the optimizer of `layout`."""
        if self.no_decoupled_weight_decay and layout.optimizer != "adam":
            raise InputError(
                f"--no-decoupled-weight-decay: optimizer {layout.optimizer} has one form of weight decay; "
                "leave the flag out, or train with --optimizer adam"
            )

    def compiles(self, layout: Layout, on_gpu: bool) -> bool:
        """True if the layers are compiled; by default on GPUs if the schedule supports compiled layers.

        Raises:
            InputError: compilation is requested with a split-backward schedule.
        """
        splits = layout.schedule in SPLIT_BACKWARD
        if self.compile and splits:
            raise InputError(compile_refusal(layout.schedule))
        return self.compile or (on_gpu and not splits and not self.no_compile)

    def learning_rate(self) -> LearningRate:
        """The schedule that the flags describe."""
        decay = self.train_iters if self.lr_decay_iters is None else self.lr_decay_iters
        warmup = self.lr_warmup_iters or 0
        if self.lr_warmup_fraction is not None:
            warmup = int(self.lr_warmup_fraction * decay)
        return LearningRate(
            self.lr,
            self.min_lr,
            self.lr_decay_style,
            warmup,
            decay,
            self.lr_warmup_init,
            self.lr_wsd_decay_style,
            self.lr_wsd_decay_iters or 0,
        )

    def weight_decays(self) -> WeightDecay:
        """The weight decay of each step."""
        start, end = self.start_weight_decay, self.end_weight_decay
        return WeightDecay(
            self.weight_decay if start is None else start,
            self.weight_decay if end is None else end,
            self.weight_decay_incr_style,
            self.train_iters,
        )

    def largest_norm(self) -> float:
        """The global norm to which gradients are clipped; 0 for no clipping by norm."""
        if self.clip_grad is None:
            return 0.0 if self.clip_grad_value is not None else CLIP_GRAD
        return self.clip_grad

    def batches(self, layout: Layout) -> BatchRamp:
        """The sizes of the global batches of a run; constant without a ramp."""
        return batch_ramp(self.rampup_batch_size, layout)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


_CHOICES: dict[str, tuple[str, ...]] = {
    "lr_decay_style": DECAY_STYLES,
    "lr_wsd_decay_style": WSD_DECAY_STYLES,
    "weight_decay_incr_style": WEIGHT_DECAY_STYLES,
    "muon_scale_mode": MUON_SCALE_MODES,
    "loss_reduction": LOSS_REDUCTIONS,
    "attention_kernel": ATTENTION_KERNELS,
    "moe_router_load_balancing_type": LOAD_BALANCING,
}

_EXCLUSIVE = (("compile", "no_compile"), ("clip_grad", "clip_grad_value"))


@dataclass(frozen=True)
class DataOptions:
    """Flags of the training data."""

    SECTIONS: ClassVar[dict[str, str]] = {"data_path": "Data"}

    data_path: list[str] = flag(
        [],
        "Prefix of a .bin/.idx pair, or several with weights, as '0.3 PREFIX 0.7 PREFIX' in quotes; the "
        "standard library of Python when not given.",
    )
    train_data_path: list[str] = flag([], "Data of training alone, like --data-path; without --split.")
    valid_data_path: list[str] = flag([], "Data of validation alone, like --data-path.")
    test_data_path: list[str] = flag([], "Data of a test at the end of the run, like --data-path.")
    split: str = flag("969,30,1", "Shares of training, validation and test.")
    allow_data_change: bool = flag(
        False,
        "Let --load continue with other data, another seed or another split, at the same count of samples.",
    )
    tokenizer_type: str | None = flag(
        None, "GPT2BPETokenizer, HuggingFaceTokenizer or ByteTokenizer; used for the default corpus."
    )
    vocab_file: str | None = flag(None, "GPT-2's vocab.json.")
    merge_file: str | None = flag(None, "GPT-2's merges.txt.")
    tokenizer_model: str | None = flag(
        None, "tokenizer.json of a Hugging Face tokenizer, its folder, or an id on the Hub."
    )
    reset_attention_mask: bool = flag(
        False,
        "Attend within documents only; an end-of-document token ends each document of a stream.",
    )
    reset_position_ids: bool = flag(False, "Count positions from the start of each document.")
    eod_mask_loss: bool = flag(False, "Do not predict the token after an end-of-document token.")
    pack_documents: bool = flag(
        False,
        "Fill samples with whole documents and pad the rest; attention, positions and loss stay within them.",
    )

    @property
    def split_paths(self) -> tuple[list[str], list[str], list[str]]:
        """The paths of training, validation and test data, if given separately."""
        return self.train_data_path, self.valid_data_path, self.test_data_path

    @property
    def heeds_stream(self) -> bool:
        """True if document boundaries matter in the stream from which samples are cut."""
        return self.reset_attention_mask or self.reset_position_ids or self.eod_mask_loss


@dataclass(frozen=True)
class OutputOptions:
    """The files that a run writes, and when."""

    SECTIONS: ClassVar[dict[str, str]] = {
        "log_interval": "Logging and evaluation",
        "save": "Checkpoints",
        "log_dir": "Logging and evaluation",
    }

    log_interval: int = flag(10, "Iterations between log lines.", within=AT_LEAST_1)
    eval_interval: int = flag(
        100, "Iterations between evaluations on the validation split.", within=AT_LEAST_1
    )
    eval_iters: int = flag(
        10, "Global batches of one evaluation; 0 turns evaluation off.", within=OFF_OR_STEPS
    )
    save: str | None = flag(None, "Folder to save checkpoints in.", metavar="FOLDER")
    load: str | None = flag(
        None,
        "Folder of checkpoints to go on from. It must hold one, unless --save names the same folder.",
        metavar="FOLDER",
    )
    load_or_start: bool = flag(False, "Begin anew where --load holds no checkpoint.")
    save_interval: int | None = flag(
        None,
        "Iterations between checkpoints, where --save is given; the end of the run always.",
        within=AT_LEAST_1,
    )
    async_save: bool = flag(
        False, "Go on training while a checkpoint is written, from a copy in host memory."
    )
    keep_last: int | None = flag(
        None,
        "Checkpoints to keep; older ones are deleted when a new one is whole.",
        metavar="K",
        within=AT_LEAST_1,
    )
    exit_on_missing_checkpoint: bool = flag(
        False,
        "Stop if --load and --save name one folder and it holds no checkpoint, instead of beginning anew.",
    )
    ckpt_step: int | None = flag(
        None,
        "Iteration to load instead of the newest in --load.",
        within=Bounds("the iteration of a checkpoint", 0),
    )
    finetune: bool = flag(
        False,
        "Load weights only, and begin at iteration 0 with a new optimizer and the first sample; always so "
        "with a checkpoint of `planner convert`.",
    )
    no_load_optim: bool = flag(
        False,
        "Continue at the iteration of --load with a new optimizer, perhaps of another kind, whose "
        "schedules begin anew.",
    )
    no_save_optim: bool = flag(
        False, "Save only the weights: a small checkpoint, which can be loaded with --no-load-optim only."
    )
    exit_interval: int | None = flag(
        None, "Stop after the first iteration that is a multiple of this number.", within=AT_LEAST_1
    )
    exit_duration_in_mins: float | None = flag(
        None,
        "Save and stop after the first iteration that ends this many minutes after the start.",
        within=POSITIVE,
    )
    log_format: str = flag("megatron", "Lines of steps: megatron or mindformers.", metavar="NAME")
    log_dir: str | None = flag(
        None, "Folder for metrics.jsonl, the plan, and a folder rank_N of each rank.", metavar="FOLDER"
    )
    no_profile: bool = flag(
        False, "Do not profile the two steps after the warm-up, which show the parts of a step's time."
    )
    no_history: bool = flag(
        False,
        "Do not keep this run's measurements in the user's history, from which `planner calibrate` learns.",
    )
    tensorboard_dir: str | None = flag(None, "Folder for TensorBoard event files.", metavar="FOLDER")
    wandb_project: str | None = flag(None, "Project of Weights & Biases that keeps the run.", metavar="NAME")
    wandb_exp_name: str | None = flag(None, "Name of the run in Weights & Biases.", metavar="NAME")
    wandb_save_dir: str | None = flag(None, "Folder of Weights & Biases for local files.", metavar="FOLDER")
    mlflow_experiment: str | None = flag(None, "Experiment of MLflow that keeps the run.", metavar="NAME")
    mlflow_tracking_uri: str | None = flag(None, "Server or folder of MLflow.", metavar="URI")

    def check(self) -> None:
        """Raise `InputError` for impossible intervals."""
        check_bounds(self)
        for name, needed in (
            ("async_save", "save"),
            ("keep_last", "save"),
            ("ckpt_step", "load"),
            ("exit_on_missing_checkpoint", "load"),
            ("load_or_start", "load"),
            ("finetune", "load"),
            ("no_save_optim", "save"),
            ("wandb_exp_name", "wandb_project"),
            ("wandb_save_dir", "wandb_project"),
            ("mlflow_tracking_uri", "mlflow_experiment"),
        ):
            if getattr(self, name) not in (None, False) and getattr(self, needed) is None:
                what = "FOLDER" if needed in ("save", "load") else "NAME"
                raise InputError(f"{_flag(name)} needs {_flag(needed)} {what}")
        if self.log_format not in LOG_FORMATS:
            raise InputError(f"--log-format {self.log_format}: expected {' or '.join(LOG_FORMATS)}")
        if self.load_or_start and self.exit_on_missing_checkpoint:
            raise InputError(
                "--load-or-start and --exit-on-missing-checkpoint exclude each other; give one of them"
            )
