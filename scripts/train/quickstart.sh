#!/usr/bin/env bash
# The main job, whole: sets up .venv, makes three small models, runs tandem GRPO with a distilling teacher and its control,
# and prints the result. Arguments go to `slime-tandem train` (e.g. --set seed=1 name=seed1). DRY_RUN=1 prints the commands.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
setup_venv base
cd "$REPO"
run "$VENV/bin/slime-tandem" train --config scripts/train/configs/quickstart.yaml --resume "$@"
