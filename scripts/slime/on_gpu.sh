#!/usr/bin/env bash
# Runs scripts/slime/real_run.py on a machine that got the archives of make_gpu_kit.sh, and prints what a report needs.
#
#   on_gpu.sh KIT OUT [two|fused|resume] [more arguments of real_run.py]
#
# KIT: the folder with ray.txz and source.txz. SITE (default /tmp/site): SGLang, unpacked. The second run with `resume` goes on from
# the checkpoint of `two` on the same machine. GPU memory is sampled every 2 s into
# OUT/MODE-memory.csv. Everything lies under WORK (default /tmp/slime_tandem_gpu).
set -uo pipefail
kit=$1 out=$2 mode=${3:-two}
shift $(( $# < 3 ? $# : 3 ))
work=${WORK:-/tmp/slime_tandem_gpu} site=${SITE:-/tmp/site}
mkdir -p "$out" "$work"
here=$(realpath "$(dirname "${BASH_SOURCE[0]}")")
SITE=$site bash "$here/gpu_env.sh" "$kit" "$work" || exit 3
# shellcheck source=/dev/null
source "$work/env.sh"
export PYTHONDONTWRITEBYTECODE=${PYTHONDONTWRITEBYTECODE:-}
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader | tee "$out/gpu.txt"
python3 -W ignore - <<'PY' 2> "$out/versions.err" | tee "$out/versions.txt"
import importlib.metadata as md, sys
import megatron.core, numpy, torch
print("python", sys.version.split()[0], "torch", torch.__version__, "numpy", numpy.__version__, "megatron.core", megatron.core.__version__)
for name in "ray sglang sglang-kernel sglang-router transformers tokenizers triton flashinfer-python transformer-engine".split():
    try:
        print(name, md.version(name))
    except md.PackageNotFoundError:
        print(name, "none")
PY
case $mode in
  two) name=two more=() ;;
  resume) name=two more=(--steps 26) ;;
  fused) name=fused more=(--fused) ;;
  *) echo "mode $mode: expected two, fused or resume" >&2; exit 2 ;;
esac
run=$work/run-$name
nvidia-smi --query-gpu=timestamp,index,memory.used --format=csv,noheader,nounits --loop=2 > "$out/$mode-memory.csv" &
sampler=$!
trap 'kill "$sampler" 2>/dev/null' EXIT # also where a time limit ends this script
python3 -W ignore "$here/real_run.py" --slime "$work/source/slime" --megatron "$work/source/Megatron-LM" \
  --models "$work/source/models" --prompts "$work/source/prompts.jsonl" --work "$run" --limit 540 "${more[@]}" "$@"
code=$?
kill "$sampler"
awk -F', ' '$3 > most[$2] {most[$2] = $3} END {for (gpu in most) print "GPU " gpu ": at most " most[gpu] " MiB used, all processes"}' \
  "$out/$mode-memory.csv" | sort | tee "$out/$mode-memory.txt"
python3 -W ignore "$here/report.py" "$run" --json "$out/$mode.json" | tee "$out/$mode.md"
cp "$run/command.txt" "$out/$mode-command.txt"
xz -c "$run/train.log" > "$out/$mode-train.log.xz"
for role in junior teacher; do [[ -e $run/$role.log ]] && tail -c 20000 "$run/$role.log" > "$out/$mode-$role.log"; done
if [[ $code != 0 ]]; then
  grep -anE "Error|Traceback|Exception|OutOfMemory" "$run/train.log" | grep -vE "error_rate|v1/loads|IncludedRouter" | cut -c1-300 | tail -n 30
  tail -n 60 "$run/train.log" | cut -c1-400
fi
exit "$code"
