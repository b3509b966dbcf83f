#!/usr/bin/env bash
# bash lessons/two_nodes.sh LESSON.py [FLAGS]     two nodes with two ranks each, on this machine
#
# On two machines, run the torchrun line once on each, with the first one's name or address as HOST and one port.
set -euo pipefail
host=${HOST:-127.0.0.1} port=${PORT:-$((20000 + $$ % 12000))} ranks=${RANKS_PER_NODE:-2}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}  # what torchrun would set, with a warning
[ -f "${1:-}" ] || { echo "error: ${1:-nothing} is not a file. HINT: bash lessons/two_nodes.sh LESSON.py" >&2; exit 2; }

node() {  # this module is torchrun: it is found wherever python is, and no folder of that name is in its way
  exec python -m torch.distributed.run --nnodes=2 --nproc_per_node="$ranks" --rdzv-backend=c10d \
    --rdzv-endpoint="$host:$port" --rdzv-id=two-nodes --local-addr="${host//[\[\]]/}" "$@"
}

node "$@" & first=$!
node "$@" & second=$!
trap 'kill $first $second 2>/dev/null || true' EXIT
wait $first && wait $second
