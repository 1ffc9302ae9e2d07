#!/usr/bin/env bash
# SGLang 0.5.15.post1 on a CPU, in an environment of its own (its pins are not this project's); prints its python's path.
# No published wheel of it runs on a CPU as it is: docs/sglang.md says what is done here and why.
#   SGLANG_VENV    where the environment is (default: .venv-sglang in the repository)
#   SGLANG_PYTHON  interpreter that makes it (default: PYTHON, else python3); must be Python 3.11
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
SGLANG_VENV="${SGLANG_VENV:-$REPO/.venv-sglang}"
SGLANG_PYTHON="${SGLANG_PYTHON:-${PYTHON:-python3}}"
CONSTRAINTS="$REPO/scripts/sglang_cpu_constraints.txt"
NEEDS=(
  transformers aiohttp fastapi uvicorn uvloop orjson msgspec pyzmq setproctitle psutil pybase64 pydantic requests regex pillow
  scipy einops prometheus-client python-multipart partial-json-parser interegular llguidance compressed-tensors gguf ipython
  tiktoken sentencepiece nvidia-ml-py xxhash zstandard watchfiles easydict openai openai-harmony dill apache-tvm-ffi jsonschema
  xgrammar soundfile triton
)

pip_install() {
  run "$SGLANG_VENV/bin/python" -m pip install --quiet --no-compile --constraint "$CONSTRAINTS" "$@" >&2
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
  local stamp="$SGLANG_VENV/.slime-tandem" want packages
  if ! "$SGLANG_PYTHON" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
    echo "SGLANG_PYTHON=$SGLANG_PYTHON: expected Python 3.11 (torch's CPU build). Remedy: set it to the path of one." >&2
    return 2
  fi
  want="$(cat "$CONSTRAINTS" "${BASH_SOURCE[0]}" | sha256sum | cut -d' ' -f1)"
  [[ -f "$stamp" && "$(< "$stamp")" == "$want" ]] && return 0
  echo "setting up SGLang for the CPU in $SGLANG_VENV (once; about 3 GB)" >&2
  [[ -x "$SGLANG_VENV/bin/python" ]] || run "$SGLANG_PYTHON" -m venv "$SGLANG_VENV" >&2
  # torch first and alone, so that nothing chooses another build; sglang without its needs, most of which are CUDA packages.
  pip_install torch
  pip_install --no-deps sglang torchvision
  pip_install "${NEEDS[@]}"
  if [[ "${DRY_RUN:-0}" == 1 ]]; then
    echo "# empty torchvision/_meta_registrations.py, write a stand-in sgl_kernel package" >&2
    return 0
  fi
  packages="$("$SGLANG_VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')"
  # It registers shapes for compiled operators that a CPU torch does not load, which fails at import.
  [[ -f "$packages/torchvision/_meta_registrations.py" ]]
  : > "$packages/torchvision/_meta_registrations.py"
  write_stand_in "$packages/sgl_kernel"
  echo "$want" > "$stamp"
}

setup_sglang
echo "$SGLANG_VENV/bin/python"
