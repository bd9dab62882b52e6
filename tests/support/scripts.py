"""Arguments of scripts that users paste."""

from __future__ import annotations

MINDSPEED = """
    --expert-model-parallel-size 2 --moe-model-type megatron_moe --num-experts 4 --moe-permutation-async-comm
    --moe-grouped-gemm --moe-token-dispatcher-type alltoall --moe-router-topk 2
    --recompute-activation-function --swap-attention --recompute-num-layers 1
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 1 --disable-bias-linear --reuse-fp32-param
    --use-mcore-models --use-distributed-optimizer --overlap-grad-reduce --use-fused-rotary-pos-emb
    --sequence-parallel --num-layers 2 --hidden-size 12288 --num-attention-heads 96 --seq-length 8192
    --max-position-embeddings 8192 --micro-batch-size 1 --global-batch-size 4 --train-iters 1000 --lr 5.0e-7
    --lr-decay-iters 320000 --lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9
    --adam-beta2 0.95 --init-method-std 0.006 --no-gradient-accumulation-fusion --use-flash-attn
    --position-embedding-type rope --no-bias-gelu-fusion --no-bias-dropout-fusion --attention-dropout 0.0
    --hidden-dropout 0.0 --bf16 --data-path my-t5_text_sentence --vocab-file gpt2-vocab.json
    --merge-file gpt2-merges.txt --vocab-size 50257 --num-workers 4 --split 949,50,1 --log-interval 1
    --save-interval 10000 --eval-interval 10000 --eval-iters 10 --log-throughput --timing-log-option max
    --no-barrier-with-level-1-timing --timing-log-level 0 --distributed-backend nccl
    --distributed-timeout-minutes 10 --seed 1234
"""
"""The arguments of MindSpeed's guide to mixtures of experts."""
