#!/usr/bin/env bash
# A search as a job on Hugging Face's machines: bash hf_job.sh Qwen/Qwen2.5-7B
# The wheel is built here and uploaded to a data set of your own, which the job installs it from.
set -euo pipefail
model=${1:-Qwen/Qwen2.5-7B}
store=${STORE:-$(hf auth whoami | head -n 1)/autotune}
wheel=$(ls dist/grpo_autotune-*.whl | tail -n 1)
hf upload --repo-type dataset --private "$store" "$wheel" "${wheel##*/}"
hf jobs run --flavor a100-large --timeout 1h --secrets HF_TOKEN \
  --env MODEL="$model" --env STORE="$store" --env WHEEL="${wheel##*/}" \
  pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime \
  bash -c 'pip install -q huggingface_hub && hf download --repo-type dataset "$STORE" "$WHEEL" --local-dir . &&
    pip install -q "./$WHEEL[train,vllm,fast]" && autotune run --model "$MODEL" --gpus local --budget 30m --out out &&
    hf upload --repo-type dataset "$STORE" out answers/"$MODEL"'
