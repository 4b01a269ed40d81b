#!/usr/bin/env bash
# Starts the recommended run. Further arguments go to TRL's script, which ignores unknown ones: ./launch.sh --max_steps 100
# Run it in the folder to which your reward functions and paths are relative.
set -euo pipefail
here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
python="${PYTHON:-python}"
[ -n "$(command -v "$python")" ] || {
  echo "$python: not found. Activate the training environment, or set PYTHON to its path." >&2
  exit 127
}
exec "$python" -m accelerate.commands.launch --config_file "$here/accelerate.yaml" \
  -m trl.scripts.grpo --config "$here/recommended.yaml" \
  --dataset_name "$here/placeholder" "$@"
