# shellcheck shell=bash disable=SC2034
# Megatron's flags for llama3.2-3B; written by python -m slime_tandem.slime_launch.sizes, do not edit.
# slime 624b824a hands no factor on (model_provider.py) and trains with 8; `slime-tandem config` refuses it.
MODEL_ARGS=(
  --swiglu
  --num-layers 28
  --hidden-size 3072
  --ffn-hidden-size 8192
  --num-attention-heads 24
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
  --rope-scaling-factor 32
)
