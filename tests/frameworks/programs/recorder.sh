#!/usr/bin/env bash
echo "$2 gpus=${CUDA_VISIBLE_DEVICES:-all} alloc=${PYTORCH_CUDA_ALLOC_CONF:-none} token=${TOKEN:-none} $*" >> "$SEEN"
if [ "$2" = trl.scripts.vllm_serve ]; then exec sleep 600; fi
until grep -q trl.scripts.vllm_serve "$SEEN"; do sleep 0.01; [ -n "${ALONE:-}" ] && break; done
exit 0
