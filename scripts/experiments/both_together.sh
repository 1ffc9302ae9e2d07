#!/usr/bin/env bash
# (d) Both together: co-writing with a teacher on all tokens, on a tenth by teachability, on a random tenth; each part alone; solo GRPO.
# question.sh lists the variables. slime reads STUDENT_HF, JUNIOR_MODEL (the student's tokenizer), TEACHER_MODEL and PROMPT_DATA.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/question.sh"
if [[ "$BACKEND" == local ]]; then
  on_toys d
  exit
fi
need_set STUDENT_HF "the trainable senior"
need_set JUNIOR_MODEL "a junior with the senior's tokenizer"
need_set TEACHER_MODEL "the teacher, any tokenizer"
both=(tandem.enabled=true objective.reward_coef=1.0 opd.coef=0.2 "models.junior='${JUNIOR_MODEL//\'/\'\'}'")
suite grpo "solo_grpo:1.0:10" "$@"
suite tandem "tandem_word:0.5:20" "${fused[@]}" "$@"
beside_teacher teacher "$TEACHER_MODEL" "${TEACHER_PORT:-13141}"
TEACHER_URL="$SERVED_URL" suite both "pure_opd:1.0:10 teachability:0.10:20 random:0.10:30" "${fused[@]}" "${both[@]}" "$@"
TEACHER_URL="$SERVED_URL" suite solo "teachability:0.10:10" objective.reward_coef=1.0 opd.coef=0.2 "$@"
