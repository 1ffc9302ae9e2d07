# shellcheck shell=bash disable=SC2034
# Megatron's flags for qwen2.5-72B; written by python -m slime_tandem.slime_launch.sizes, do not edit.
MODEL_ARGS=(
  --swiglu
  --num-layers 80
  --hidden-size 8192
  --ffn-hidden-size 29568
  --num-attention-heads 64
  --group-query-attention
  --num-query-groups 8
  --kv-channels 128
  --max-position-embeddings 32768
  --use-rotary-position-embeddings
  --rotary-base 1000000
  --disable-bias-linear
  --normalization RMSNorm
  --norm-epsilon 1e-06
  --vocab-size 152064
  --add-qkv-bias
  --untie-embeddings-and-output-weights
)
