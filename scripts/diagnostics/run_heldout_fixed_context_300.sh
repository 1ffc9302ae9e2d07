#!/usr/bin/env bash
# Fixed-context diagnostics of one model pair: bank -> evaluation before -> evaluation after -> merge -> analyses. Interrupted,
# the same command goes on: what is finished is not made again. All by environment variable; DRY_RUN=1 prints the commands.
#   STUDENT_HF     folder of the student before training, which also writes the responses (Hugging Face, or builtin:senior)
#   TRAINED_HF     folder of the student after training
#   TEACHER_MODEL  folder of the teacher
#   OUT            folder of all outputs (default: runs/diagnostics)
#   CONFIG         settings with the tasks (default: the quickstart's), PROMPT_DATA a JSONL of prompts instead of its tasks,
#                  RESPONSES a JSONL of finished responses instead of writing some
#   SETTINGS       more settings, separated by blanks, e.g. "engine.senior_url=http://host:30000 sampling.max_new_tokens=2048"
#   SEQUENCES (300), POSITIONS per response (16), SAMPLING (quadrant), TOP_K (16), MISSING_MASS (none: by vocabulary), SEED (0)
#   DTYPE (float32), DEVICE (cpu), RESAMPLES (1000), TOP_N (none: a tenth of the bank), CACHE (.cache/models)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
need_set STUDENT_HF "the student before training"
need_set TRAINED_HF "the student after training"
need_set TEACHER_MODEL "the teacher"
# What is relative is so to the caller's folder; the rest of this script stands in the repository.
from_here STUDENT_HF TRAINED_HF TEACHER_MODEL CONFIG PROMPT_DATA RESPONSES
into_here OUT CACHE
OUT="${OUT:-runs/diagnostics}"
CACHE="${CACHE:-.cache/models}"
setup_venv base diagnostics
cd "$REPO"
python=("$VENV/bin/python")

settings=("models.senior=$STUDENT_HF" "models.teacher=$TEACHER_MODEL" "models.cache_dir=$CACHE" "models.dtype=${DTYPE:-float32}")
settings+=("runs_dir=$OUT" "name=servers")
[[ -z "${PROMPT_DATA:-}" ]] || settings+=("tasks=[{family: jsonl, path: \"$PROMPT_DATA\"}]")
read -r -a more <<< "${SETTINGS:-}"
bank="$OUT/bank.parquet"
if [[ -f "$bank" ]]; then
  echo "going on with $bank; delete it to make another" >&2
else
  export=("${python[@]}" tools/export_fixed_context_bank.py --config "${CONFIG:-scripts/train/configs/sums.yaml}")
  export+=(--set "${settings[@]}" "${more[@]}" --sequences "${SEQUENCES:-300}" --positions "${POSITIONS:-16}")
  export+=(--sampling "${SAMPLING:-quadrant}" --top-k "${TOP_K:-16}" --seed "${SEED:-0}" --output "$bank")
  [[ -z "${MISSING_MASS:-}" ]] || export+=(--missing-mass "$MISSING_MASS")
  [[ -z "${RESPONSES:-}" ]] || export+=(--responses "$RESPONSES")
  run "${export[@]}"
fi
for label in before after; do
  student="$STUDENT_HF"
  [[ $label == before ]] || student="$TRAINED_HF"
  run "${python[@]}" tools/eval_fixed_context_bank.py "$bank" --student "$student" --teacher "$TEACHER_MODEL" --label "$label" \
    --output "$OUT/$label.parquet" --dtype "${DTYPE:-float32}" --device "${DEVICE:-cpu}" --cache-dir "$CACHE"
done
run "${python[@]}" tools/merge_token_banks.py "$OUT/before.parquet" "$OUT/after.parquet" --output "$OUT/evaluations.parquet"
files=("$bank" "$OUT/evaluations.parquet" --resamples "${RESAMPLES:-1000}" --seed "${SEED:-0}")
top_n=()
[[ -z "${TOP_N:-}" ]] || top_n=(--top-n "$TOP_N")
run "${python[@]}" tools/analyze_fixed_context_gain.py "${files[@]}" --output "$OUT/gain"
run "${python[@]}" tools/matched_fixed_context_topn.py "${files[@]}" "${top_n[@]}" --output "$OUT/topn"
run "${python[@]}" tools/support_definition_robustness.py "${files[@]}" --output "$OUT/support"
