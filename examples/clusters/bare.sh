#!/bin/bash
# Machines that reach each other by ssh, autotune's environment at the same path on each. This one is the first of them:
#
#     ./bare.sh gpu-1 gpu-2 gpu-3
#
# Names are those of a private network: Ray encrypts nothing. Ray is ended again however this ends.
set -euo pipefail
hosts=("$@")
port=${PORT:-6379}
environment=${ENVIRONMENT:-$HOME/grpo}   # what `pip install '.[train,vllm,ray]'` in a clone went into
ray=$environment/bin/ray

# A token for this cluster alone: without it, whoever reaches a port of Ray may run programs as this user.
umask 077
folder=$(mktemp -d)
token=$folder/token
head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n' > "$token"
export RAY_USAGE_STATS_ENABLED=0 RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$token
there="RAY_USAGE_STATS_ENABLED=0 RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$token"

stop() {
  for host in "${hosts[@]:1}"; do ssh "$host" "$ray stop; rm -rf $folder" || true; done
  "$ray" stop
  rm -rf "$folder"
}
trap stop EXIT

"$ray" start --head --node-ip-address "${hosts[0]}" --port "$port" --include-dashboard=false --dashboard-host 127.0.0.1
for host in "${hosts[@]:1}"; do
  ssh "$host" "umask 077; mkdir -p $folder; cat > $token" < "$token"
  ssh "$host" "$there $ray start --node-ip-address $host --address ${hosts[0]}:$port"
done

"$environment/bin/autotune" run --config "${CONFIG:-train.yaml}" --gpus "${GPUS:-2xA100-40G}" --budget "${BUDGET:-30m}" \
  --executor ray --address "${hosts[0]}:$port" --out "${OUT:-autotune-out}"
