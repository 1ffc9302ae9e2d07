#!/usr/bin/env bash
# What slime's own train.py needs on a machine without a GPU: a Python with SGLang (scripts/sglang_cpu.sh), Ray, the router and slime's
# other requirements, and the sources of slime and Megatron-LM with slime's patch. Prints the one variable that the tests read, the folder with
# slime, Megatron-LM and venv, the environment, in it:
#   eval "$(scripts/slime/cpu_env.sh)"
#   SLIME_CPU_VENV  the environment (default: .venv-slime in the repository; about 4 GB)
#   SLIME_SOURCES   where the sources are or go (default: .cache/slime-sources); folders slime and Megatron-LM there are taken as they are
#   SGLANG_PYTHON   interpreter that makes the environment; must be Python 3.11
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
SLIME_COMMIT=624b824a8
MEGATRON_COMMIT=1dcf0dafa884
venv="$(realpath -ms "${SLIME_CPU_VENV:-$REPO/.venv-slime}")" # the tests change folders
sources="${SLIME_SOURCES:-$REPO/.cache/slime-sources}"
python="$(SGLANG_VENV="$venv" bash "$REPO/scripts/sglang_cpu.sh")"
pip_install() {
  run "$python" -m pip install --quiet --no-compile --constraint "$REPO/scripts/sglang_cpu_constraints.txt" \
    --constraint "$REPO/scripts/slime/cpu_constraints.txt" "$@" >&2
}

stamp="$venv/.slime"
want="$(cat "${BASH_SOURCE[0]}" "$REPO"/scripts/{slime/cpu_constraints.txt,sglang_cpu.sh,sglang_cpu_constraints.txt} | sha256sum | cut -d' ' -f1)"
if [[ ! -f "$stamp" || "$(< "$stamp")" != "$want" ]]; then
  echo "setting up slime's requirements in $venv (once; pip then names the CUDA packages that SGLang declares and a CPU does not need)" >&2
  # ray[default]: `ray job submit` goes through the dashboard. The others are imported by slime at this commit where these flags go;
  # the rest of its requirements.txt is for agents and vision.
  pip_install 'ray[default]' sglang-router omegaconf accelerate wandb tensorboard httpx pylatexenc blake3 xxhash zstandard datasets
  pip_install --no-deps torch-memory-saver # its preloaded library is for CUDA; the module imports without
  pip_install filelock math-verify reasoning-gym google-re2 pytest hypothesis # ours
  [[ "${DRY_RUN:-0}" == 1 ]] || echo "$want" > "$stamp"
fi

clone() { # NAME URL COMMIT
  [[ -d "$sources/$1" ]] && return 0
  run rm -rf "$sources/$1.part" >&2
  run git clone --quiet --filter=blob:none "$2" "$sources/$1.part" >&2
  run git -C "$sources/$1.part" checkout --quiet "$3" >&2
  if [[ "$1" == Megatron-LM ]]; then
    run git -C "$sources/$1.part" apply "$sources/slime/docker/patch/latest/megatron.patch" >&2
  fi
  run mv "$sources/$1.part" "$sources/$1" >&2 # a clone that was cut short is never taken for a whole one
}
run mkdir -p "$sources" >&2
clone slime https://github.com/THUDM/slime.git "$SLIME_COMMIT"
clone Megatron-LM https://github.com/NVIDIA/Megatron-LM.git "$MEGATRON_COMMIT"
sources="$(realpath -m "$sources")"
run ln -sfn "$venv" "$sources/venv" >&2
printf 'export SLIME_SOURCES=%q\n' "$sources"
