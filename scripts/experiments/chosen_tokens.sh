#!/usr/bin/env bash
# (c) Which tokens are taught: teachability, entropy, random, divergence at 5, 10, 20, 50 %, beside all of them and a GRPO control.
# question.sh lists the variables. slime reads STUDENT_HF, TEACHER_MODEL and PROMPT_DATA.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/question.sh"
if [[ "$BACKEND" == local ]]; then
  on_toys c
  exit
fi
need_set STUDENT_HF "the trainable student"
need_set TEACHER_MODEL "the teacher, any tokenizer"
methods="pure_opd:1.0:10"
index=20
for share in 0.05 0.1 0.2 0.5; do
  for selector in teachability entropy random divergence; do
    methods+=" $selector:$share:$index"
    index=$((index + 1))
  done
done
suite grpo "solo_grpo:1.0:10" "$@"
beside_teacher teacher "$TEACHER_MODEL" "${TEACHER_PORT:-13141}"
TEACHER_URL="$SERVED_URL" suite chosen "$methods" "$@"
