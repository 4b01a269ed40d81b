#!/bin/sh
# PPO with open-reasoner-zero for Qwen/Qwen2.5-1.5B on 4xA100-80G: predicted, not measured.
# Written for open-reasoner-zero 3fdd9a07b4. Add your data and your reward.
python -m playground.orz_7b_ppo \
  exp.pretrain=Qwen/Qwen2.5-1.5B \
  exp.critic_pretrain=Qwen/Qwen2.5-1.5B \
  exp.rollout_batch_size=2 \
  exp.prompt_max_len=1024 \
  exp.generate_max_len=1024 \
  exp.packing_max_len=16384 \
  exp.adam_offload=False \
  exp.gradient_checkpointing=True \
  exp.micro_rollout_batch_size=2 \
  exp.n_samples_per_prompt=64 \
  exp.zero_stage=3 \
  exp.gpu_memory_utilization=0.5 \
  exp.total_num_nodes=4 \
  exp.actor_num_nodes=4 \
  exp.ref_num_nodes=4 \
  exp.vllm_num_engines=4 \
  exp.critic_num_nodes=4 \
  exp.use_grpo=False \
  exp.max_len=2048 \
  exp.policy_update_steps=1 \
  exp.flash_attn=True \
  exp.colocate_all=True \
  exp.ref_reward_offload=False "$@"
