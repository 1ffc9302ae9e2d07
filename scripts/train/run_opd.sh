#!/usr/bin/env bash
# On-policy distillation under slime: the student writes alone, a teacher scores what it wrote, also with another tokenizer; no task
# reward. Same or cross vocabulary is found by the tokenizers. What run_tandem_grpo.sh lists, but:
#   STUDENT_HF           trainable, a Hugging Face folder            (default: ../models/Qwen3-1.7B)
#   TEACHER_MODEL        frozen scorer                               (default: ../models/Qwen3-8B; another vocabulary: a Llama)
#   TEACHER_URL          a running server of it                      (default: slime serves it)
#   OPD_SELECTOR, OPD_RATIO   which tokens carry the signal          (default: the configuration's)
#   OPD_TOPK_METRICS_K   length of the lists of a selector
#   CONFIG               further settings                            (default: configs/slime_opd.yaml)
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
beside="$(dirname "$(dirname "$(dirname "$here")")")"
export SENIOR_MODEL="${STUDENT_HF:-$beside/models/Qwen3-1.7B}"
export JUNIOR_MODEL="$SENIOR_MODEL" # unused: the student writes alone
export TEACHER_MODEL="${TEACHER_MODEL:-$beside/models/Qwen3-8B}"
export CONFIG="${CONFIG:-$here/configs/slime_opd.yaml}" NAME="${NAME:-opd}"
chosen=()
if [[ -n "${OPD_SELECTOR:-}" ]]; then chosen+=("opd.selection.selector=$OPD_SELECTOR"); fi
if [[ -n "${OPD_RATIO:-}" ]]; then chosen+=("opd.selection.ratio=$OPD_RATIO"); fi
if [[ -n "${OPD_TOPK_METRICS_K:-}" ]]; then chosen+=("opd.selection.top_k=$OPD_TOPK_METRICS_K"); fi
exec bash "$here/run_tandem_grpo.sh" "${chosen[@]}" "$@"
