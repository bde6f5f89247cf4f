#!/usr/bin/env bash
# Downloads what MaxText's training command imports beside JAX for CUDA and common packages: wheels.sh FOLDER.
# FOLDER then has wheels for Linux on x86-64 and Python 3.12, to carry to a GPU machine without a network, and FOLDER/stubs
# an empty `xprof`: tokamax imports it for timers that no training calls, and its wheel has a hundred megabytes.
# DECOUPLE_GCLOUD=TRUE, which the benchmark sets, makes MaxText run without the packages of Google Cloud.
set -euo pipefail
folder=$1
packages=(
    maxtext==0.2.5 tokamax==0.0.17 flax==0.12.12 optax==0.2.8 orbax-checkpoint==0.12.8 grain==0.2.18 array-record==0.8.6
    qwix==0.1.8 aqtp==0.9.0 drjax==0.2.1 einshape==1.0 omegaconf==2.4.0 ml-collections==1.1.0 immutabledict==4.3.1
    etils==1.15.0 tensorboardx==2.6.5 portpicker==1.6.0 pathwaysutils==0.1.13
    fastapi==0.165.0 starlette==1.10.0 uvicorn==0.54.0 opentelemetry-api==1.45.2 # pathwaysutils imports them
    pydantic==2.14.3 pydantic-core==2.50.4 annotated-types==0.8.0 typing-inspection==0.4.5
)
platforms=()
for version in 2_28 2_27 2_24 2_17; do platforms+=(--platform "manylinux_${version}_x86_64"); done
"${PYTHON:-python3}" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    "${platforms[@]}" --platform manylinux2014_x86_64 --dest "$folder" "${packages[@]}"
mkdir -p "$folder/stubs/xprof/cli/tools"
touch "$folder"/stubs/xprof/{__init__,cli/__init__,cli/tools/__init__,cli/tools/get_kernel_stats_tool}.py
