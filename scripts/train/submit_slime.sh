#!/usr/bin/env bash
# Runs slime's train.py with the launch files of a folder (`slime-tandem config --slime FOLDER > FOLDER/launch.sh`). The suite uses it.
# Variables: slime_lib.sh.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
source "$(dirname "${BASH_SOURCE[0]}")/slime_lib.sh"
launch="${1:-}"
[[ -f "$launch/launch.sh" ]] || refuse FOLDER "$launch" "a folder with launch.sh" "make it with slime-tandem config --slime FOLDER"
need_slime
check "$launch"
start_ray
submit "$launch"
