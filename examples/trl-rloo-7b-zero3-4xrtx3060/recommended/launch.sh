#!/usr/bin/env bash
# Starts the recommended run. Further arguments go to TRL: ./launch.sh --max_steps 100
# Run it in the folder to which your reward functions and paths are relative.
set -euo pipefail
here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
trl="${TRL:-trl}"
[ -n "$(command -v "$trl")" ] || {
  echo "$trl: not found. Activate the training environment, or set TRL to its path." >&2
  exit 127
}
export CUDA_DEVICE_ORDER=PCI_BUS_ID
exec "$trl" rloo --config "$here/recommended.yaml" --config_file "$here/accelerate.yaml" \
  --dataset_name "$here/placeholder" "$@"
