#!/bin/sh
# Nothing starts that would run out of memory an hour later. preflight becomes the training: same process, same exit code.
set -eu
config=${CONFIG:-train.yaml}
# PREFLIGHT is split into words on purpose.
# shellcheck disable=SC2086
exec autotune preflight "$config" --tune ${PREFLIGHT:-} -- trl grpo --config "$config"
