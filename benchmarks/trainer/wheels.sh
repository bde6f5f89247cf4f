#!/usr/bin/env bash
# Downloads what MaxText's training command imports beside JAX for CUDA and common packages: wheels.sh FOLDER.
# FOLDER then has wheels for Linux on x86-64 and Python 3.12, to carry to a GPU machine without a network, and FOLDER/stubs
# an empty `xprof`: tokamax imports it for timers that no training calls, and its wheel has a hundred megabytes.
# DECOUPLE_GCLOUD=TRUE, which the benchmark sets, makes MaxText run without the packages of Google Cloud.
set -euo pipefail
folder=$1
requirements=$(dirname "${BASH_SOURCE[0]}")/../../requirements/trainer.txt
platforms=()
for version in 2_28 2_27 2_24 2_17; do platforms+=(--platform "manylinux_${version}_x86_64"); done
"${PYTHON:-python3}" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    "${platforms[@]}" --platform manylinux2014_x86_64 --dest "$folder" --requirement "$requirements"
mkdir -p "$folder/stubs/xprof/cli/tools"
touch "$folder"/stubs/xprof/{__init__,cli/__init__,cli/tools/__init__,cli/tools/get_kernel_stats_tool}.py
