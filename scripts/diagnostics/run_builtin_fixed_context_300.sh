#!/usr/bin/env bash
# The whole pipeline on the built-in models, two cores, no GPU: makes them, distils the senior from a teacher for 20 steps
# (no junior, no task reward), and looks at 300 held-out responses. TEACHER=same is a teacher of the student's own vocabulary
# (default), TEACHER=other the quickstart's. Set any variable of run_heldout_fixed_context_300.sh to change it; DRY_RUN=1 prints.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
from_here STUDENT_HF TRAINED_HF TEACHER_MODEL CONFIG PROMPT_DATA RESPONSES
into_here OUT CACHE
setup_venv base diagnostics
cd "$REPO"
teacher="${TEACHER:-same}"
export OUT="${OUT:-runs/diagnostics-$teacher}" CACHE="${CACHE:-.cache/models}" STUDENT_HF="${STUDENT_HF:-builtin:senior}"
if [[ -z "${TEACHER_MODEL:-}" ]]; then
  if [[ $teacher == other ]]; then
    TEACHER_MODEL=builtin:teacher
  else
    TEACHER_MODEL="$CACHE/same-vocabulary/teacher"
    make="import sys; from pathlib import Path; from slime_tandem.models.builtin import Recipe, make_model
make_model('teacher', Recipe(teacher_tokenizer=Recipe().student_tokenizer), Path(sys.argv[1]), print)"
    [[ -f "$TEACHER_MODEL/measured.json" ]] || run "$VENV/bin/python" -c "$make" "$CACHE/same-vocabulary"
  fi
fi
export TEACHER_MODEL
if [[ -z "${TRAINED_HF:-}" ]]; then
  run "$VENV/bin/slime-tandem" train --config scripts/train/configs/sums.yaml --resume --set "runs_dir=$OUT" name=train \
    control=false tandem.enabled=false objective.reward_coef=0 "models.senior=$STUDENT_HF" "models.teacher=$TEACHER_MODEL" \
    "models.cache_dir=$CACHE"
  TRAINED_HF="$OUT/train/senior"
fi
export TRAINED_HF
exec bash scripts/diagnostics/run_heldout_fixed_context_300.sh
