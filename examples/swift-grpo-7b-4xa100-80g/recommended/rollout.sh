#!/usr/bin/env bash
# Start this first: vLLM, on the GPUs that do not train.
export USE_HF=1 CUDA_VISIBLE_DEVICES=3
exec python -m swift.cli.main rollout --model Qwen/Qwen2.5-7B-Instruct --vllm_gpu_memory_utilization 0.6 --vllm_tensor_parallel_size 1 --vllm_enable_lora true --port 8000 "$@"
