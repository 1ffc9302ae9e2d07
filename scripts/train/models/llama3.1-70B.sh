# shellcheck shell=bash disable=SC2034
# Megatron's flags for llama3.1-70B; written by python -m slime_tandem.slime_launch.sizes, do not edit.
MODEL_ARGS=(
  --swiglu
  --num-layers 80
  --hidden-size 8192
  --ffn-hidden-size 28672
  --num-attention-heads 64
  --group-query-attention
  --num-query-groups 8
  --kv-channels 128
  --max-position-embeddings 131072
  --use-rotary-position-embeddings
  --rotary-base 500000
  --disable-bias-linear
  --normalization RMSNorm
  --norm-epsilon 1e-05
  --vocab-size 128256
  --use-rope-scaling
  --rope-scaling-factor 8
  --untie-embeddings-and-output-weights
)
