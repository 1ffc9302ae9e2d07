#!/usr/bin/env bash
# (b) What the teacher says: sampled tokens or lists, another vocabulary or the student's, strict pairs or spans; a GRPO control.
# question.sh lists the variables. slime reads STUDENT_HF, TEACHER_MODEL (another tokenizer), SAME_TEACHER (the student's tokenizer) and
# PROMPT_DATA.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/question.sh"
if [[ "$BACKEND" == local ]]; then
  on_toys b
  exit
fi
need_set STUDENT_HF "the trainable student"
need_set TEACHER_MODEL "a teacher with another tokenizer"
need_set SAME_TEACHER "a teacher with the student's tokenizer"
lists=(opd.signal=reverse_kl opd.top_k=16)
suite grpo "solo_grpo:1.0:10" "$@"
beside_teacher teacher "$TEACHER_MODEL" "${TEACHER_PORT:-13141}"
TEACHER_URL="$SERVED_URL" suite sampled "pure_opd:1.0:10" "$@"
TEACHER_URL="$SERVED_URL" suite top-k "pure_opd:1.0:10" "${lists[@]}" "$@"
TEACHER_URL="$SERVED_URL" suite spans "pure_opd:1.0:10" opd.alignment=chain_rule "$@"
export TEACHER_MODEL="$SAME_TEACHER" TEACHER_URL="${SAME_TEACHER_URL:-}"
beside_teacher same-teacher "$TEACHER_MODEL" "${SAME_TEACHER_PORT:-13142}"
TEACHER_URL="$SERVED_URL" suite same-sampled "pure_opd:1.0:10" "$@"
TEACHER_URL="$SERVED_URL" suite same-top-k "pure_opd:1.0:10" "${lists[@]}" "$@"
