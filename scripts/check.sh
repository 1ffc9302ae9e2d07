#!/usr/bin/env bash
# Lint, formatting, types and shell scripts; the same in CI and by hand.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
setup_venv check
cd "$REPO"
run "$VENV/bin/ruff" format --check .
run "$VENV/bin/ruff" check .
run "$VENV/bin/mypy"
mapfile -t scripts < <(git ls-files '*.sh' .ci/run)
run "$VENV/bin/shellcheck" --external-sources --source-path=SCRIPTDIR "${scripts[@]}"
