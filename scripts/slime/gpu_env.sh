#!/usr/bin/env bash
# Unpacks what a machine without a network got, once each, and writes WORK/env.sh, which a shell sources before it runs anything.
#
#   gpu_env.sh KIT [WORK]      KIT: folder of ray.txz and source.txz (make_gpu_kit.sh); of tasks.txz and site.txz (SGLang), if there
#
#   WORK    default /tmp/slime_tandem_gpu
#   SITE    where SGLang is, or is unpacked (default: /tmp/site)
#   MORE    a folder of further packages, the last on the path (default: none)
#   NEED    archives that must be there (default: "ray source"). What comes later is put on the path when this is run again.
set -euo pipefail
[[ $# == 1 || $# == 2 ]] || { sed -n '2,10p' "$0" >&2; exit 2; }
kit=$(realpath "$1") work=${2:-/tmp/slime_tandem_gpu} site=${SITE:-/tmp/site}
repo=$(realpath "$(dirname "${BASH_SOURCE[0]}")/../..")
mkdir -p "$work"
unpack() { # ARCHIVE FOLDER: a mark beside it says that it is whole
  [[ -e "$2.whole" ]] && return
  [[ -f "$1" ]] || { echo "gpu_env: $1: expected an archive; make it with make_gpu_kit.sh" >&2; return 3; }
  mkdir -p "$2"
  tar -C "$2" -xJf "$1"
  touch "$2.whole"
}
for name in site tasks ray source; do
  folder=$work/$name
  [[ $name != site ]] || folder=$site
  if [[ -f "$kit/$name.txz" || " ${NEED-ray source} " == *" $name "* ]]; then unpack "$kit/$name.txz" "$folder"; fi
done
rm -rf "${site:?}/megatron" # SGLang's archive has a newer megatron-core; a run takes slime's
cat > "$work/env.sh" <<ENV
export PYTHONPATH=$repo:$work/source/slime:$work/source/Megatron-LM:$work/ray/first:$site:$work/ray/last:$work/tasks${MORE:+:$MORE}
export PATH=$work/ray/last/bin:\$PATH
export SLIME_DIR=$work/source/slime MEGATRON_LM_DIR=$work/source/Megatron-LM
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
export SGLANG_ENABLE_LOGITS_PROCESSER_CHUNK=1 SGLANG_LOGITS_PROCESSER_CHUNK_SIZE=1024
ENV
