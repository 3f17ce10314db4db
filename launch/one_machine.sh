#!/usr/bin/env bash
# Trains on this machine, one rank a GPU, or on two CPU ranks where there is no GPU.
#
#   bash launch/one_machine.sh CONFIG.yaml [key.sub=value ...]
#   RANKS=4 bash launch/one_machine.sh launch/configs/qwen3_8b_grpo_64k_cp4.yaml steps=20
#
# The ranks that are started replace parallel.cp: parallel.cp = ranks / parallel.dp. Paths are relative to the
# repository root. Variables: PYTHON and RANKS, see launch/start.sh.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
if (($# == 0)); then
    echo "usage: bash launch/one_machine.sh CONFIG.yaml [key.sub=value ...]" >&2
    exit 2
fi
source launch/start.sh

echo "one_machine: $ranks ranks, $backend" >&2
exec "$python" -m torch.distributed.run --standalone --nproc-per-node "$ranks" -m cp_engine train "$@"
