#!/usr/bin/env bash
# Starts the recommended run. Further arguments go to TRL: ./launch.sh --max_steps 100
# Run it from the folder that your reward functions and relative paths are found from.
set -euo pipefail
here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
trl="${TRL:-trl}"
[ -n "$(command -v "$trl")" ] || {
  echo "$trl: not found. Activate the training environment, or set TRL to its path." >&2
  exit 127
}
exec "$trl" grpo --config "$here/recommended.yaml" --config_file "$here/accelerate.yaml" \
  --dataset_name "$here/placeholder" "$@"
