"""What flags of Megatron-LM are called by NeMo and Megatron-Bridge."""

from __future__ import annotations

FLAGS = {
    "encoder_seq_length": "--seq-length",
    "sequence_length": "--seq-length",
    "layernorm_epsilon": "--norm-epsilon",
    "num_moe_experts": "--num-experts",
    "virtual_pipeline_model_parallel_size": "--num-virtual-stages-per-pipeline-rank",
    "activations_checkpoint_granularity": "--recompute-granularity",
    "activations_checkpoint_method": "--recompute-method",
    "activations_checkpoint_num_layers": "--recompute-num-layers",
    "num_layers_in_first_pipeline_stage": "--decoder-first-pipeline-num-layers",
    "num_layers_in_last_pipeline_stage": "--decoder-last-pipeline-num-layers",
    "max_steps": "--train-iters",
    "override_vocab_size": "--vocab-size",
    "gated_linear_unit": "--swiglu",
    "layernorm_zero_centered_gamma": "--apply-layernorm-1p",
    "rope_scaling": "--use-rope-scaling",
    "microbatch_group_size_per_vp_stage": "--microbatch-group-size-per-virtual-pipeline-stage",
}
"""Flags by the last word of a key, where it is not the flag's own with underscores."""

OFF = {
    "add_bias_linear": "--disable-bias-linear",
    "bias": "--disable-bias-linear",
    "share_embeddings_and_output_weights": "--untie-embeddings-and-output-weights",
    "grad_reduce_in_fp32": "--grad-reduce-in-bf16",
    "yarn_correction_range_round_to_int": "--no-yarn-correction-range-round-to-int",
}
"""Switches that are given where a key is false."""

NOT_MEGATRONS = {
    "name",
    "type",
    "seed",
    "split",
    "data_path",
    "optimizer",
    "vocab_file",
    "merge_file",
    "save",
    "load",
    "spec",
    "model_parallel_size",
}
"""Last words of keys whose flags mean something else, or are no matter of the layout."""  # fmt: skip
