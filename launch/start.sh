# What the scripts that start a training share. Sourced, from the repository root; leaves $python and $ranks.
#
#   PYTHON   interpreter (default: that of .venv in this checkout, else python3)
#   RANKS    rank processes on this machine (default: one a GPU that torch sees, or 2 where it sees none)
#
# Ranks speak NCCL where torch sees a GPU and gloo where not; CUDA_VISIBLE_DEVICES= (empty) trains on the CPU.
set -euo pipefail

if [[ -z "${PYTHON:-}" ]]; then
    python=python3
    if [[ -x .venv/bin/python ]]; then
        python=.venv/bin/python
    fi
else
    python="$PYTHON"
fi
if ! gpus="$("$python" -c 'import torch; print(torch.cuda.device_count())')"; then
    echo "$0: $python cannot import torch; run bash launch/setup.sh first, or set PYTHON" >&2
    exit 2
fi
ranks="${RANKS:-$((gpus > 0 ? gpus : 2))}"
if [[ ! "$ranks" =~ ^[1-9][0-9]*$ ]]; then
    echo "$0: RANKS must be a whole number of at least 1, got '$ranks'" >&2
    exit 2
fi
if ((gpus > 0 && ranks > gpus)); then
    echo "$0: RANKS is $ranks, but this machine has $gpus GPUs, and each rank needs its own" >&2
    exit 2
fi
if ((gpus == 0)) && [[ -z "${OMP_NUM_THREADS:-}" ]]; then
    # Ranks share the cores; torchrun would give each a single one.
    cores="$(nproc)"
    export OMP_NUM_THREADS=$((cores > ranks ? cores / ranks : 1))
fi
if ((gpus > 0)); then
    backend=nccl
else
    backend=gloo
fi
