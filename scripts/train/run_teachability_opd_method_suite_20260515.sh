#!/usr/bin/env bash
# TA-OPD's quick start by its published name: run_method_suite.sh under slime with the published selection and folder, one run a
# method.
# On PATH it is found from any folder, as `bash run_teachability_opd_method_suite_20260515.sh`. The variables are those of
# run_method_suite.sh, with other defaults:
#   BACKEND=slime, RULES=reference, SEEDS=1, TAG=teachability_method_suite_k16_seed1_20260515
#   SEED_LABEL           seed and a number: the published label; here it is the seed, too
set -euo pipefail
if [[ "${SEED_LABEL:-}" =~ ^seed([0-9]+)$ && -z "${SEEDS:-}" ]]; then
  SEEDS="${BASH_REMATCH[1]}"
  unset SEED_LABEL
fi
export BACKEND="${BACKEND:-slime}" RULES="${RULES:-reference}" SEEDS="${SEEDS:-1}"
export TAG="${TAG:-teachability_method_suite_k16_seed1_20260515}"
exec bash "$(dirname "${BASH_SOURCE[0]}")/run_method_suite.sh" "$@"
