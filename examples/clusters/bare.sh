#!/bin/bash
# Machines that reach each other by ssh, autotune's environment at the same path on each. This one is the first of them:
#
#     ./bare.sh gpu-1 gpu-2 gpu-3
#
# Ray is ended again however this ends.
set -euo pipefail
hosts=("$@")
port=${PORT:-6379}
environment=${ENVIRONMENT:-$HOME/grpo}   # what `pip install 'grpo-autotune[train,vllm,ray]'` went into
ray=$environment/bin/ray
export RAY_USAGE_STATS_ENABLED=0

stop() {
  for host in "${hosts[@]:1}"; do ssh "$host" "$ray" stop || true; done
  "$ray" stop
}
trap stop EXIT

"$ray" start --head --node-ip-address "${hosts[0]}" --port "$port" --include-dashboard=false
for host in "${hosts[@]:1}"; do
  ssh "$host" RAY_USAGE_STATS_ENABLED=0 "$ray" start --address "${hosts[0]}:$port"
done

"$environment/bin/autotune" run --config "${CONFIG:-train.yaml}" --gpus "${GPUS:-2xA100-40G}" --budget "${BUDGET:-30m}" \
  --executor ray --address "${hosts[0]}:$port" --out "${OUT:-autotune-out}"
