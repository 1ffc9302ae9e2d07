# shellcheck shell=bash
# Starts slime's train.py through `ray job submit`, and stops only what was started here. Source it after lib.sh.
#   SLIME_DIR         checkout of slime                               (default: beside this repository)
#   MEGATRON_LM_DIR   checkout of Megatron-LM, with slime's patch     (default: beside this repository)
#   SLIME_PYTHON      the Python that has slime's requirements        (default: python3)
#   OUTPUT_ROOT       runs and launch files; every node must see it   (default: runs in this repository)
#   NODES, GPUS_PER_NODE                                              (default: 1, 8)
#   RAY_DASHBOARD     URL of a running Ray's dashboard; unset: a head is started here and stopped at the end
#   MASTER_ADDR       address of that head; other machines need one that they can reach (default: 127.0.0.1)
#   RAY_PORT, DASHBOARD_PORT          not of 10001 to 19999, which are Ray's workers'  (default: 6379, 8265)
#   RAY_START_FLAGS   more flags of `ray start`, separated by blanks  (default: none)
#   JOB_ENV           names of more variables that the job gets, separated by blanks: a running Ray does not have this shell's
#                     (default: none; PYTHONPATH, NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME and the fused engine's go along if set)
#   SERVER_TIMEOUT    seconds a server or Ray may take to answer      (default: 600)
#   DRY_RUN=1         checks, writes the launch files, prints the commands, starts nothing

SLIME_PYTHON="${SLIME_PYTHON:-python3}"
SLIME_DIR="${SLIME_DIR:-$(dirname "$REPO")/slime}"
MEGATRON_LM_DIR="${MEGATRON_LM_DIR:-$(dirname "$REPO")/Megatron-LM}"
OUTPUT_ROOT="${OUTPUT_ROOT:-$REPO/runs}"
NODES="${NODES:-1}"
GPUS_PER_NODE="${GPUS_PER_NODE:-8}"
MASTER_ADDR="${MASTER_ADDR:-127.0.0.1}"
RAY_PORT="${RAY_PORT:-6379}"
DASHBOARD_PORT="${DASHBOARD_PORT:-8265}"
SERVER_TIMEOUT="${SERVER_TIMEOUT:-600}"
RAY_START_FLAGS="${RAY_START_FLAGS:-}"
JOB_ENV="${JOB_ENV:-}"
ray_start_flags=()
started=()  # process groups started here
job=""      # the Ray job under way
attended="" # the command that is waited for

# quoted TEXT: as a YAML scalar, for settings: a path may hold an apostrophe, a blank with #, or look like a number.
quoted() {
  local mark="'"
  printf '%s' "$mark${1//$mark/$mark$mark}$mark"
}

need_file() {
  [[ -f "${!1}" ]] || refuse "$1" "${!1}" "an existing file: $2" "set $1 to its path"
}

# need_model NAME WHAT: a Hugging Face folder; with DRY_RUN=1 also a published size (scripts/train/models).
need_model() {
  [[ -f "${!1}/config.json" || "${!1}" == builtin:* ]] && return
  [[ "${DRY_RUN:-0}" == 1 && -f "$REPO/scripts/train/models/${!1}.sh" ]] && return
  refuse "$1" "${!1}" "a Hugging Face folder with config.json: $2" "set $1 to its path"
}

# need_slime: what every launch needs, checked before anything starts.
need_slime() {
  need_number NODES
  need_number GPUS_PER_NODE 8
  need_port RAY_PORT 6379
  need_port DASHBOARD_PORT 8265
  [[ "$RAY_PORT" != "$DASHBOARD_PORT" ]] || refuse DASHBOARD_PORT "$DASHBOARD_PORT" "another port than RAY_PORT" "change one"
  need_number SERVER_TIMEOUT 600
  [[ -z "$RAY_START_FLAGS" || "$RAY_START_FLAGS" == --* ]] || refuse RAY_START_FLAGS "$RAY_START_FLAGS" "flags" "e.g. --num-cpus=16"
  local name
  local -a names
  # Not by an unquoted expansion: it would also put files' names in the place of a *.
  read -r -d '' -a names <<< "$JOB_ENV" || true
  read -r -d '' -a ray_start_flags <<< "$RAY_START_FLAGS" || true
  for name in "${names[@]}"; do
    if [[ ! "$name" =~ ^[A-Za-z_][A-Za-z0-9_]*$ ]] || ! printenv "$name" > /dev/null; then
      refuse JOB_ENV "$name" "names of exported variables" "export it, or leave it out"
    fi
  done
  [[ -f "$SLIME_DIR/train.py" ]] || refuse SLIME_DIR "$SLIME_DIR" "a checkout of slime with train.py" "set SLIME_DIR"
  [[ -d "$MEGATRON_LM_DIR/megatron" ]] || refuse MEGATRON_LM_DIR "$MEGATRON_LM_DIR" "a checkout of Megatron-LM" "set MEGATRON_LM_DIR"
  command -v "$SLIME_PYTHON" > /dev/null || refuse SLIME_PYTHON "$SLIME_PYTHON" "a Python that can be run" "set SLIME_PYTHON"
  if [[ "$NODES" -gt 1 && -z "${RAY_DASHBOARD:-}" && "$MASTER_ADDR" == 127.* ]]; then
    refuse MASTER_ADDR "$MASTER_ADDR" "an address that the other machines reach, with NODES=$NODES" "set it to this machine's"
  fi
  # Ray's dashboard on this machine is behind no proxy, for `ray job submit` neither.
  export no_proxy="127.0.0.1,localhost${no_proxy:+,$no_proxy}${NO_PROXY:+,$NO_PROXY}"
  export NO_PROXY="$no_proxy"
  export SLIME_DIR MEGATRON_LM_DIR
  export PYTHONPATH="$REPO:$SLIME_DIR:$MEGATRON_LM_DIR${PYTHONPATH:+:$PYTHONPATH}"
  # What a plan imports; what a job needs besides, `check` says.
  need_modules "this package's requirements" "'$REPO' (docs/slime.md, Installing)" slime_tandem.cli slime_tandem.slime_launch.suite
}

# wait_for NAME URL [PID]: until the URL answers; fails after SERVER_TIMEOUT seconds, or at once when the process is gone. Past every
# proxy, as the hooks ask their servers; a Ray elsewhere (RAY_DASHBOARD) is asked as `ray job submit` asks it.
wait_for() {
  local end=$((SECONDS + SERVER_TIMEOUT))
  local -a direct=(--noproxy '*')
  [[ "$1" != RAY_DASHBOARD ]] || direct=()
  until curl "${direct[@]}" --silent --fail --max-time 10 --output /dev/null "$2"; do
    if [[ -n "${3:-}" ]] && ! kill -0 "$3" 2> /dev/null; then
      refuse "$1" "ended" "a server that answers $2" "see its log in $OUTPUT_ROOT"
    fi
    [[ $SECONDS -lt $end ]] || refuse "$1" "no answer in $SERVER_TIMEOUT s" "an answer from $2" "see its log, or raise SERVER_TIMEOUT"
    sleep 1
  done
}

# start NAME URL COMMAND...: a process group of its own, stopped when this script ends; returns when the URL answers.
start() {
  local name="$1" url="$2"
  shift 2
  if [[ "${DRY_RUN:-0}" == 1 ]]; then
    run "$@"
    return
  fi
  mkdir -p "$OUTPUT_ROOT"
  setsid "$@" > "$OUTPUT_ROOT/$name.log" 2>&1 &
  started+=("$!")
  wait_for "$name" "$url" "$!"
}

# attend COMMAND...: runs it and returns its exit code. Bash runs a trap when the command before it has ended: only a wait is
# cut short by a signal.
attend() {
  local code=0
  "$@" &
  attended=$!
  wait "$attended" || code=$?
  attended=""
  return "$code"
}

stop_ours() {
  local group end
  trap - EXIT INT TERM
  if [[ -n "$attended" ]]; then
    kill -TERM "$attended" 2> /dev/null || true
    wait "$attended" 2> /dev/null || true
  fi
  if [[ -n "$job" ]]; then "$SLIME_PYTHON" -m ray.scripts.scripts job stop --address "$RAY_DASHBOARD" "$job" || true; fi
  for group in "${started[@]}"; do kill -TERM -- "-$group" 2> /dev/null || true; done
  end=$((SECONDS + 30))
  for group in "${started[@]}"; do
    while kill -0 -- "-$group" 2> /dev/null && [[ $SECONDS -lt $end ]]; do sleep 0.2; done
    kill -KILL -- "-$group" 2> /dev/null || true
  done
}
trap stop_ours EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# start_ray: a head on this machine, unless RAY_DASHBOARD names a running one. `ray stop` would end every Ray of the machine:
# the head runs in the foreground of a process group of ours instead.
start_ray() {
  [[ "${DRY_RUN:-0}" == 1 ]] || need_modules "ray[default], jobs are submitted through its dashboard" "'ray[default]'" ray.dashboard.optional_deps
  if [[ -n "${RAY_DASHBOARD:-}" ]]; then
    [[ "${DRY_RUN:-0}" == 1 ]] || wait_for RAY_DASHBOARD "$RAY_DASHBOARD/api/version"
    return
  fi
  export RAY_DASHBOARD="http://127.0.0.1:$DASHBOARD_PORT"
  # Ray gives each part of its dashboard 30 s. On a busy machine one takes longer: the head then stays, without a dashboard, for ever.
  export RAY_DASHBOARD_SUBPROCESS_MODULE_WAIT_READY_TIMEOUT="${RAY_DASHBOARD_SUBPROCESS_MODULE_WAIT_READY_TIMEOUT:-$SERVER_TIMEOUT}"
  start ray "$RAY_DASHBOARD/api/version" "$SLIME_PYTHON" -m ray.scripts.scripts start --head --block --disable-usage-stats \
    --node-ip-address "$MASTER_ADDR" --port "$RAY_PORT" --num-gpus "$GPUS_PER_NODE" \
    --dashboard-host 127.0.0.1 --dashboard-port "$DASHBOARD_PORT" "${ray_start_flags[@]}"
  if [[ "$NODES" -gt 1 ]]; then
    echo "on each of the other $((NODES - 1)) machines: MASTER_ADDR=$MASTER_ADDR RAY_PORT=$RAY_PORT bash scripts/train/join_ray.sh"
  fi
}

# plan FOLDER ARGS...: the launch files and FOLDER/launch.sh, by `slime-tandem config --slime`.
plan() {
  local folder="$1"
  shift
  mkdir -p "$folder"
  "$SLIME_PYTHON" -m slime_tandem.cli config --slime "$folder" "$@" > "$folder/launch.sh.new"
  mv "$folder/launch.sh.new" "$folder/launch.sh"
  grep '^#' "$folder/launch.sh"
}

# check FOLDER: whether slime's own parser and the hooks take the launch's flags, and its packages are there; before anything starts.
check() {
  local -a SLIME_FLAGS SERVER_URLS
  # shellcheck source=/dev/null
  source "$1/launch.sh"
  run "$SLIME_PYTHON" -W ignore -m slime_tandem.slime_launch.real_parser "${SLIME_FLAGS[@]}"
}

# submit FOLDER: waits for the servers, runs train.py, and returns its exit code. Check first.
submit() {
  local folder="$1" url code=0
  local -a SLIME_FLAGS SERVER_URLS submission
  # shellcheck source=/dev/null
  source "$folder/launch.sh"
  if declare -F side_servers > /dev/null; then side_servers; fi
  for url in "${SERVER_URLS[@]}"; do
    if [[ "${DRY_RUN:-0}" == 1 ]]; then echo "wait for $url/health"; else wait_for "$url" "$url/health"; fi
  done
  submission=("$SLIME_PYTHON" -m ray.scripts.scripts job submit --address "${RAY_DASHBOARD:-}")
  job="tandem-$(basename "$(dirname "$folder")")-$$-$RANDOM"
  submission+=(--submission-id "$job" --runtime-env-json "$(runtime_env "$folder/launch.sh")" -- "$SLIME_PYTHON" "$SLIME_DIR/train.py" "${SLIME_FLAGS[@]}")
  if [[ "${DRY_RUN:-0}" == 1 ]]; then
    run "${submission[@]}"
    job=""
    return
  fi
  attend "${submission[@]}" || code=$?
  job=""
  return "$code"
}

# runtime_env LAUNCH: the environment of the job, as JSON: all that the launch exports, and of this shell's what a user may set for
# the same ends, or names in JOB_ENV. A running Ray gives a job nothing else of it.
runtime_env() {
  "$SLIME_PYTHON" -c '
import json, os, pathlib, re, sys
names = re.findall(r"^export (\w+)=", pathlib.Path(sys.argv[1]).read_text(encoding="utf-8"), re.MULTILINE)
names += ["PYTHONPATH", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "SGLANG_HEALTH_CHECK_TIMEOUT",
          "SGLANG_ENABLE_LOGITS_PROCESSER_CHUNK", "SGLANG_LOGITS_PROCESSER_CHUNK_SIZE",
          "WANDB_RUN_ID", "WANDB_RESUME", "TENSORBOARD_DIR"]
names += os.environ.get("JOB_ENV", "").split()
env = {n: os.environ[n] for n in names if n in os.environ}
print(json.dumps({"env_vars": {**env, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}}))' "$1"
}
