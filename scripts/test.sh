#!/usr/bin/env bash
# Sets everything up and passes the tests: lint, types and shell checks, then pytest. Arguments go to pytest.
# SLIME_TANDEM_TEST_WORKERS: test processes at once (default 2).
# The vocabularies of real models are fetched once (167 MB; SLIME_TANDEM_VOCABULARIES names their folder, else .cache/vocabularies).
# The report's test needs Chromium: SLIME_TANDEM_CHROMIUM names it, else /usr/bin/chromium, which is installed here if a
# Debian machine lacks it and this is root. tests/conformance needs real SGLang: SLIME_TANDEM_SGLANG_PYTHON names a python that
# has it, else scripts/sglang_cpu.sh sets one up (about 3 GB, once).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
setup_venv test check smollm2 diagnostics peers
cd "$REPO"
if [[ -z "${SLIME_TANDEM_CHROMIUM:-}" && ! -x /usr/bin/chromium ]] && command -v apt-get >/dev/null && [[ "$(id -u)" == 0 ]]; then
  run apt-get update -qq
  run apt-get install -y -qq chromium fonts-dejavu-core >/dev/null
fi
run "$VENV/bin/python" scripts/fetch_vocabularies.py
run bash scripts/check.sh
if [[ -z "${SLIME_TANDEM_SGLANG_PYTHON:-}" ]]; then
  SLIME_TANDEM_SGLANG_PYTHON="$(bash scripts/sglang_cpu.sh)"
fi
export SLIME_TANDEM_SGLANG_PYTHON
# One file is one worker's, or a folder (tests/conftest.py): its tests share servers.
run "$VENV/bin/python" -m pytest -n "${SLIME_TANDEM_TEST_WORKERS:-2}" --dist loadfile --no-loadscope-reorder "$@"
