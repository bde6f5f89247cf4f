#!/usr/bin/env bash
# Checks and measures on a machine with a Hopper GPU: scripts/measure.sh STAGE...
# Stages, with the minutes of an H200 with 16 cores: test (3), gemm (2.5), groups (2), block (3), sonic (4; SonicMoE must
# be installed), train (5), train_qwen3 (4; LAYERS=L4 for a card of 80 GB); on two GPUs gather (1), exchange (4), mesh (6),
# step (4), mesh_train (4) and tutorial (3). Results go to $OUT (default runs/results), as JSON with the commit SHA=...;
# copy a file that a page prints to benchmarks/results. One call can hold several stages.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 XLA_PYTHON_CLIENT_PREALLOCATE=false
python=${GPU_PYTHON:-python3} out=${OUT:-runs/results} sha=${SHA:-$(git rev-parse --short HEAD)}
mkdir -p "$out"
measure() { "$python" -m benchmarks "$@"; }

stage_test() { make test-gpu GPU_PYTHON="$python" GPU_WORKERS=12; }
stage_gemm() { measure gemm --sha "$sha" --out "$out/h200_gemm.json"; }
stage_groups() { measure gemm --cases groups --peers none --quick --sha "$sha" --out "$out/h200_groups.json"; }
stage_exchange() { measure exchange --quick --sha "$sha" --out "$out/h200x2_exchange.json"; }
stage_block() { measure block --quick --sha "$sha" --out "$out/h200_block.json"; }
stage_sonic() {
    measure block --only qwen3-30b --only sonic --recipe none --recipe fp8_block+kept --quick --sha "$sha" \
        --out "$out/h200_block_sonic.json"
}
stage_gather() { measure gather --sha "$sha" --out "$out/h200x2_gather.json"; }
stage_mesh() {
    local block=(block --mesh fsdp=1,ep=2 --only qwen3 --only mixtral --tokens 8192 --quick --sha "$sha")
    measure "${block[@]}" --out "$out/h200x2_block.json"
    measure "${block[@]}" --exchange one_sided --peers none --out "$out/h200x2_block_one_sided.json"
}
stage_step() {
    local step=(train --mesh fsdp=1,ep=2 --only medium --quick --sha "$sha")
    measure "${step[@]}" --out "$out/h200x2_step.json"
    measure "${step[@]}" --exchange one_sided --peers none --out "$out/h200x2_step_one_sided.json"
}
stage_train_qwen3() {
    # The processes that wait to be measured hold little memory, so that the measured one may take nearly all of it.
    XLA_PYTHON_CLIENT_MEM_FRACTION=0.93 measure train --mesh fsdp=1 --peers none --only "qwen3-30b-${LAYERS:-L6}" \
        --quick --sha "$sha" --out "$out/h200_train_qwen3.json"
}
stage_tutorial() {
    "$python" docs/tutorial/layer.py --gpus --keep --sha "$sha"
    cp docs/tutorial/layer_gpus.txt "$out"
}
stage_mesh_train() {
    for exchange in all_gather one_sided; do
        "$python" -m lm train --preset medium --batch 32 --steps 200 --eval-every 50 --save-every 0 --recipe fp8_block \
            --mesh fsdp=1,ep=2 --exchange "$exchange" --out "$out/train" --name "$exchange"
        cp "$out/train/$exchange/metrics.jsonl" "$out/h200x2_train_$exchange.jsonl"
    done
    rm -rf "$out/train"
}
stage_train() {
    "$python" -m lm train --preset medium --batch 32 --steps 300 --eval-every 50 --save-every 0 \
        --recipes none,fp8_block --out "$out" --name train
    for recipe in none fp8_block; do cp "$out/train/$recipe-seed0/metrics.jsonl" "$out/h200_train_$recipe.jsonl"; done
    cp "$out/train/arms.png" "$out/h200_train.png"
    rm -rf "$out/train"
}

for stage in "$@"; do
    began=$SECONDS
    "stage_$stage"
    echo "-- $stage: exit code $?, $((SECONDS - began)) s"
done
