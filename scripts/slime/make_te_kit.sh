#!/usr/bin/env bash
# Packs Transformer Engine 2.16.1 (the version of slime's image) for a GPU machine without a network (Python 3.12, torch for CUDA 13,
# x86-64) into OUTDIR/te.txz: its library cut to one card's code, the sources of its PyTorch extension, and what both import.
#
#   scripts/slime/make_te_kit.sh OUTDIR [ARCH]      ARCH: compute capability times ten (default: 90, H100 and H200)
#
# There: scripts/slime/build_te.sh TE.TXZ SITE. Needs about 2 GB in TMPDIR.
set -euo pipefail
[[ $# == 1 || $# == 2 ]] || { sed -n '2,7p' "$0" >&2; exit 2; }
version=2.16.1 arch=${2:-90}
mkdir -p "$1"
out=$(realpath "$1")
here=$(realpath "$(dirname "${BASH_SOURCE[0]}")")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

source "$(dirname "${BASH_SOURCE[0]}")/foreign_wheels.sh"
get "$work/wheels/first" "transformer_engine_cu13==$version" "transformer_engine==$version"
# Last on the path: an environment's own pydantic comes first, with the core that it fits.
get "$work/wheels/last" pydantic==2.11.7 pydantic-core==2.33.2 annotated-types==0.7.0 typing-inspection==0.4.2
for kind in first last; do
  mkdir -p "$work/kit/$kind"
  for wheel in "$work/wheels/$kind"/*.whl; do unzip -q -o "$wheel" -d "$work/kit/$kind"; done
done
# The machine has JAX, and without this folder Transformer Engine does not look for its extension for JAX.
rm -rf "$work/kit/first/transformer_engine/jax"

# pip cannot fetch these sources without running their setup.py, which wants torch; the simple index names the file and its hash.
python3 - "transformer_engine_torch-$version.tar.gz" "$work/torch.tar.gz" <<'PY'
import hashlib, json, sys, urllib.request
name, target = sys.argv[1:]
index = "https://pypi.org/simple/transformer-engine-torch/"
request = urllib.request.Request(index, headers={"Accept": "application/vnd.pypi.simple.v1+json"})
files = {file["filename"]: file for file in json.load(urllib.request.urlopen(request, timeout=60))["files"]}
if name not in files:
    sys.exit(f"make_te_kit: {name}: not in {index}; found {sorted(files)}; change the version")
data = urllib.request.urlopen(files[name]["url"], timeout=180).read()
if hashlib.sha256(data).hexdigest() != files[name]["hashes"]["sha256"]:
    sys.exit(f"make_te_kit: {name}: its SHA-256 is not the index's; try again")
open(target, "wb").write(data)
PY
mkdir "$work/kit/torch"
tar -C "$work/kit/torch" --strip-components=1 -xzf "$work/torch.tar.gz"

library=$work/kit/first/transformer_engine/wheel_lib/libtransformer_engine.so
python3 "$here/keep_cubins.py" "$library" "$work/cut.so" --arch "$arch"
strip --strip-unneeded "$work/cut.so"
chmod 755 "$work/cut.so"
mv "$work/cut.so" "$library"
find "$work/kit" -name __pycache__ -type d -prune -exec rm -rf {} +
tar -C "$work/kit" --sparse -cf - . | xz -T0 -6 > "$out/te.txz"
ls -l "$out/te.txz"
