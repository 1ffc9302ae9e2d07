# shellcheck shell=bash
# Sourced by make_gpu_kit.sh and make_te_kit.sh: wheels for another machine than this one, Python 3.12 on x86-64.
platforms=()
for n in {39..17}; do platforms+=(--platform "manylinux_2_${n}_x86_64"); done
platforms+=(--platform manylinux2014_x86_64 --platform manylinux2010_x86_64 --platform manylinux1_x86_64)

# get FOLDER PACKAGE...: their wheels, without what they need.
get() {
  python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
    --python-version 3.12 --implementation cp "${platforms[@]}" -d "$1" "${@:2}"
}
