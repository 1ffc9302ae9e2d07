# shellcheck shell=bash disable=SC2034
# Megatron's flags for qwen3-0.6B; written by python -m slime_tandem.slime_launch.sizes, do not edit.
MODEL_ARGS=(
  --swiglu
  --num-layers 28
  --hidden-size 1024
  --ffn-hidden-size 3072
  --num-attention-heads 16
  --group-query-attention
  --num-query-groups 8
  --kv-channels 128
  --max-position-embeddings 40960
  --use-rotary-position-embeddings
  --rotary-base 1000000
  --disable-bias-linear
  --normalization RMSNorm
  --norm-epsilon 1e-06
  --vocab-size 151936
  --qk-layernorm
)
