#!/usr/bin/env bash
# The recommended run of Qwen/Qwen2.5-7B-Instruct: num_generations=8 max_completion_length=2048 lora_rank=12 per_device_train_batch_size=8 gradient_checkpointing=True use_vllm=True vllm_mode=server vllm_gpu_memory_utilization=0.6 vllm_enable_lora=True deepspeed=zero3, as autotune predicted it on 4xA100-80G.
# Further arguments go to the command.
set -euo pipefail
out="${OUT:-$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)}"
mkdir -p "$out"
export CUDA_DEVICE_ORDER=PCI_BUS_ID
export NPROC_PER_NODE=3
export USE_HF=1
export CUDA_VISIBLE_DEVICES=0,1,2
exec python -m swift.cli.main rlhf --model Qwen/Qwen2.5-7B-Instruct --per_device_train_batch_size 8 --gradient_checkpointing true --tuner_type lora --lora_rank 12 --torch_dtype bfloat16 --max_length 2048 --deepspeed zero3 --optim adamw_torch_fused --use_liger_kernel false --gradient_accumulation_steps 8 --num_generations 8 --max_completion_length 2048 --beta 0.04 --use_vllm true --vllm_mode server --vllm_enable_lora true --sleep_level 0 --offload_model false --offload_optimizer false --dataset PLACEHOLDER/your-prompts --output_dir "$out"/output --add_version false --rlhf_type grpo --reward_funcs format --vllm_server_host 127.0.0.1 --vllm_server_port 8000 "$@"
