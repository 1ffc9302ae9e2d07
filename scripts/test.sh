#!/usr/bin/env bash
# Sets everything up and passes the tests: lint, types and shell checks, then pytest. Arguments go to pytest.
#   scripts/test.sh          the whole suite
#   scripts/test.sh --quick  lint, types and the tests that compute without a model: no SGLang, no vocabularies, no browser; minutes
# SLIME_TANDEM_TEST_WORKERS: test processes at once (default 2).
# The vocabularies of real models are fetched once (167 MB; SLIME_TANDEM_VOCABULARIES names their folder, else .cache/vocabularies).
# The report's test needs Chromium: SLIME_TANDEM_CHROMIUM names it, else /usr/bin/chromium. On a Debian machine, as root, it is
# installed here if it is missing; so are zsh and fish, for the test of completion.
# tests/conformance needs real SGLang: SLIME_TANDEM_SGLANG_PYTHON names a python that has it, else scripts/sglang_cpu.sh sets one
# up (about 3 GB, once). Tests that read slime's own sources find them where SLIME_SOURCES says (scripts/slime/cpu_env.sh), else
# they are skipped.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
cd "$REPO"

if [[ "${1:-}" == --help ]]; then
  sed -n '2,/^set -/{s/^# \{0,1\}//p}' scripts/test.sh
  exit
fi

if [[ "${1:-}" == --quick ]]; then
  setup_venv test check diagnostics data wandb trackio
  told="$(mktemp)"
  trap 'rm -f "$told"' EXIT
  bash scripts/check.sh > "$told" 2>&1 & # one core for the types, one for the tests
  check=$!
  code=0
  run "$VENV/bin/python" -m pytest "$@" || code=$?
  wait "$check" || code=$?
  cat "$told"
  exit "$code"
fi

setup_venv test check smollm2 diagnostics data wandb trackio peers
if command -v apt-get >/dev/null && [[ "$(id -u)" == 0 ]]; then
  missing=()
  [[ -n "${SLIME_TANDEM_CHROMIUM:-}" || -x /usr/bin/chromium ]] || missing+=(chromium fonts-dejavu-core)
  for shell in zsh fish; do # completion is tested by typing into them
    command -v "$shell" >/dev/null || missing+=("$shell")
  done
  if ((${#missing[@]})); then
    run apt-get update -qq
    run apt-get install -y -qq "${missing[@]}" >/dev/null
  fi
fi
run "$VENV/bin/python" scripts/fetch_vocabularies.py
run bash scripts/check.sh
if [[ -z "${SLIME_TANDEM_SGLANG_PYTHON:-}" ]]; then
  SLIME_TANDEM_SGLANG_PYTHON="$(bash scripts/sglang_cpu.sh)"
fi
export SLIME_TANDEM_SGLANG_PYTHON
# One process takes whole files, or a folder whose files share servers, the longest first (tests/schedule.py).
run "$VENV/bin/python" -m pytest -n "${SLIME_TANDEM_TEST_WORKERS:-2}" --dist loadfile --no-loadscope-reorder "$@"
