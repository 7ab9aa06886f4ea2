#!/bin/bash
# A master and a peer on each node of a SLURM job. Nodes may fail; training goes on, and a node that is back joins again.
#
#     sbatch examples/slurm.sh train.py --steps 1000
#
#SBATCH --job-name=zpccl
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --no-kill
set -euo pipefail

# This script runs on the first node, and the master with it. Start zpccl-master elsewhere, and set ZPCCL_MASTER before
# sbatch, where the run has to outlive that node, or spans several jobs: each is then some peers that come and go.
if [[ -z "${ZPCCL_MASTER:-}" ]]; then
    ZPCCL_SECRET_FILE=$(mktemp --tmpdir="$PWD" zpccl.XXXXXX.secret)  # Where all nodes see it, and only this user.
    zpccl keygen >"$ZPCCL_SECRET_FILE"
    port=$((20000 + SLURM_JOB_ID % 10000))  # Another job may have its master on this node, too.
    ZPCCL_MASTER=$(hostname):$port
    export ZPCCL_MASTER ZPCCL_SECRET_FILE
    zpccl-master --bind "0.0.0.0:$port" &
    master=$!
    trap 'kill "$master" || true; wait; rm -f "$ZPCCL_SECRET_FILE"' EXIT
fi

# A peer that fails does not end the others (--kill-on-bad-exit=0, --wait=0), nor does a node (--no-kill). It is started
# again, three times at most, and joins the others where they are.
srun --no-kill --kill-on-bad-exit=0 --wait=0 bash -c '
    for try in 1 2 3 4; do
        python "$@" && exit
        echo "status $? of the peer on $SLURMD_NODENAME (start $try)" >&2
        sleep 1
    done
    exit 1' peer "$@"
