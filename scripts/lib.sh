# shellcheck shell=bash
# Shared by the scripts of this repository: `setup_venv EXTRA...`, `run`, which honours DRY_RUN=1, and checks of variables.
# Source it after `set -euo pipefail`.
#   PYTHON      interpreter that makes the environment (default: python3; 3.11 or newer)
#   VENV        where the environment is (default: .venv in the repository)
#   TORCH_SPEC  what to install as torch (default: the pinned one); pip's own variables choose the index

REPO="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${VENV:-$REPO/.venv}"
export OMP_WAIT_POLICY=PASSIVE
# Installs leave compiling to the first import (--no-compile). Where this variable is set, as in many containers, every process would
# compile torch and transformers anew: ten seconds and more of each start.
unset PYTHONDONTWRITEBYTECODE
export PIP_DISABLE_PIP_VERSION_CHECK=1

run() {
  if [[ "${DRY_RUN:-0}" == 1 ]]; then
    printf '%q ' "$@"
    printf '\n'
  else
    "$@"
  fi
}

# setup_venv base|EXTRA...: an environment with this package, what it needs to train on this machine (the extra `local`), and the named extras,
# at the pinned versions. Does nothing when the pins, the extras and pyproject.toml are those it was made from.
setup_venv() {
  local python="${PYTHON:-python3}" torch="${TORCH_SPEC:-torch==2.13.0}" extras=local extra stamp want missing=0
  for extra in "$@"; do [[ "$extra" == base ]] || extras+=",$extra"; done
  if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "PYTHON=$python: expected Python 3.11 or newer. Remedy: install it, or set PYTHON to its path." >&2
    return 2
  fi
  stamp="$VENV/.slime-tandem"
  want="$(cat "$REPO/constraints.txt" "$REPO/pyproject.toml" | sha256sum | cut -d' ' -f1)"
  # The stamp lists every extra installed so far, so that the two main commands can share one environment.
  if [[ -f "$stamp" && "$(head -n 1 "$stamp")" == "$want" ]]; then
    for extra in "$@"; do grep -qx "$extra" "$stamp" || missing=1; done
    [[ $missing == 1 ]] || return 0
  fi
  echo "setting up $VENV (once; downloads about 0.4 GB)"
  [[ -x "$VENV/bin/python" ]] || run "$python" -m venv "$VENV"
  # torch first and alone: the other packages then find it and do not choose another build.
  run "$VENV/bin/python" -m pip install --quiet --no-compile "$torch"
  run "$VENV/bin/python" -m pip install --quiet --no-compile --constraint "$REPO/constraints.txt" --editable "${REPO}[${extras}]"
  if [[ "${DRY_RUN:-0}" != 1 ]]; then
    { echo "$want"; { [[ -f "$stamp" ]] && tail -n +2 "$stamp"; printf '%s\n' "$@"; } | sort -u; } > "$stamp.new"
    mv "$stamp.new" "$stamp"
  fi
}

# refuse NAME VALUE EXPECTED REMEDY: the error that the package's own messages look like.
refuse() {
  echo "$1=$2: expected $3. Remedy: $4." >&2
  exit 2
}

# need_set NAME WHAT [REMEDY]: a variable that has no usual value.
need_set() {
  [[ -n "${!1:-}" ]] || refuse "$1" "" "$2" "${3:-set it to a Hugging Face folder}"
}

need_number() {
  [[ "${!1}" =~ ^[1-9][0-9]*$ ]] || refuse "$1" "${!1}" "a whole number above 0" "set it, e.g. $1=${2:-1}"
}

# need_modules WHAT INSTALL MODULE...: whether SLIME_PYTHON can import these modules; a dry run asks, too. INSTALL: what pip is given.
need_modules() {
  local what="$1" install="$2" why
  shift 2
  why="$("$SLIME_PYTHON" -W ignore -c 'import importlib, sys; [*map(importlib.import_module, sys.argv[1:])]' "$@" 2>&1)" && return
  refuse SLIME_PYTHON "$SLIME_PYTHON" "a Python with $what (${why##*$'\n'})" "$SLIME_PYTHON -m pip install $install, or set SLIME_PYTHON"
}

need_port() {
  need_number "$@"
  [[ "${!1}" =~ ^[0-9]{1,5}$ && "${!1}" -le 65535 && ("${!1}" -lt 10001 || "${!1}" -gt 19999) ]] || refuse "$1" "${!1}" \
    "a port, and none of 10001 to 19999, which are Ray's workers'" "set it, e.g. $1=$2"
}

# from_here NAME...: makes paths in these variables absolute, from the folder that the script was called in; names that are no path stay.
from_here() {
  local name
  for name in "$@"; do
    if [[ -e "${!name:-}" ]]; then printf -v "$name" '%s' "$(realpath -s -- "${!name}")"; fi
  done
}

# into_here NAME...: the same for folders that a script makes, which need not be there yet; unset ones stay unset.
into_here() {
  local name
  for name in "$@"; do
    if [[ -n "${!name:-}" ]]; then printf -v "$name" '%s' "$(realpath -ms -- "${!name}")"; fi
  done
}
