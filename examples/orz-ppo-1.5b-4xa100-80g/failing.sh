#!/bin/sh
# What is public of the run that failed, as overrides of the experiment. Its gpu_memory_utilization is not public.
python -m playground.orz_7b_ppo exp.pretrain=Qwen/Qwen2.5-1.5B exp.critic_pretrain=Qwen/Qwen2.5-1.5B \
  exp.total_num_nodes=4 exp.ref_num_nodes=4 exp.actor_num_nodes=4 exp.critic_num_nodes=4 exp.vllm_num_engines=4 \
  exp.rollout_batch_size=2 exp.micro_rollout_batch_size=2 \
  exp.prompt_max_len=1024 exp.generate_max_len=1024 exp.max_len=2048
