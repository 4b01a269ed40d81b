#!/usr/bin/env bash
# Starts the recommended run. Further arguments go to TRL: ./launch.sh --max_steps 100
# Run it from the folder that your reward functions and relative paths are found from.
set -euo pipefail
here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
trl=trl
[ -x "$trl" ] || trl=trl
trl="${TRL:-$trl}"
exec "$trl" sft --config "$here/recommended.yaml" --config_file "$here/accelerate.yaml" "$@"
