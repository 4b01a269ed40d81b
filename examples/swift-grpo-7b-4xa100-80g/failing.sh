#!/bin/sh
# What is public of the run that failed, under ms-swift 3.1.1. What is not public is left out.
CUDA_VISIBLE_DEVICES=0,1,2,3 NPROC_PER_NODE=3 swift rlhf --rlhf_type grpo \
  --model Qwen/Qwen2.5-7B-Instruct --train_type lora --lora_rank 12 --target_modules all-linear --torch_dtype bfloat16 \
  --use_vllm true --vllm_device auto --vllm_gpu_memory_utilization 0.6 --vllm_max_model_len 2048 \
  --per_device_train_batch_size 8 --gradient_accumulation_steps 8 --num_generations 8 --max_completion_length 2048 \
  --deepspeed zero3 --dataset PLACEHOLDER/your-prompts --reward_funcs format
