"""Names that MindFormers (MindSpore Transformers) has for degrees of a layout, and its defaults."""

from __future__ import annotations

from planner.formats.facts.key_table import key_table

STATIC_KEYS = key_table("mindformers").fields
"""Keys of the static graph by the field that they give (keys/mindformers.yaml)."""

DYNAMIC_KEYS = key_table("mindformers-dynamic").fields
"""Keys of the dynamic graph by the field that they give (keys/mindformers-dynamic.yaml)."""

FORMATS = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
"""Number formats by MindSpore's names."""

CAME = {
    "beta1": "--came-beta1",
    "decay_rate": "--came-decay-rate",
    "beta3": "--came-beta3",
    "clip_threshold": "--came-clip-threshold",
}
"""Parameters of its `Came` as flags (mindformers/core/optim/came.py); learning rates may also follow from the
step or from the size of weights, which they do not by default."""

CAME_VALUES = {
    "beta1": 0.9,
    "decay_rate": 0.8,
    "beta3": 0.99,
    "clip_threshold": 1.0,
    "eps": [1e-30, 1e-3, 1e-16],
}
"""Defaults of its `Came`; the second of eps is for learning rates that follow from the size of weights."""

CONTEXT_ALGORITHMS = {"colossalai_cp": "all_gather", "ulysses_cp": "all_to_all", "hybrid_cp": "all_to_all"}
"""`parallel_config.context_parallel_algo`; colossalai_cp is a ring where the model has use_ring_attention."""

SCHEDULES = {
    "1f1b": "1f1b",
    "gpipe": "1f1b",
    "seqpipe": "1f1b",
    "seqvpp": "1f1b",
    "seqsmartvpp": "1f1b",
    "zero_bubble_v": "zbv",
}
"""`parallel.pipeline_config.pipeline_scheduler`, of one chunk on each rank; those in parts of sequences keep
less than 1f1b, as which they are priced, and gpipe more."""

KEEP_LESS = ("seqpipe", "seqvpp", "seqsmartvpp")
"""Schedules in parts of sequences."""

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
"""Published files that pages quote in part: the model of each in the catalogue, and what else it says
(mindformers configs/gpt2, branches r0.3 to r1.3)."""
