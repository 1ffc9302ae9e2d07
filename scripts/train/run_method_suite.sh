#!/usr/bin/env bash
# Runs several methods over several seeds and compares them. Everything by environment variable:
#   METHOD_LIST          entries method:ratio:idx, separated by blanks; the methods are listed in slime_tandem/local/suite.py
#   SEEDS                e.g. "0 1" (default: "0 1 2")
#   NUM_ROLLOUT          rollouts (steps) per run; default: the configuration's
#   OPD_TOPK_METRICS_K   length of student's and teacher's lists, opd.selection.top_k (default: 16)
#   OUTPUT_ROOT          folder of the suite; a half-done suite there is gone on with
#   CONFIG               base configuration (default: configs/methods.yaml; slime: configs/slime_opd.yaml)
#   BACKEND              local (default), or slime: STUDENT_HF, TEACHER_MODEL, TEACHER_URL (a running server of it), JUNIOR_MODEL (tandem methods),
#                        PROMPT_DATA, and what slime_lib.sh lists
#   DRY_RUN=1            prints what would be run
# Arguments are settings of all runs, e.g. opd.selection.missing_mass=rest. A tandem suite:
#   METHOD_LIST="solo_grpo:1.0:10 tandem_word:0.5:20 tandem_word:0.25:21 tandem_sentence:0.5:30" bash scripts/train/run_method_suite.sh
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
# What is relative is so to the caller's folder; the rest of this script stands in the repository.
if [[ -n "${OUTPUT_ROOT:-}" ]]; then OUTPUT_ROOT="$(realpath -ms -- "$OUTPUT_ROOT")"; fi
for name in CONFIG PROMPT_DATA STUDENT_HF TEACHER_MODEL JUNIOR_MODEL; do
  if [[ -e "${!name:-}" ]]; then printf -v "$name" '%s' "$(realpath -s -- "${!name}")"; fi
done
METHOD_LIST="${METHOD_LIST:-pure_opd:1.0:10 teachability:0.10:20 entropy:0.10:30 teachability_entropy:0.10:40 tip:0.10:50}"
OUTPUT_ROOT="${OUTPUT_ROOT:-runs/methods}"
BACKEND="${BACKEND:-local}"
flags=()
if [[ -n "${NUM_ROLLOUT:-}" ]]; then flags+=("train.steps=$NUM_ROLLOUT"); fi
dry=()
if [[ "${DRY_RUN:-0}" == 1 ]]; then dry=(--dry-run); fi
suite=(suite "$OUTPUT_ROOT" --methods "$METHOD_LIST" --seeds "${SEEDS:-0 1 2}" --top-k "${OPD_TOPK_METRICS_K:-16}" --backend "$BACKEND")
cd "$REPO"
if [[ "$BACKEND" == slime ]]; then
  source scripts/train/slime_lib.sh
  beside="$(dirname "$REPO")"
  STUDENT_HF="${STUDENT_HF:-$beside/models/Qwen3-1.7B}"
  TEACHER_MODEL="${TEACHER_MODEL:-$beside/models/Qwen3-8B}"
  PROMPT_DATA="${PROMPT_DATA:-$beside/data/train.jsonl}"
  CONFIG="${CONFIG:-scripts/train/configs/slime_opd.yaml}"
  need_slime
  need_model STUDENT_HF "the trainable student"
  need_model TEACHER_MODEL "the teacher"
  need_file PROMPT_DATA "prompts with labels"
  flags+=("models.senior=$(quoted "$STUDENT_HF")" "models.teacher=$(quoted "$TEACHER_MODEL")" "tasks=[{family: jsonl, path: $(quoted "$PROMPT_DATA")}]"
    "cluster.nodes=$NODES" "cluster.gpus_per_node=$GPUS_PER_NODE")
  if [[ -n "${TEACHER_URL:-}" ]]; then flags+=("engine.teacher_url=$(quoted "$TEACHER_URL")"); fi
  if [[ " $METHOD_LIST" == *" tandem_"* ]]; then
    JUNIOR_MODEL="${JUNIOR_MODEL:-$beside/models/Qwen3-0.6B}"
    need_model JUNIOR_MODEL "the frozen junior"
    flags+=("models.junior=$(quoted "$JUNIOR_MODEL")")
  fi
  start_ray
  code=0
  attend "$SLIME_PYTHON" -m slime_tandem.cli "${suite[@]}" --config "$CONFIG" "${dry[@]}" --set "${flags[@]}" "$@" || code=$?
  exit "$code"
fi
flags+=("$@")
if ((${#flags[@]})); then flags=(--set "${flags[@]}"); fi
command=("$VENV/bin/slime-tandem" "${suite[@]}" --config "${CONFIG:-scripts/train/configs/methods.yaml}" "${flags[@]}")
setup_venv base
if [[ "${DRY_RUN:-0}" == 1 && -x "$VENV/bin/slime-tandem" ]]; then
  "${command[@]}" --dry-run
else
  run "${command[@]}"
  run "$VENV/bin/slime-tandem" report "$OUTPUT_ROOT"
fi
