#!/usr/bin/env bash
# `make first-light` on a machine without a network, from a pack of wheels that was brought along.
#   bash benchmarks/first_light.sh FOLDER [arguments of first_light.py]
# In the root of the repository. FOLDER/wheels holds install.sh, SHA256SUMS and the parts of the pack. A pack that is
# too large for one transfer comes in halves: a call with a half puts it aside, and the call with the other one installs.
# FOLDER/traces.tar.xz: traces made beforehand, so that predictions start no tracer. Results are written into $OUT.
set -euo pipefail
began=$(date +%s.%N)
brought=$(realpath "$1"); shift
export OUT=${OUT:-$brought/out} SITE=${SITE:-/tmp/first-light-site}
parts=${PARTS:-/tmp/first-light-parts} kept=${KEPT:-/tmp/first-light-kept}
mkdir -p "$OUT"
exec > >(tee -a "$OUT/log.txt") 2>&1

# 1. The pack, once all of its parts are here. Its Python files are compiled while the first steps run.
if [ ! -f "$SITE/env.sh" ] && [ -d "$brought/wheels" ]; then
  mkdir -p "$parts"
  cp "$brought"/wheels/* "$parts"/
  if ! (cd "$parts" && sha256sum --quiet --check SHA256SUMS > /dev/null 2>&1); then
    echo "$(ls "$parts" | grep -c '^part-') parts of the pack are here; bring the others"
    exit 0
  fi
  bash "$parts/install.sh" "$SITE" > /dev/null
  (cd "$SITE" && exec nice -n 5 python3 -m compileall -q -j 6 . > /dev/null 2>&1) &
fi
[ ! -f "$SITE/env.sh" ] || . "$SITE/env.sh"

# 2. Traces, in the cache's own format.
traces=${XDG_CACHE_HOME:-$HOME/.cache}/autotune/traces
if [ -f "$brought/traces.tar.xz" ] && [ ! -f "$traces/.brought" ]; then
  mkdir -p -m 700 "$traces"
  python3 - "$brought/traces.tar.xz" "$traces" <<'EOT'
import pathlib, sys, tarfile, zlib
folder = pathlib.Path(sys.argv[2])
with tarfile.open(sys.argv[1]) as tar:
    for member in tar:
        (folder / member.name).write_bytes(zlib.compress(tar.extractfile(member).read(), 1))
(folder / ".brought").touch()
EOT
fi

# 3. The program. Without a network, ranks and engine talk over the loopback interface.
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo VLLM_HOST_IP=127.0.0.1
exec python3 benchmarks/first_light.py --began "$began" --out "$OUT" --keep "$kept" "$@"
