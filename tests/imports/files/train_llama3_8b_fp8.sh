#!/bin/bash
#SBATCH -N 2
#SBATCH --gpus-per-node=8
MODEL_SIZE=8B
if [[ $MODEL_SIZE == 8B ]]; then
    LAYERS=32; HIDDEN=4096; FFN=14336; HEADS=32
elif [[ $MODEL_SIZE == 70B ]]; then
    LAYERS=80; HIDDEN=8192; FFN=28672; HEADS=64
fi
TP=2
CP=1
USE_FP8=1
MODEL_ARGS=" \
    --num-layers $LAYERS --hidden-size $HIDDEN --ffn-hidden-size $FFN \
    --num-attention-heads $HEADS --group-query-attention --num-query-groups 8 --kv-channels 128 \
    --seq-length 8192 --max-position-embeddings 8192 --position-embedding-type rope --rotary-base 1000000 \
    --swiglu --disable-bias-linear --normalization RMSNorm --untie-embeddings-and-output-weights \
    --attention-dropout 0.0 --hidden-dropout 0.0 --attention-backend fused --apply-layernorm-1p \
    --vocab-size 128256 --tokenizer-type NullTokenizer --make-vocab-size-divisible-by 128"
DTYPE_ARGS="--bf16 --grad-reduce-in-bf16"
if [ $USE_FP8 -eq 1 ]; then
    DTYPE_ARGS="$DTYPE_ARGS --fp8-format hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max"
    DTYPE_ARGS="$DTYPE_ARGS --fp8-param-gather"
fi
srun --container-image x.sqsh bash -c "python -u pretrain_gpt.py $MODEL_ARGS $DTYPE_ARGS --micro-batch-size 1 \
    --global-batch-size 128 --tensor-model-parallel-size $TP --context-parallel-size $CP --sequence-parallel \
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --use-flash-attn --mock-data \
    --cross-entropy-loss-fusion --train-samples 1953125000 --lr 0.00015 --recompute-activations --empty-unused-memory-level 0 \
    --manual-gc --distributed-timeout-minutes 60"
