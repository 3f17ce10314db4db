#!/usr/bin/env bash
# Trains on several machines. Start the same line on each of them, in any order; they meet at MAIN_HOST.
#
#   NODES=2 MAIN_HOST=node1 bash launch/many_machines.sh CONFIG.yaml [key.sub=value ...]
#
# Variables, equal on all machines:
#   NODES       how many machines there are
#   MAIN_HOST   name or address of one of them, which all can reach
#   PORT        a free port there (default: 29500)
#   RUN_ID      name of the run, to tell apart runs that meet at one port (default: cp_engine)
#   RANKS       ranks of each machine, see launch/start.sh
# and of each machine:
#   LOCAL_ADDR  address that the others reach it by, where they do not know its host name
#   PYTHON      see launch/start.sh
#
# The ranks of all machines replace parallel.cp: parallel.cp = ranks / parallel.dp. Every machine needs the config, the
# rollouts and the model under the same paths, and checkpoints need one output folder that all see. Sharding within a
# machine (engine.shard: node) needs equally many ranks on each.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
missing=()
for name in NODES MAIN_HOST; do
    if [[ -z "${!name:-}" ]]; then
        missing+=("$name")
    fi
done
if ((${#missing[@]})); then
    echo "many_machines: set ${missing[*]}, for example: NODES=2 MAIN_HOST=node1 bash launch/many_machines.sh CONFIG.yaml" >&2
    exit 2
fi
if [[ ! "$NODES" =~ ^[1-9][0-9]*$ ]]; then
    echo "many_machines: NODES must be a whole number of at least 1, got '$NODES'" >&2
    exit 2
fi
if (($# == 0)); then
    echo "usage: NODES=2 MAIN_HOST=node1 bash launch/many_machines.sh CONFIG.yaml [key.sub=value ...]" >&2
    exit 2
fi
source launch/start.sh

address=()
if [[ -n "${LOCAL_ADDR:-}" ]]; then
    address=(--local-addr "$LOCAL_ADDR")
fi
endpoint="$MAIN_HOST:${PORT:-29500}"
echo "many_machines: $ranks ranks here on one of $NODES machines, $backend, meeting at $endpoint" >&2
exec "$python" -m torch.distributed.run \
    --nnodes "$NODES" --nproc-per-node "$ranks" \
    --rdzv-backend c10d --rdzv-endpoint "$endpoint" --rdzv-id "${RUN_ID:-cp_engine}" ${address[@]+"${address[@]}"} \
    -m cp_engine train "$@"
