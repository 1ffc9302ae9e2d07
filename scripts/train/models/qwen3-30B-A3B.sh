# shellcheck shell=bash disable=SC2034
# Megatron's flags for qwen3-30B-A3B; written by python -m slime_tandem.slime_launch.sizes, do not edit.
MODEL_ARGS=(
  --swiglu
  --num-layers 48
  --hidden-size 2048
  --ffn-hidden-size 6144
  --num-attention-heads 32
  --group-query-attention
  --num-query-groups 4
  --kv-channels 128
  --max-position-embeddings 40960
  --use-rotary-position-embeddings
  --rotary-base 1000000
  --disable-bias-linear
  --normalization RMSNorm
  --norm-epsilon 1e-06
  --vocab-size 151936
  --qk-layernorm
  --untie-embeddings-and-output-weights
  --num-experts 128
  --moe-ffn-hidden-size 768
  --moe-router-topk 8
  --moe-layer-freq '[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1]'
  --moe-router-score-function softmax
  --moe-router-dtype fp32
  --moe-token-dispatcher-type alltoall
  --moe-token-drop-policy probs
  --moe-aux-loss-coeff 0
  --moe-grouped-gemm
  --moe-permute-fusion
)
