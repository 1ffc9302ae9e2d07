#!/usr/bin/env bash
# (a) Tandem against solo GRPO: prob_senior, where the author changes, a weaker junior against a copy of the start. question.sh lists the
# variables. slime reads STUDENT_HF, JUNIOR_MODEL (weaker, same tokenizer) and PROMPT_DATA.
# local also runs the rows of two_notations.py that it is compared with, and measures all alike. That script has the main comparison,
# the dose and the self-paired case: python scripts/experiments/two_notations.py run --out docs/results/data/two_notations.jsonl
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/question.sh"
if [[ "$BACKEND" == local ]]; then
  on_toys a
  exit
fi
need_set STUDENT_HF "the trainable senior"
need_set JUNIOR_MODEL "a weaker junior with the senior's tokenizer"
methods="tandem_word:0.5:20 tandem_word:0.3:21 tandem_word:0.7:22 tandem_chunk:0.5:30 tandem_sentence:0.5:40"
suite solo "solo_grpo:1.0:10" "$@"
suite weaker "$methods" "${fused[@]}" "$@"
JUNIOR_MODEL="$STUDENT_HF" suite self "$methods" "${fused[@]}" "$@"
