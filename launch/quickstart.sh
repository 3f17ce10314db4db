#!/usr/bin/env bash
# Sets everything up, trains tiny-qwen3.5 for a few GRPO steps on the sample rollouts, checks that the engine is exact
# on them, and prints a summary. One rank a GPU, or two CPU ranks where there is no GPU. Writes runs/quickstart/.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$root"

gpus="$("$python" -c 'import torch; print(torch.cuda.device_count())')"
ranks="$gpus"
if [[ "$gpus" == 0 ]]; then
    ranks=2
fi
run=runs/quickstart
echo "quickstart: $ranks ranks, $gpus GPUs"
"$python" -m cp_engine train launch/configs/quickstart.yaml --cp "$ranks" "output_dir=$run"

echo "quickstart: the same rollouts through the engine and one by one through the unmodified model, in float64"
verified=0
"$python" -m cp_engine verify --rollouts launch/data/sample.jsonl --model tiny-qwen3.5 --cp "$ranks" \
    --exchange gather --dtype float64 --loss grpo --json > "$run/verify.log" || verified=$?
"$python" launch/summary.py "$run"
exit "$verified"
