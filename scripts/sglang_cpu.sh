#!/usr/bin/env bash
# SGLang on a CPU, in an environment of its own (its pins are not this project's); prints its python's path.
# No published wheel of it runs on a CPU as it is: docs/sglang.md says what is done here and why.
#   SGLANG_VERSION  0.5.15.post1 (default, what slime pins), 0.5.17 (slime's branch `docker`) or another release
#   SLIME_PATCHES   a folder of slime's (docker/patch/latest of its checkout) whose five patches of SGLang are applied; default: none
#   SGLANG_VENV     where the environment is (default: .venv-sglang in the repository, for another version or patches .venv-sglang-VERSION[-slime])
#   SGLANG_PYTHON   interpreter that makes it (default: PYTHON, else python3); must be Python 3.11
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
PINNED=0.5.15.post1
SGLANG_VERSION="${SGLANG_VERSION:-$PINNED}"
SLIME_PATCHES="${SLIME_PATCHES:-}"
suffix=""
[[ "$SGLANG_VERSION" == "$PINNED" && -z "$SLIME_PATCHES" ]] || suffix="-$SGLANG_VERSION${SLIME_PATCHES:+-slime}"
SGLANG_VENV="${SGLANG_VENV:-$REPO/.venv-sglang$suffix}"
SGLANG_PYTHON="${SGLANG_PYTHON:-${PYTHON:-python3}}"
CONSTRAINTS="$REPO/scripts/sglang_cpu_constraints.txt"
# In the order of slime's Dockerfile.
PATCHES=(sglang sglang-top_p sglang-release_hicache sglang-pull_weights sglang-deterministic)
NEEDS=(
  transformers aiohttp fastapi uvicorn uvloop orjson msgspec pyzmq setproctitle psutil pybase64 pydantic requests regex pillow
  scipy einops prometheus-client python-multipart partial-json-parser interegular llguidance compressed-tensors gguf ipython
  tiktoken sentencepiece nvidia-ml-py xxhash zstandard watchfiles easydict openai openai-harmony dill apache-tvm-ffi jsonschema
  xgrammar soundfile triton
)

pip_install() {
  run "$SGLANG_VENV/bin/python" -m pip install --quiet --no-compile --constraint <(grep -v '^sglang==' "$CONSTRAINTS") "$@" >&2
}

# slime's patches on the installed package; sources of compiled kernels, which the wheel does not carry, are left out.
apply_patches() {
  local name folder="$1" said
  for name in "${PATCHES[@]}"; do
    # -p2: the paths are a/python/sglang/... Inside a repository git passes over files that are not the repository's without a word:
    # it must not find one above the environment, and its own list says whether it did anything.
    if ! said="$(cd "$folder" && GIT_CEILING_DIRECTORIES="$(dirname "$folder")" git apply --verbose -p2 \
      --exclude='sglang/kernels/aot/*' --include='sglang/*' "$SLIME_PATCHES/$name.patch" 2>&1)" || [[ "$said" != *"Applied patch"* ]]; then
      printf '%s\n' "$said" >&2
      echo "SLIME_PATCHES=$SLIME_PATCHES: $name.patch is not for SGLang $SGLANG_VERSION. Remedy: the patches of that version" \
        "(0.5.15.post1: slime's main, 0.5.17: its branch docker), and remove $SGLANG_VENV." >&2
      return 2
    fi
    echo "applied $name.patch of slime: $(grep -c 'Applied patch' <<< "$said") files" >&2
  done
}

# The stand-in for the GPU kernels: every name can be imported, none can be called.
write_stand_in() {
  mkdir -p "$1"
  cat > "$1/__init__.py" <<'PY'
"""Stand-in for SGLang's GPU kernels on a machine without a GPU: imports succeed, calls raise."""

import importlib.abc
import importlib.machinery
import sys
import types


class _Missing:
    def __init__(self, name):
        self._name = name

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self._name}.{name}")

    def __call__(self, *args, **kwargs):
        raise RuntimeError(f"{self._name} was called, but sgl_kernel is a stand-in here (scripts/sglang_cpu.sh)")


# SGLang reads attributes of such names while it is imported (scalar_types.uint4b8), so they are objects, not functions.
__getattr__ = _Missing(__name__).__getattr__


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname, path, target=None):
        if fullname.startswith("sgl_kernel."):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = _Missing(spec.name).__getattr__
        return module

    def exec_module(self, module):
        pass


sys.meta_path.append(_Submodules())
PY
}

setup_sglang() {
  local stamp="$SGLANG_VENV/.slime-tandem" want packages name
  if ! "$SGLANG_PYTHON" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
    echo "SGLANG_PYTHON=$SGLANG_PYTHON: expected Python 3.11 (torch's CPU build). Remedy: set it to the path of one." >&2
    return 2
  fi
  if [[ -n "$SLIME_PATCHES" ]]; then
    SLIME_PATCHES="$(realpath "$SLIME_PATCHES")"
    for name in "${PATCHES[@]}"; do
      [[ -f "$SLIME_PATCHES/$name.patch" ]] && continue
      echo "SLIME_PATCHES=$SLIME_PATCHES: no $name.patch. Remedy: name docker/patch/latest of a checkout of slime." >&2
      return 2
    done
  fi
  want="$(
    {
      cat "$CONSTRAINTS" "${BASH_SOURCE[0]}"
      echo "$SGLANG_VERSION"
      [[ -z "$SLIME_PATCHES" ]] || (cd "$SLIME_PATCHES" && cat "${PATCHES[@]/%/.patch}")
    } | sha256sum | cut -d' ' -f1
  )"
  [[ -f "$stamp" && "$(< "$stamp")" == "$want" ]] && return 0
  echo "setting up SGLang $SGLANG_VERSION for the CPU in $SGLANG_VENV (once; about 3 GB)" >&2
  [[ -x "$SGLANG_VENV/bin/python" ]] || run "$SGLANG_PYTHON" -m venv "$SGLANG_VENV" >&2
  # torch first and alone, so that nothing chooses another build; sglang without its needs, most of which are CUDA packages.
  pip_install torch
  if [[ "${DRY_RUN:-0}" != 1 ]]; then
    packages="$("$SGLANG_VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')"
    # Files that patches changed or added are not the wheel's: it is laid down anew.
    rm -rf "$packages/sglang"
  fi
  pip_install --no-deps --force-reinstall "sglang==$SGLANG_VERSION"
  pip_install --no-deps torchvision
  pip_install "${NEEDS[@]}"
  if [[ "${DRY_RUN:-0}" == 1 ]]; then
    echo "# empty torchvision/_meta_registrations.py, write a stand-in sgl_kernel package${SLIME_PATCHES:+, apply ${PATCHES[*]}}" >&2
    return 0
  fi
  # It registers shapes for compiled operators that a CPU torch does not load, which fails at import.
  [[ -f "$packages/torchvision/_meta_registrations.py" ]]
  : > "$packages/torchvision/_meta_registrations.py"
  write_stand_in "$packages/sgl_kernel"
  [[ -z "$SLIME_PATCHES" ]] || apply_patches "$packages"
  echo "$want" > "$stamp"
}

setup_sglang
echo "$SGLANG_VENV/bin/python"
