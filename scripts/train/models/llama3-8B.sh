# shellcheck shell=bash disable=SC2034
# Megatron's flags for llama3-8B; written by python -m slime_tandem.slime_launch.sizes, do not edit.
MODEL_ARGS=(
  --swiglu
  --num-layers 32
  --hidden-size 4096
  --ffn-hidden-size 14336
  --num-attention-heads 32
  --group-query-attention
  --num-query-groups 8
  --kv-channels 128
  --max-position-embeddings 8192
  --use-rotary-position-embeddings
  --rotary-base 500000
  --disable-bias-linear
  --normalization RMSNorm
  --norm-epsilon 1e-05
  --vocab-size 128256
  --untie-embeddings-and-output-weights
)
