#!/usr/bin/env bash
# slime's train.py with a fused engine on two nodes of this machine, without a GPU: run_tandem_grpo.sh through two_nodes.sh, with what the
# shim and SGLang on a CPU need. Minutes, of which most are SGLang's imports.
#   bash scripts/slime/two_nodes_cpu.sh cluster.colocate=false cluster.trainer_gpus=1      trainer on the first node, engine on the second
#   bash scripts/slime/two_nodes_cpu.sh cluster.trainer_gpus=2                             a trainer's rank and an engine on each
#   SLIME_SOURCES     slime, Megatron-LM and venv: eval "$(scripts/slime/cpu_env.sh)"
#   MODELS            a folder with tiny models senior and junior, of one tokenizer
#   PROMPT_DATA       prompts with labels (scripts/slime/prompts.py)
#   OUTPUT_ROOT       runs; the job's weights go through it, too                         (default: runs in this repository)
#   NAME, NUM_ROLLOUT the run's folder, and how many rollouts                            (default: two-nodes, 3)
#   LOSE_WHEN         as in two_nodes.sh, e.g. $OUTPUT_ROOT/$NAME/slime/latest_checkpointed_iteration.txt
# Arguments are settings. The same command goes on from the last checkpoint.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
for name in SLIME_SOURCES MODELS PROMPT_DATA; do
  [[ -e "${!name:-}" ]] || refuse "$name" "${!name:-}" "an existing path" "see the first lines of this script"
done
export SLIME_DIR="$SLIME_SOURCES/slime" MEGATRON_LM_DIR="$SLIME_SOURCES/Megatron-LM" SLIME_PYTHON="$SLIME_SOURCES/venv/bin/python"
export SENIOR_MODEL="$MODELS/senior" JUNIOR_MODEL="$MODELS/junior" PROMPT_DATA CONFIG="$REPO/scripts/slime/cpu_job.yaml"
export OUTPUT_ROOT="${OUTPUT_ROOT:-$REPO/runs}" NAME="${NAME:-two-nodes}" NUM_ROLLOUT="${NUM_ROLLOUT:-3}" GPUS_PER_NODE=1
export PYTHONPATH="$REPO/scripts/slime/shim${PYTHONPATH:+:$PYTHONPATH}" RAY_START_FLAGS="--object-store-memory=1000000000"
export RAY_USAGE_STATS_ENABLED=0 RAY_raylet_start_wait_time_s=180 RAY_AUTH_MODE=disabled RAY_memory_monitor_refresh_ms=0
export RAY_ENABLE_UV_RUN_RUNTIME_ENV=0
job=(SLIME_TANDEM_CPU=1 SGLANG_USE_CPU_ENGINE=1 TORCH_COMPILE_DISABLE=1 TORCHDYNAMO_DISABLE=1 SGLANG_ENABLE_JIT_DEEPGEMM=0 OMP_NUM_THREADS=1
  OMP_WAIT_POLICY=PASSIVE HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1 RAY_DEDUP_LOGS=0 RAY_COLOR_PREFIX=0)
export "${job[@]}"
export JOB_ENV="${job[*]%%=*}"
exec bash "$REPO/scripts/slime/two_nodes.sh" bash "$REPO/scripts/train/run_tandem_grpo.sh" engine.mode=fused "$@" \
  -- --update-weight-disk-dir "$OUTPUT_ROOT/$NAME/weights"
