#!/usr/bin/env bash
# A guarded training on the nodes of a Ray cluster: bash ray.sh train.sh
# train.sh is a launch script, such as verl's. Ray starts the guard beside the driver on its head. This folder must be on a disk that every node
# has: there are the checkpoints, and the same line goes on from them after the cluster was lost.
set -euo pipefail
script=${1:-train.sh}
folder=$(printf %q "$PWD")
ray job submit --address "${RAY_ADDRESS:-http://127.0.0.1:8265}" -- \
  bash -c "cd $folder && exec autotune guard $(printf %q "$script") --resume --early --out guard -- bash $(printf %q "$script")"
