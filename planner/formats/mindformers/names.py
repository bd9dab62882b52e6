"""Names of degrees of a layout in MindFormers (MindSpore Transformers), and its defaults."""

from __future__ import annotations

from planner.formats.facts.key_table import key_table

STATIC_KEYS = key_table("mindformers").fields
"""Keys of the static graph by field (keys/mindformers.yaml)."""

DYNAMIC_KEYS = key_table("mindformers-dynamic").fields
"""Keys of the dynamic graph by field (keys/mindformers-dynamic.yaml)."""

FORMATS = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
"""Number formats by MindSpore's names."""

CAME = {
    "beta1": "--came-beta1",
    "decay_rate": "--came-decay-rate",
    "beta3": "--came-beta3",
    "clip_threshold": "--came-clip-threshold",
}
"""Parameters of MindFormers' `Came` as flags (mindformers/core/optim/came.py). Options that derive learning
rates from the step or from the size of weights are off by default."""

CAME_VALUES = {
    "beta1": 0.9,
    "decay_rate": 0.8,
    "beta3": 0.99,
    "clip_threshold": 1.0,
    "eps": [1e-30, 1e-3, 1e-16],
}
"""Defaults of MindFormers' `Came`; the second eps is for learning rates derived from the size of weights."""

CONTEXT_ALGORITHMS = {"colossalai_cp": "all_gather", "ulysses_cp": "all_to_all", "hybrid_cp": "all_to_all"}
"""Forms of context parallelism by `parallel_config.context_parallel_algo`; colossalai_cp is a ring if the
model has use_ring_attention."""

SCHEDULES = {
    "1f1b": "1f1b",
    "gpipe": "1f1b",
    "seqpipe": "1f1b",
    "seqvpp": "1f1b",
    "seqsmartvpp": "1f1b",
    "zero_bubble_v": "zbv",
}
"""Schedules by `parallel.pipeline_config.pipeline_scheduler`, with one chunk on each rank. All are priced as
1f1b; schedules in parts of sequences keep less memory than that, and gpipe keeps more."""

KEEP_LESS = ("seqpipe", "seqvpp", "seqsmartvpp")
"""Schedules in parts of sequences, which keep less memory than 1f1b."""

EXCERPTS = {
    "run_gpt2_13b.yaml": (
        "mindformers-gpt2-13b",
        {"runner_config.batch_size": "2", "model.model_config.compute_dtype": "float16"},
    ),
    "run_gpt2_52b.yaml": (
        "mindformers-gpt2-52b",
        {"runner_config.batch_size": "2", "model.model_config.compute_dtype": "float16"},
    ),
    "pretrain_gpt_7B.yaml": ("mindformers-gpt-7b", {}),
}
"""Published files that pages quote in part: the catalogue's model of each, and its other values (mindformers
configs/gpt2, branches r0.3 to r1.3)."""
