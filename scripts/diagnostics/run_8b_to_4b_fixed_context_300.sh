#!/usr/bin/env bash
# A teacher of 8B and a student of 4B parameters (Qwen3-8B, Qwen3-4B), one GPU.
# Needs STUDENT_HF, TRAINED_HF, TEACHER_MODEL and PROMPT_DATA; everything else has a default and can be set
# (scripts/diagnostics/run_heldout_fixed_context_300.sh lists it). DRY_RUN=1 prints the commands.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
need_set STUDENT_HF "Qwen3-4B"
need_set TRAINED_HF "the same, trained"
need_set TEACHER_MODEL "Qwen3-8B"
need_set PROMPT_DATA "a prompt file" "set it to a JSONL of prompts"
export OUT="${OUT:-${OUTPUT_ROOT:-$(dirname "${BASH_SOURCE[0]}")/../../runs}/diagnostics-8b-to-4b}" DTYPE="${DTYPE:-bfloat16}" DEVICE="${DEVICE:-cuda}"
export SETTINGS="${SETTINGS:-sampling.max_new_tokens=2048}"
exec bash "$(dirname "${BASH_SOURCE[0]}")/run_heldout_fixed_context_300.sh"
