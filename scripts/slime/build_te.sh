#!/usr/bin/env bash
# Unpacks the archive of scripts/slime/make_te_kit.sh into SITE, compiles Transformer Engine's PyTorch extension there for the torch
# of this machine, and tries a linear layer and packed attention on the GPU. Needs no network; needs g++, ninja, setuptools, wheel
# and the headers of CUDA, cuDNN and NCCL (torch's nvidia-* packages have those of its libraries, nvcc's folder the rest).
#
#   build_te.sh TE.TXZ SITE          then, in each shell: source SITE/env.sh
#
#   MAX_JOBS     compilers at once; each takes up to 3 GB            (default: the cores, at most 32)
#   BUILT        a compiled extension: taken where the file is there, written where not, so that another machine need not compile
#                                                                   (default: none)
#   SKIP_TEST=1  compiles only; for a machine without a GPU
# SITE/env.sh puts SITE/first before and SITE/last after what PYTHONPATH has.
set -euo pipefail
[[ $# == 2 ]] || { sed -n '2,14p' "$0" >&2; exit 2; }
kit=$(realpath "$1")
mkdir -p "$2"
site=$(realpath "$2")
cores=$(nproc)
built=${BUILT:-}
[[ -z $built ]] || built=$(realpath -m "$built")
tar -C "$site" -xJf "$kit"

# Where torch's own cuDNN, cuBLAS and NCCL lie. Not from torch itself: importing it takes seconds.
nvidia=$(python3 -c 'import importlib.util, pathlib
print(pathlib.Path(importlib.util.find_spec("torch").origin).parent.parent / "nvidia")')
[[ -d $nvidia/cudnn ]] || { echo "build_te: no $nvidia/cudnn; install nvidia-cudnn-cu13 beside torch" >&2; exit 3; }
cuda=${CUDA_HOME:-}
if [[ -z $cuda ]]; then
  nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
  nvcc=$(readlink -f "$nvcc")
  cuda=${nvcc%/bin/nvcc}
fi
[[ -e $cuda/include/cuda_runtime.h ]] || cuda=/usr/local/cuda
header=$cuda/include/cuda_runtime.h
[[ -e $header ]] || { echo "build_te: CUDA_HOME: no $header; set it to the toolkit's folder" >&2; exit 3; }

# cuDNN: Transformer Engine loads the first that it finds and PyTorch refuses another version, so both variables name torch's.
# UB_SKIPMC: its communication buffers never ask for NVLink multicast.
cat > "$site/env.sh" <<ENV
export CUDA_HOME=$cuda CUDNN_PATH=$nvidia/cudnn
export LD_LIBRARY_PATH=$nvidia/cudnn/lib:$nvidia/cu13/lib:$nvidia/nccl/lib\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}
export PYTHONPATH=$site/first\${PYTHONPATH:+:\$PYTHONPATH}:$site/last
export NVTE_FRAMEWORK=pytorch UB_SKIPMC=1
ENV

# torch 2.11 brings cuBLAS 13.0. It lacks a function that Transformer Engine calls for grouped products alone (experts), and without
# which its library is not loaded at all. Here it says "not supported".
missing=cublasLtGroupedMatrixLayoutInit_internal
if ! grep -q "$missing" "$nvidia"/cu13/lib/libcublasLt.so.13; then
  echo "int $missing(void) { return 15; }" > "$site/missing.c"
  echo "libcublasLt.so.13 { global: $missing; };" > "$site/missing.map"
  gcc -shared -fPIC -o "$site/missing.so" "$site/missing.c" -Wl,--version-script="$site/missing.map"
  echo "export LD_PRELOAD=$site/missing.so\${LD_PRELOAD:+:\$LD_PRELOAD}" >> "$site/env.sh"
fi

libraries=$site/first/transformer_engine/wheel_lib
if [[ -n $built && -e $built ]]; then
  name=transformer_engine_torch$(python3 -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
  cp "$built" "$libraries/$name"
else
  # Headers: torch's packages first (the versions that torch was built with), then the toolkit for what they lack.
  headers=
  for folder in "$nvidia"/*/include; do headers+=$folder:; done
  python=$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')
  [[ -e $python/Python.h ]] || { echo "build_te: no $python/Python.h; expected Python's headers; install python3-dev" >&2; exit 3; }
  (
    cd "$site/torch"
    export CUDA_HOME=$cuda CPLUS_INCLUDE_PATH=$headers$cuda/include NVTE_FRAMEWORK=pytorch NVTE_BUILD_USE_NVIDIA_WHEELS=1
    export NVTE_PYTORCH_FORCE_BUILD=TRUE MAX_JOBS=${MAX_JOBS:-$(( cores < 32 ? cores : 32 ))}
    unset NVTE_ENABLE_NVSHMEM NVTE_UB_WITH_MPI NVTE_RELEASE_BUILD
    SECONDS=0
    if ! python3 -W ignore setup.py -q build_ext --build-lib "$site/lib" --build-temp "$site/temp" > "$site/build.log" 2>&1; then
      grep -aE -A3 'error|Error' "$site/build.log" | cut -c1-300 | head -n 40
      echo "build_te: the extension was not built; $site/build.log has all" >&2
      exit 4
    fi
    echo "extension compiled in $SECONDS s with $MAX_JOBS jobs"
  )
  cp "$site"/lib/transformer_engine/wheel_lib/transformer_engine_torch*.so "$libraries/"
  strip --strip-unneeded "$libraries"/transformer_engine_torch*.so
  [[ -z $built ]] || cp "$libraries"/transformer_engine_torch*.so "$built"
  rm -rf "${site:?}/lib" "${site:?}/temp"
fi
ls -l "$libraries"
[[ -z ${SKIP_TEST:-} ]] || exit 0

# shellcheck source=/dev/null
source "$site/env.sh"
python3 -W ignore - <<'PY'
import time

begin = time.monotonic()
import torch
import transformer_engine
import transformer_engine.pytorch as te

print(f"transformer_engine {transformer_engine.__version__}, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()},",
      f"{torch.cuda.get_device_name()}, imported in {time.monotonic() - begin:.1f} s", flush=True)
torch.manual_seed(0)
width, heads, size, lengths = 256, 4, 64, [5, 37, 22]
tokens = sum(lengths)
x = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
linear = te.Linear(width, width, params_dtype=torch.bfloat16, device="cuda")
expected = torch.nn.functional.linear(x, linear.weight, linear.bias)
error = (linear(x) - expected).abs().max().item()
linear(x).float().square().mean().backward()
assert error < 0.05 and x.grad.isfinite().all() and linear.weight.grad.isfinite().all(), error
print(f"te.Linear: greatest difference from torch {error:.4f}", flush=True)

q, k, v = (torch.randn(tokens, heads, size, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
ends = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
attention = te.DotProductAttention(heads, size, qkv_format="thd", attn_mask_type="padding_causal", attention_dropout=0.0)
out = attention(q, k, v, cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths))
gradient = torch.randn_like(out)
got = torch.autograd.grad(out, (q, k, v), gradient)
parts = [
    torch.nn.functional.scaled_dot_product_attention(*(t.float().transpose(0, 1) for t in part), is_causal=True).transpose(0, 1)
    for part in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
]
expected = torch.cat(parts).reshape(tokens, -1)
wanted = torch.autograd.grad(expected, (q, k, v), gradient.float())
error = (out.float() - expected).abs().max().item()
errors = [(a.float() - b.float()).abs().max().item() for a, b in zip(got, wanted, strict=True)]
print(f"te.DotProductAttention, thd, padding_causal: greatest difference from torch {error:.4f}; gradients {errors}", flush=True)
assert error < 0.05 and max(errors) < 0.1, (error, errors)
print("Transformer Engine works")
PY
