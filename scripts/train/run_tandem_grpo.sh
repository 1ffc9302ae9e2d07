#!/usr/bin/env bash
# Tandem GRPO under slime: senior and junior write together, the team is rewarded, the senior learns; with TEACHER_MODEL or TEACHER_URL
# a teacher's signal on top. One machine or several. What slime_lib.sh lists, and:
#   SENIOR_MODEL         trainable, a Hugging Face folder            (default: ../models/Qwen3-4B)
#   JUNIOR_MODEL         frozen, same tokenizer                      (default: ../models/Qwen3-0.6B)
#   TEACHER_MODEL        frozen scorer, any tokenizer                (default: none)
#   TEACHER_URL          a running server of TEACHER_MODEL           (default: slime serves it)
#   STUDENT_TORCH_DIST   SENIOR_MODEL as torch_dist (slime-tandem convert); default: slime reads the Hugging Face folder
#   PROMPT_DATA          JSONL with messages or prompt, and label    (default: ../data/train.jsonl)
#   NUM_ROLLOUT          rollouts                                    (default: the configuration's)
#   SIZE                 1, 2, 4 or 8: settings for so many GPUs of one machine; then GPUS_PER_NODE is that (default: none)
#   NAME                 folder of the run under OUTPUT_ROOT         (default: tandem-grpo)
#   CONFIG               further settings                            (default: configs/slime_tandem_grpo.yaml)
# Arguments are settings, e.g. engine.mode=fused cluster.tensor_parallel=2; after -- flags of slime, e.g. -- --use-tensorboard.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
if [[ -n "${SIZE:-}" ]]; then GPUS_PER_NODE="$SIZE"; fi
source "$(dirname "${BASH_SOURCE[0]}")/slime_lib.sh"
# Names of the published scripts that this one does not read, and what does their work: dropped, they would change the job unsaid.
for pair in POLICY_MODEL=SENIOR_MODEL BASE_MODEL=SENIOR_MODEL TRAIN_FILES=PROMPT_DATA TOTAL_STEPS=NUM_ROLLOUT EXP_NAME=NAME CKPT_ROOT=OUTPUT_ROOT \
  SELECTION=tandem.selection_strategy PROB_PRIMARY=tandem.prob_senior MAX_GAP_TOKENS=tandem.max_gap_tokens \
  JR_TKN_WEIGHT=tandem.junior_token_loss_weight BOUNDARY_IDS_PATH=tandem.boundary_token_ids FROZEN_GPU=cluster.junior_gpus \
  VLLM_TANDEM_CONFIG="slime-tandem migrate --settings" LR=optimizer.lr CLIP_RATIO=objective.clip_low TRAIN_BATCH=train.prompts_per_step \
  MINI_BATCH=train.updates_per_step ROLLOUT_N=train.samples_per_prompt ROLLOUT_TEMP=sampling.temperature \
  MAX_RESPONSE=sampling.max_new_tokens SAVE_FREQ=train.save_every TEST_FREQ=eval.every ROLLOUT_BATCH_SIZE=train.prompts_per_step \
  N_SAMPLES_PER_PROMPT=train.samples_per_prompt GLOBAL_BATCH_SIZE=train.updates_per_step ROLLOUT_MAX_RESPONSE_LEN=sampling.max_new_tokens \
  ROLLOUT_TEMPERATURE=sampling.temperature SAVE_INTERVAL=train.save_every OPD_BUDGET_MASK=OPD_SELECTOR OPD_BUDGET_RATIO=OPD_RATIO \
  OPD_BUDGET_GAMMA=opd.selection.gamma OPD_COMPAT_PROXY=opd.selection.compatibility OPD_EXACT_CMASS=opd.selection.exact_cmass \
  OPD_METRIC_NORMALIZATION=opd.selection.normalisation OPD_TOKEN_BANK_DIR=opd.token_bank_dir METHOD_LIST=run_method_suite.sh; do
  name="${pair%%=*}"
  [[ -z "${!name:-}" ]] || refuse "$name" "${!name}" "nothing: this script does not read it" "unset it; ${pair#*=} does its work (docs/published.md)"
done
models="$(dirname "$REPO")/models"
SENIOR_MODEL="${SENIOR_MODEL:-$models/Qwen3-4B}"
JUNIOR_MODEL="${JUNIOR_MODEL:-$models/Qwen3-0.6B}"
PROMPT_DATA="${PROMPT_DATA:-$(dirname "$REPO")/data/train.jsonl}"
CONFIG="${CONFIG:-$REPO/scripts/train/configs/slime_tandem_grpo.yaml}"
NAME="${NAME:-tandem-grpo}"
need_slime
need_model SENIOR_MODEL "the trainable model (run_opd.sh: STUDENT_HF)"
need_model JUNIOR_MODEL "the frozen junior"
need_file PROMPT_DATA "prompts with labels"
need_file CONFIG "settings of slime_tandem"
settings=("name=$(quoted "$NAME")" "runs_dir=$(quoted "$OUTPUT_ROOT")" "models.senior=$(quoted "$SENIOR_MODEL")" "models.junior=$(quoted "$JUNIOR_MODEL")"
  "tasks=[{family: jsonl, path: $(quoted "$PROMPT_DATA")}]" "cluster.nodes=$NODES" "cluster.gpus_per_node=$GPUS_PER_NODE")
if [[ -n "${TEACHER_MODEL:-}" || -n "${TEACHER_URL:-}" ]]; then
  TEACHER_MODEL="${TEACHER_MODEL:-}"
  need_model TEACHER_MODEL "the teacher (its tokenizer, also with TEACHER_URL)"
  settings+=("opd.enabled=true" "models.teacher=$(quoted "$TEACHER_MODEL")")
fi
if [[ -n "${TEACHER_URL:-}" ]]; then settings+=("engine.teacher_url=$(quoted "$TEACHER_URL")"); fi
if [[ -n "${STUDENT_TORCH_DIST:-}" ]]; then
  [[ -f "$STUDENT_TORCH_DIST/latest_checkpointed_iteration.txt" ]] || refuse STUDENT_TORCH_DIST "$STUDENT_TORCH_DIST" \
    "a Megatron checkpoint with latest_checkpointed_iteration.txt" "make it: slime-tandem convert $SENIOR_MODEL $STUDENT_TORCH_DIST"
  settings+=("cluster.reference=$(quoted "$STUDENT_TORCH_DIST")")
fi
if [[ -n "${NUM_ROLLOUT:-}" ]]; then
  need_number NUM_ROLLOUT
  settings+=("train.steps=$NUM_ROLLOUT")
fi
extra=()
while [[ $# -gt 0 ]]; do
  if [[ "$1" == -- ]]; then
    extra=("$@")
    break
  fi
  settings+=("$1")
  shift
done
launch="$OUTPUT_ROOT/$NAME/slime_launch"
plan "$launch" --check "$CONFIG" ${SIZE:+--size "$SIZE"} --set "${settings[@]}" "${extra[@]}"
check "$launch"
start_ray
submit "$launch"
