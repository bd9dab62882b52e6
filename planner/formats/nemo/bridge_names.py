"""What Megatron-Bridge calls the flags of Megatron-LM: fields of its `ConfigContainer`.

Those of release 0.3.1 (megatron/bridge/training/config.py, models/gpt_provider.py).
"""

from __future__ import annotations

_MODEL = (
    *("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size"),
    *("--expert-model-parallel-size", "--expert-tensor-parallel-size", "--cp-comm-type"),
    *("--pipeline-model-parallel-layout", "--sequence-parallel", "--recompute-granularity"),
    *("--recompute-method", "--recompute-num-layers", "--recompute-modules"),
    *("--fine-grained-activation-offloading", "--offload-modules", "--num-layers", "--hidden-size"),
    *("--ffn-hidden-size", "--num-attention-heads", "--kv-channels", "--num-query-groups", "--seq-length"),
    *("--position-embedding-type", "--normalization", "--vocab-size", "--rotary-base", "--add-qkv-bias"),
    *("--qk-layernorm", "--moe-router-topk", "--moe-ffn-hidden-size", "--moe-grouped-gemm"),
    *("--moe-token-dispatcher-type", "--moe-router-score-function", "--moe-shared-expert-intermediate-size"),
    *("--moe-shared-expert-gate", "--moe-layer-freq", "--moe-router-pre-softmax"),
    *("--moe-router-topk-scaling-factor", "--moe-router-num-groups", "--moe-router-group-topk"),
    *("--moe-router-enable-expert-bias", "--moe-expert-capacity-factor", "--multi-latent-attention"),
    *("--q-lora-rank", "--kv-lora-rank", "--qk-head-dim", "--qk-pos-emb-head-dim", "--v-head-dim"),
    *("--mtp-num-layers", "--mtp-loss-scaling-factor", "--window-size", "--window-attn-skip-freq"),
    *("--softmax-type", "--attention-output-gate", "--qk-l2-norm", "--no-rope-freq", "--rotary-percent"),
    *("--experimental-attention-variant", "--linear-attention-freq", "--linear-conv-kernel-dim"),
    *("--linear-key-head-dim", "--linear-value-head-dim", "--linear-num-key-heads"),
    *("--linear-num-value-heads", "--dsa-indexer-n-heads", "--dsa-indexer-head-dim", "--dsa-indexer-topk"),
    *("--moe-apply-probs-on-input", "--rotary-scaling-factor", "--mscale", "--mscale-all-dim", "--rope-type"),
    *("--glu-linear-offset", "--activation-func-clamp-value"),
)
"""Flags whose fields of the model have the same name."""

KEYS = {flag: f"model.{flag[2:].replace('-', '_')}" for flag in _MODEL} | {
    "--norm-epsilon": "model.layernorm_epsilon",
    "--num-experts": "model.num_moe_experts",
    "--swiglu": "model.gated_linear_unit",
    "--apply-layernorm-1p": "model.layernorm_zero_centered_gamma",
    "--use-rope-scaling": "model.rope_scaling",
    "--rope-scaling-factor": "model.rope_scaling_factor",
    "--yarn-original-max-position-embeddings": "model.yarn_original_max_position_embeddings",
    "--yarn-beta-fast": "model.yarn_beta_fast",
    "--yarn-beta-slow": "model.yarn_beta_slow",
    "--no-yarn-correction-range-round-to-int": "model.yarn_correction_range_round_to_int",
    "--overlap-grad-reduce": "ddp.overlap_grad_reduce",
    "--overlap-param-gather": "ddp.overlap_param_gather",
    "--disable-bias-linear": "model.add_bias_linear",
    "--untie-embeddings-and-output-weights": "model.share_embeddings_and_output_weights",
    "--micro-batch-size": "train.micro_batch_size",
    "--global-batch-size": "train.global_batch_size",
    "--use-distributed-optimizer": "ddp.use_distributed_optimizer",
    "--num-distributed-optimizer-instances": "ddp.num_distributed_optimizer_instances",
    "--use-megatron-fsdp": "ddp.use_megatron_fsdp",
    "--data-parallel-sharding-strategy": "ddp.data_parallel_sharding_strategy",
    "--optimizer": "optimizer.optimizer",
    "--optimizer-cpu-offload": "optimizer.optimizer_cpu_offload",
    "--use-precision-aware-optimizer": "optimizer.use_precision_aware_optimizer",
}
"""Paths by the flag that they say; switches are true there, but for those of `OFF`."""

OFF = (
    *("--disable-bias-linear", "--untie-embeddings-and-output-weights"),
    "--no-yarn-correction-range-round-to-int",
)
"""Switches whose fields are false."""

CHUNKS = "model.virtual_pipeline_model_parallel_size"
"""Chunks of each pipeline rank."""

PRECISION = "mixed_precision"

RECIPES = {
    "bf16_mixed": "bf16",
    "fp16_mixed": "fp16",
    "bf16_with_fp8_current_scaling_mixed": "fp8",
    "bf16_with_fp8_delayed_scaling_mixed": "fp8",
    "bf16_with_fp8_subchannel_scaling_mixed": "fp8",
    "bf16_with_mxfp8_mixed": "mxfp8",
    "bf16_with_nvfp4_mixed": "nvfp4",
}
"""`mixed_precision`: names of its recipes."""

FP8_RECIPES = {"current": "tensorwise", "delayed": "delayed", "subchannel": "blockwise", "mxfp8": "mxfp8"}
"""What words in these names are called by `--fp8-recipe`."""
