#!/usr/bin/env bash
# A guarded training as a job on Hugging Face's machines: bash hf-job.sh train.yaml
# The wheel and the configuration come from a data set of your own, and the results go there.
set -euo pipefail
config=${1:-train.yaml}
store=${STORE:-$(hf auth whoami | head -n 1)/autotune}
wheel=$(ls dist/grpo_autotune-*.whl | tail -n 1)
hf upload --repo-type dataset --private "$store" "$wheel" "${wheel##*/}"
hf upload --repo-type dataset --private "$store" "$config" train.yaml
hf jobs run --flavor a100-large --timeout 12h --secrets HF_TOKEN --env STORE="$store" --env WHEEL="${wheel##*/}" \
  pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime \
  bash -c 'pip install -q huggingface_hub && hf download --repo-type dataset "$STORE" --local-dir . &&
    pip install -q "./$WHEEL[train,vllm]" || exit 4
    autotune guard train.yaml --early --out guard -- trl grpo --config train.yaml; code=$?
    hf upload --repo-type dataset "$STORE" guard guard; hf upload --repo-type dataset "$STORE" outputs outputs
    exit $code'
