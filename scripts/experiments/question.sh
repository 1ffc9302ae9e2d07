# shellcheck shell=bash
# What the scripts of the four questions share (docs/results/protocol.md): toy models on the CPU, or real ones on one GPU under slime.
#   BACKEND        local, or slime (what scripts/train/slime_lib.sh lists); default: slime where SLIME_DIR is set, else local
#   DRY_RUN=1      prints the commands (slime: and writes the launch files), starts nothing
# local:
#   SIZE           toy (default; models of 75 to 124 thousand parameters, hours of one core), or ci (models that have learnt nothing, two
#                  steps: a minute)
#   SEEDS          default "1 2 3 4 5"
#   OUT            folder of the lines (default: docs/results/data; SIZE=ci: runs/questions-ci/data)
#   WORK           models, runs and logs (default: runs/questions; SIZE=ci: runs/questions-ci)
# slime:
#   STUDENT_HF, TEACHER_MODEL, JUNIOR_MODEL, SAME_TEACHER   model folders; each script says which it reads
#   PROMPT_DATA    a prompt file
#   SEEDS          default "1 2 3 4 5"
#   NUM_ROLLOUT    steps of a run (default: 500), SAVE_INTERVAL steps between checkpoints (default: 25)
#   GPUS_PER_NODE  default 1. On one GPU the junior writes inside the senior's engine (engine.mode=fused), and a teacher without
#                  TEACHER_URL is served beside it with the share TEACHER_MEM of its memory (default: 0.2), while the engines get 0.5
#   OUTPUT_ROOT    folder of the suites (default: runs/questions-gpu)
# Called again, both go on where they were: finished runs are kept, one that was cut short goes on from its last checkpoint.
# Arguments are settings of all runs (slime alone).
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
BACKEND="${BACKEND:-$([[ -n "${SLIME_DIR:-}" ]] && echo slime || echo local)}"
case "$BACKEND" in
  local | slime) ;;
  *) refuse BACKEND "$BACKEND" "local or slime" "choose one of these" ;;
esac
SIZE="${SIZE:-toy}"
case "$SIZE" in
  toy | ci) ;;
  *) refuse SIZE "$SIZE" "toy or ci" "choose one of these; real models: BACKEND=slime" ;;
esac

# on_toys LETTER: the question on toy models, and its tables.
on_toys() {
  local usual=runs/questions data=docs/results/data
  if [[ "$SIZE" == ci ]]; then usual=runs/questions-ci data=runs/questions-ci/data; fi
  local out="${OUT:-$data}" work="${WORK:-$usual}"
  local -a seeds
  read -r -a seeds <<< "${SEEDS:-1 2 3 4 5}"
  setup_venv base diagnostics
  run "$VENV/bin/python" scripts/experiments/questions.py run --question "$1" --size "$SIZE" --seeds "${seeds[@]}" --out "$out" --work "$work"
  if [[ "$1" == a ]]; then measured_alike; fi
  run "$VENV/bin/python" scripts/experiments/questions.py table "$1" "$out"
}

# measured_alike: what (a) is compared with, and the arms of both measured by one rule; reads on_toys' variables.
measured_alike() {
  local -a few=()
  if [[ "$SIZE" == ci ]]; then few=(--tiny --steps 2); fi
  run "$VENV/bin/python" scripts/experiments/two_notations.py run --doses 0 --arms "tandem alone" "solo GRPO" --seeds "${seeds[@]}" \
    --work "$work" --out "$out/two_notations_repeat.jsonl" "${few[@]}"
  run "$VENV/bin/python" scripts/experiments/measure.py run --doses 0 --seeds "${seeds[@]}" --runs "$work" \
    --out "$out/two_notations_measured.jsonl"
}

# suite NAME METHODS SETTING...: one suite under slime, below OUTPUT_ROOT/NAME.
suite() {
  local name="$1" methods="$2"
  shift 2
  if one_gpu; then set -- cluster.mem_fraction=0.5 "$@"; fi
  METHOD_LIST="$methods" TAG="$name" BACKEND=slime SEEDS="${SEEDS:-1 2 3 4 5}" NUM_ROLLOUT="${NUM_ROLLOUT:-500}" \
    SAVE_INTERVAL="${SAVE_INTERVAL:-25}" GPUS_PER_NODE="$GPUS_PER_NODE" OUTPUT_ROOT="$OUTPUT_ROOT" \
    bash scripts/train/run_method_suite.sh "$@"
}

one_gpu() {
  [[ "${GPUS_PER_NODE:-1}" == 1 && "${NODES:-1}" == 1 ]]
}

# beside_teacher NAME FOLDER PORT: on one GPU, where no TEACHER_URL is set, a server of the teacher; sets SERVED_URL to where it answers.
beside_teacher() {
  SERVED_URL="${TEACHER_URL:-}"
  if one_gpu && [[ -z "$SERVED_URL" ]]; then
    SERVED_URL="http://127.0.0.1:$3"
    [[ "${DRY_RUN:-0}" == 1 ]] || need_modules "SGLang" "sglang" sglang.launch_server
    start "$1" "$SERVED_URL/health" "$SLIME_PYTHON" -m sglang.launch_server --model-path "$2" --host 127.0.0.1 --port "$3" \
      --mem-fraction-static "${TEACHER_MEM:-0.2}" --disable-radix-cache
  fi
}

from_here OUT WORK OUTPUT_ROOT PROMPT_DATA STUDENT_HF TEACHER_MODEL JUNIOR_MODEL SAME_TEACHER
into_here OUT WORK OUTPUT_ROOT
cd "$REPO" || exit
if [[ "$BACKEND" == slime ]]; then
  # shellcheck source=scripts/train/slime_lib.sh
  OUTPUT_ROOT="${OUTPUT_ROOT:-$REPO/runs/questions-gpu}" GPUS_PER_NODE="${GPUS_PER_NODE:-1}"
  source "$REPO/scripts/train/slime_lib.sh"
fi
# shellcheck disable=SC2034 # the scripts that source this read it
fused=()
# shellcheck disable=SC2034
if one_gpu; then fused=(engine.mode=fused); fi
