"""What degrees of a layout are called by MindFormers (MindSpore Transformers), and its defaults."""

from __future__ import annotations

STATIC_KEYS = {
    "tensor_parallel": "parallel_config.model_parallel",
    "sequence_parallel": "parallel_config.use_seq_parallel",
    "pipeline_parallel": "parallel_config.pipeline_stage",
    "virtual_pipeline_parallel": "model.model_config.pp_interleave_num",
    "context_parallel": "parallel_config.context_parallel",
    "context_parallel_form": "parallel_config.context_parallel_algo",
    "expert_parallel": "parallel_config.expert_parallel",
    "data_parallel": "parallel_config.data_parallel",
    "micro_batches": "parallel_config.micro_batch_num",
    "micro_batch_size": "runner_config.batch_size",
    "global_batch_size": "parallel_config.micro_batch_num",
    "zero_stage": "parallel.enable_parallel_optimizer",
    "zero_replicas": "parallel.parallel_optimizer_config.optimizer_weight_shard_size",
    "layers_per_stage": "model.model_config.offset",
    "schedule": "parallel.pipeline_config.pipeline_scheduler",
    "recompute": "recompute_config.recompute",
    "recompute_modules": "recompute_config.select_recompute",
    "precision": "model.model_config.compute_dtype",
    "optimizer": "optimizer.type",
    "heads": "model.model_config.num_heads",
    "kv_heads": "model.model_config.n_kv_heads",
    "experts": "moe_config.expert_num",
    "seq": "model.model_config.seq_length",
    "layers": "model.model_config.num_layers",
    "hidden": "model.model_config.hidden_size",
    "ffn": "model.model_config.intermediate_size",
    "vocab": "model.model_config.vocab_size",
}
"""Keys of a configuration of the static graph by the field that they give (mindformers/tools/register)."""

DYNAMIC_KEYS = {
    "tensor_parallel": "parallel_config.tensor_model_parallel_size",
    "sequence_parallel": "parallel_config.sequence_parallel",
    "pipeline_parallel": "parallel_config.pipeline_model_parallel_size",
    "virtual_pipeline_parallel": "parallel_config.virtual_pipeline_model_parallel_size",
    "context_parallel": "parallel_config.context_parallel_size",
    "expert_parallel": "parallel_config.expert_model_parallel_size",
    "layers_per_stage": "parallel_config.num_layer_list",
    "micro_batches": "dataset_config.micro_batch_num",
    "micro_batch_size": "dataset_config.batch_size",
    "global_batch_size": "dataset_config.micro_batch_num",
    "zero_stage": "training_config.use_distributed_optimizer",
    "recompute": "model_config.recompute_granularity",
    "recompute_method": "model_config.recompute_method",
    "recompute_num_layers": "model_config.recompute_num_layers",
    "precision": "model_config.compute_dtype",
    "optimizer": "optimizer_config.optimizer_type",
    "heads": "model_config.num_attention_heads",
    "kv_heads": "model_config.num_query_groups",
    "experts": "moe_config.num_experts",
    "seq": "model_config.seq_length",
    "layers": "model_config.num_layers",
    "hidden": "model_config.hidden_size",
    "ffn": "model_config.ffn_hidden_size",
    "vocab": "model_config.vocab_size",
}
"""Keys of a configuration of the dynamic graph (experimental/parallel_core/pynative/config.py)."""

FORMATS = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
"""Number formats by MindSpore's names."""

OPTIMIZERS = {
    "came": "came",
    "camezero2": "came",
    "adafactor": "adafactor",
    "sgd": "sgd",
    "momentum": "sgd",
    "muon": "muon",
}
"""Types of optimizers in small letters (mindformers/core/optim, mindspore.nn.optim); others are taken for
Adam."""

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
