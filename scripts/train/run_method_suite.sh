#!/usr/bin/env bash
# Runs several methods over several seeds and compares them. Everything by environment variable, TA-OPD's published names among them
# (docs/published.md has the table); one that would have no effect here is refused:
#   METHOD_LIST          entries method:ratio:idx, separated by blanks or commas; the methods are listed in slime_tandem/local/suite.py
#   SEEDS                e.g. "0 1" (default: "0 1 2")
#   RULES                own (default), or reference: tokens selected as published, bit for bit (opd.selection.rules)
#   OUTPUT_ROOT, TAG     folder of the suite, and one below it; a half-done suite there is gone on with
#   CONFIG               base configuration (default: configs/methods.yaml; with slime or STUDENT_HF: configs/slime_opd.yaml)
#   BACKEND              local, or slime (what slime_lib.sh lists); default: slime where SLIME_DIR, MEGATRON_LM_DIR or STUDENT_TORCH_DIST is
#                        set, else local
#   STUDENT_HF, TEACHER_MODEL, JUNIOR_MODEL (tandem methods)  model folders (default: local the built-in ones, slime ../models)
#   TEACHER_URL          a running server of TEACHER_MODEL
#   STUDENT_TORCH_DIST   STUDENT_HF as torch_dist (slime alone)
#   PROMPT_DATA          a prompt file (default: local the configuration's tasks, slime ../data/train.jsonl)
#   NUM_ROLLOUT, ROLLOUT_BATCH_SIZE, N_SAMPLES_PER_PROMPT, GLOBAL_BATCH_SIZE, ROLLOUT_MAX_RESPONSE_LEN, ROLLOUT_TEMPERATURE, SAVE_INTERVAL
#                        sizes of a run (default: the configuration's)
#   OPD_TOPK_METRICS_K   length of student's and teacher's lists (default: 16)
#   OPD_BUDGET_GAMMA, OPD_COMPAT_PROXY, OPD_METRIC_NORMALIZATION, OPD_EXACT_CMASS   how tokens are scored
#   OPD_TOKEN_BANK_DIR, OPD_TOKEN_BANK_FORMAT, OPD_TOKEN_BANK_RAW_TOPK, OPD_TOKEN_BANK_PAIR_ID   banks of all tokens (default: none)
#   DRY_RUN=1            prints what would be run
# Arguments are settings of all runs, e.g. opd.selection.missing_mass=rest. A tandem suite:
#   METHOD_LIST="solo_grpo:1.0:10 tandem_word:0.5:20 tandem_word:0.25:21 tandem_sentence:0.5:30" bash scripts/train/run_method_suite.sh
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
for name in OPD_BUDGET_MASK OPD_BUDGET_RATIO RUN_LIST; do
  [[ -z "${!name:-}" ]] || refuse "$name" "${!name}" "nothing: METHOD_LIST says which method keeps how much" "unset it"
done
for name in SEED_LABEL LOG_DIR RUN_NAME SAVE_DIR; do
  [[ -z "${!name:-}" ]] || refuse "$name" "${!name}" "nothing: runs are named by idx, method, ratio and seed" "unset it; SEEDS, OUTPUT_ROOT and TAG are read"
done
for name in TEACHER_GPU RAY_GPUS ACTOR_NUM_GPUS_PER_NODE ROLLOUT_NUM_GPUS TEACHER_IP TEACHER_PORT TEACHER_NCCL_PORT TEACHER_MEM_FRACTION \
  ROLLOUT_MEM_FRACTION TEACHER_CUDA_GRAPH_MAX_BS SGLANG_CUDA_GRAPH_MAX_BS MICRO_BATCH_SIZE SAVE_DEBUG_ROLLOUT_DATA DEBUG_ROLLOUT_ONLY; do
  [[ -z "${!name:-}" ]] || refuse "$name" "${!name}" "nothing: the plan places models and GPUs" "unset it; see cluster.* (docs/scaling.md), cluster.slime_flags and TEACHER_URL"
done
for name in OPD_EXACT_CMASS_MAX_UNION=4096 OPD_EXACT_CMASS_OVERFLOW=fallback; do
  variable="${name%%=*}"
  [[ -z "${!variable:-}" || "${!variable}" == "${name#*=}" ]] || refuse "$variable" "${!variable}" "${name#*=}, the published default" "unset it"
done
BACKEND="${BACKEND:-$([[ -n "${SLIME_DIR:-}${MEGATRON_LM_DIR:-}${STUDENT_TORCH_DIST:-}" ]] && echo slime || echo local)}"
# What is relative is so to the caller's folder; the rest of this script stands in the repository.
if [[ -n "${OUTPUT_ROOT:-}" ]]; then OUTPUT_ROOT="$(realpath -ms -- "$OUTPUT_ROOT")"; fi
if [[ -n "${OPD_TOKEN_BANK_DIR:-}" ]]; then OPD_TOKEN_BANK_DIR="$(realpath -ms -- "$OPD_TOKEN_BANK_DIR")"; fi
for name in CONFIG PROMPT_DATA STUDENT_HF STUDENT_TORCH_DIST TEACHER_MODEL JUNIOR_MODEL; do
  if [[ -e "${!name:-}" ]]; then printf -v "$name" '%s' "$(realpath -s -- "${!name}")"; fi
done
METHOD_LIST="${METHOD_LIST:-pure_opd:1.0:10 teachability:0.10:20 entropy:0.10:30 teachability_entropy:0.10:40 tip:0.10:50}"
OUTPUT_ROOT="${OUTPUT_ROOT:-runs/methods}${TAG:+/$TAG}"
source "$REPO/scripts/train/slime_lib.sh"
cd "$REPO"
flags=()
# from_variable NAME SETTING: the variable as a setting, if it is set.
from_variable() {
  if [[ -n "${!1:-}" ]]; then flags+=("$2=$(quoted_unless_number "${!1}")"); fi
}
quoted_unless_number() {
  if [[ "$1" =~ ^[0-9.]+$ ]]; then printf '%s' "$1"; else quoted "$1"; fi
}
from_variable NUM_ROLLOUT train.steps
from_variable N_SAMPLES_PER_PROMPT train.samples_per_prompt
from_variable ROLLOUT_BATCH_SIZE train.prompts_per_step
from_variable ROLLOUT_MAX_RESPONSE_LEN sampling.max_new_tokens
from_variable ROLLOUT_TEMPERATURE sampling.temperature
from_variable SAVE_INTERVAL train.save_every
from_variable OPD_BUDGET_GAMMA opd.selection.gamma
from_variable OPD_METRIC_NORMALIZATION opd.selection.normalisation
from_variable OPD_TOKEN_BANK_DIR opd.token_bank_dir
from_variable OPD_TOKEN_BANK_FORMAT opd.token_bank_format
from_variable OPD_TOKEN_BANK_PAIR_ID opd.token_bank_pair_id
if [[ -n "${GLOBAL_BATCH_SIZE:-}" ]]; then
  need_number GLOBAL_BATCH_SIZE 8
  ROLLOUT_BATCH_SIZE="${ROLLOUT_BATCH_SIZE:-}" N_SAMPLES_PER_PROMPT="${N_SAMPLES_PER_PROMPT:-}"
  need_number ROLLOUT_BATCH_SIZE 4
  need_number N_SAMPLES_PER_PROMPT 2
  samples=$((ROLLOUT_BATCH_SIZE * N_SAMPLES_PER_PROMPT))
  ((samples % GLOBAL_BATCH_SIZE == 0)) || refuse GLOBAL_BATCH_SIZE "$GLOBAL_BATCH_SIZE" \
    "a divisor of ROLLOUT_BATCH_SIZE * N_SAMPLES_PER_PROMPT = $samples" "change one of them"
  flags+=("train.updates_per_step=$((samples / GLOBAL_BATCH_SIZE))")
fi
case "${OPD_COMPAT_PROXY:-}" in
  "") ;;
  mass) flags+=(opd.selection.compatibility=mass) ;;
  set) flags+=(opd.selection.compatibility=overlap) ;;
  bc) flags+=(opd.selection.compatibility=bhattacharyya) ;;
  prefix_ema) flags+=(opd.selection.compatibility=prefix) ;;
  *) refuse OPD_COMPAT_PROXY "$OPD_COMPAT_PROXY" "mass, set, bc or prefix_ema" "choose one of these" ;;
esac
case "${RULES:-own}" in
  own) [[ "${OPD_EXACT_CMASS:-0}" == 0 ]] || refuse OPD_EXACT_CMASS "$OPD_EXACT_CMASS" "0 with RULES=own, whose scores are exact already" "set RULES=reference" ;;
  reference)
    flags+=(opd.selection.rules=reference opd.selection.missing_mass=fill)
    if [[ "${OPD_EXACT_CMASS:-0}" != 0 ]]; then flags+=(opd.selection.exact_cmass=true); fi
    ;;
  *) refuse RULES "$RULES" "own or reference" "choose one of these" ;;
esac
if [[ "${OPD_TOKEN_BANK_RAW_TOPK:-0}" != 0 ]]; then flags+=(opd.token_bank_raw_topk=true); fi
tandem=0
if [[ " ${METHOD_LIST//,/ }" == *" tandem_"* ]]; then tandem=1; fi
if [[ "$BACKEND" == slime ]]; then
  beside="$(dirname "$REPO")"
  STUDENT_HF="${STUDENT_HF:-$beside/models/Qwen3-1.7B}"
  TEACHER_MODEL="${TEACHER_MODEL:-$beside/models/Qwen3-8B}"
  PROMPT_DATA="${PROMPT_DATA:-$beside/data/train.jsonl}"
  if ((tandem)); then JUNIOR_MODEL="${JUNIOR_MODEL:-$beside/models/Qwen3-0.6B}"; fi
  need_slime
  flags+=("cluster.nodes=$NODES" "cluster.gpus_per_node=$GPUS_PER_NODE")
fi
if [[ -n "${STUDENT_HF:-}" ]]; then
  need_model STUDENT_HF "the trainable student"
  flags+=("models.senior=$(quoted "$STUDENT_HF")")
fi
if [[ -n "${TEACHER_MODEL:-}" ]]; then
  need_model TEACHER_MODEL "the teacher"
  flags+=("models.teacher=$(quoted "$TEACHER_MODEL")")
fi
if [[ -n "${PROMPT_DATA:-}" ]]; then
  need_file PROMPT_DATA "prompts"
  flags+=("tasks=[{family: jsonl, path: $(quoted "$PROMPT_DATA")}]")
fi
if ((tandem)) && [[ -n "${JUNIOR_MODEL:-}" ]]; then
  need_model JUNIOR_MODEL "the frozen junior"
  flags+=("models.junior=$(quoted "$JUNIOR_MODEL")")
fi
if [[ -n "${STUDENT_TORCH_DIST:-}" ]]; then
  [[ "$BACKEND" == slime ]] || refuse STUDENT_TORCH_DIST "$STUDENT_TORCH_DIST" "nothing with BACKEND=$BACKEND, which reads STUDENT_HF" "unset it, or BACKEND=slime"
  [[ -f "$STUDENT_TORCH_DIST/latest_checkpointed_iteration.txt" ]] || refuse STUDENT_TORCH_DIST "$STUDENT_TORCH_DIST" \
    "a Megatron checkpoint with latest_checkpointed_iteration.txt" "make it: slime-tandem convert $STUDENT_HF $STUDENT_TORCH_DIST"
  flags+=("cluster.reference=$(quoted "$STUDENT_TORCH_DIST")")
fi
if [[ -n "${TEACHER_URL:-}" ]]; then flags+=("engine.teacher_url=$(quoted "$TEACHER_URL")"); fi
usual=methods
if [[ "$BACKEND" == slime || -n "${STUDENT_HF:-}" ]]; then usual=slime_opd; fi
CONFIG="${CONFIG:-scripts/train/configs/$usual.yaml}"
dry=()
if [[ "${DRY_RUN:-0}" == 1 ]]; then dry=(--dry-run); fi
suite=(suite "$OUTPUT_ROOT" --methods "$METHOD_LIST" --seeds "${SEEDS:-0 1 2}" --top-k "${OPD_TOPK_METRICS_K:-16}" --backend "$BACKEND")
flags+=("$@")
if [[ "$BACKEND" == slime ]]; then
  start_ray
  code=0
  attend "$SLIME_PYTHON" -m slime_tandem.cli "${suite[@]}" --config "$CONFIG" "${dry[@]}" --set "${flags[@]}" || code=$?
  exit "$code"
fi
if ((${#flags[@]})); then flags=(--set "${flags[@]}"); fi
command=("$VENV/bin/slime-tandem" "${suite[@]}" --config "$CONFIG" "${flags[@]}")
setup_venv base
if [[ "${DRY_RUN:-0}" == 1 && -x "$VENV/bin/slime-tandem" ]]; then
  "${command[@]}" --dry-run
else
  run "${command[@]}"
  run "$VENV/bin/slime-tandem" report "$OUTPUT_ROOT"
fi
