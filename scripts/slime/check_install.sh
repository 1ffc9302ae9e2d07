#!/usr/bin/env bash
# Installs this package as docs/slime.md says into an environment that says it has the packages of slime's image (Python 3.12; their metadata
# alone, no code), and fails where that changes, removes or replaces one of them. Prints what was added. Needs a package index.
#   PYTHON   interpreter (default: python3.12)
#   WORK     folder for it (default: a new one, removed at the end)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
python="${PYTHON:-python3.12}"
if [[ -z "${WORK:-}" ]]; then
  WORK="$(mktemp -d)"
  trap 'rm -rf "$WORK"' EXIT
fi
"$python" -m venv "$WORK/image"
pip=("$WORK/image/bin/python" -m pip)
site="$("$WORK/image/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')"
while read -r line; do
  [[ "$line" == \#* ]] && continue
  name="${line%%==*}" version="${line#*==}"
  folder="$site/${name//-/_}-$version.dist-info"
  mkdir -p "$folder"
  printf 'Metadata-Version: 2.1\nName: %s\nVersion: %s\n' "$name" "$version" > "$folder/METADATA"
  printf 'image\n' > "$folder/INSTALLER"
  : > "$folder/RECORD"
done < "$REPO/scripts/slime/image_packages.txt"
list() { "${pip[@]}" list --format=freeze | sort; }
list > "$WORK/before.txt"
"${pip[@]}" wheel --quiet --no-deps --wheel-dir "$WORK/wheels" "$REPO"
# The constraint makes pip stop where it would otherwise replace a package.
wheels=("$WORK"/wheels/slime_tandem-*.whl)
"${pip[@]}" install --quiet --no-compile --constraint "$WORK/before.txt" "${wheels[0]}[slime]"
list > "$WORK/after.txt"
if changed="$(comm -23 "$WORK/before.txt" "$WORK/after.txt")" && [[ -n "$changed" ]]; then
  printf 'changed packages of the image:\n%s\n' "$changed" >&2
  exit 1
fi
echo "no package of the image changed; added:"
comm -13 "$WORK/before.txt" "$WORK/after.txt"
