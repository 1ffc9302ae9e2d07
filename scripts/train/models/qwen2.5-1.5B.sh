# shellcheck shell=bash disable=SC2034
# Megatron's flags for qwen2.5-1.5B; written by python -m slime_tandem.slime_launch.sizes, do not edit.
MODEL_ARGS=(
  --swiglu
  --num-layers 28
  --hidden-size 1536
  --ffn-hidden-size 8960
  --num-attention-heads 12
  --group-query-attention
  --num-query-groups 2
  --kv-channels 128
  --max-position-embeddings 32768
  --use-rotary-position-embeddings
  --rotary-base 1000000
  --disable-bias-linear
  --normalization RMSNorm
  --norm-epsilon 1e-06
  --vocab-size 151936
  --add-qkv-bias
)
