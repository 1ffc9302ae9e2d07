#!/usr/bin/env bash
# Joins this machine to the Ray head that a launch script has started elsewhere, until it is interrupted.
#   MASTER_ADDR, RAY_PORT   the head (port default: 6379)
#   GPUS_PER_NODE           GPUs to offer (default: 8)
#   SLIME_PYTHON            the Python that has Ray (default: python3)
#   DRY_RUN=1               prints the command
# Arguments are more flags of `ray start`, e.g. --num-cpus 16.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
if [[ -z "${MASTER_ADDR:-}" || "$MASTER_ADDR" == 127.* ]]; then
  echo "MASTER_ADDR=${MASTER_ADDR:-}: expected the address of the machine with the head. Remedy: set it." >&2
  exit 2
fi
SLIME_PYTHON="${SLIME_PYTHON:-python3}"
RAY_PORT="${RAY_PORT:-6379}" GPUS_PER_NODE="${GPUS_PER_NODE:-8}"
need_port RAY_PORT 6379
need_number GPUS_PER_NODE 8
[[ "${DRY_RUN:-0}" == 1 ]] || need_modules "Ray" "'ray[default]'" ray.scripts.scripts
run "$SLIME_PYTHON" -m ray.scripts.scripts start --block --disable-usage-stats \
  --address "$MASTER_ADDR:$RAY_PORT" --num-gpus "$GPUS_PER_NODE" "$@"
