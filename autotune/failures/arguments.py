"""Names that settings of known classes had in some version: refused, they tell of versions that do not go together.

A name that no version ever knew is a slip of its writer; one that was taken out, renamed or came later is not. Read from every
version of the classes in TRL's history, and from transformers' and peft's with what these have taken out since.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_TRAINING = """
    accelerator_config adafactor adam_beta1 adam_beta2 adam_epsilon auto_find_batch_size average_tokens_across_devices
    batch_eval_metrics bf16 bf16_full_eval data_seed dataloader_drop_last dataloader_in_order
    dataloader_multiprocessing_context dataloader_num_workers dataloader_persistent_workers dataloader_pin_memory
    dataloader_prefetch_factor ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters
    ddp_static_graph ddp_timeout debug deepspeed disable_tqdm dispatch_batches do_eval do_predict do_train
    enable_jit_checkpoint eval_accumulation_steps eval_delay eval_do_concat_batches eval_on_start eval_steps eval_strategy
    eval_use_gather_object evaluate_during_training evaluation_strategy fp16 fp16_backend fp16_full_eval fp16_opt_level fsdp
    fsdp_config fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap full_determinism
    gradient_accumulation_steps gradient_checkpointing
    gradient_checkpointing_kwargs greater_is_better group_by_length half_precision_backend hub_always_push hub_model_id
    hub_private_repo hub_revision hub_strategy hub_token ignore_data_skip include_for_metrics include_inputs_for_metrics
    include_num_input_tokens_seen include_tokens_per_second jit_mode_eval label_names label_smoothing_factor learning_rate
    length_column_name liger_kernel_config load_best_model_at_end local_rank log_level log_level_replica log_on_each_node
    logging_dir logging_first_step logging_nan_inf_filter logging_steps logging_strategy lr_scheduler_kwargs
    lr_scheduler_type max_grad_norm max_steps metric_for_best_model mp_parameters neftune_noise_alpha no_cuda
    num_train_epochs optim optim_args optim_target_modules output_dir overwrite_output_dir parallelism_config past_index
    per_device_eval_batch_size per_device_train_batch_size per_gpu_eval_batch_size per_gpu_train_batch_size
    prediction_loss_only project push_to_hub push_to_hub_model_id push_to_hub_organization
    push_to_hub_token ray_scope remove_unused_columns report_to restore_callback_states_from_checkpoint
    resume_from_checkpoint run_name save_on_each_node save_only_model save_safetensors save_steps save_strategy
    save_total_limit seed sharded_ddp skip_memory_metrics split_batches tf32 torch_compile
    torch_compile_backend torch_compile_mode torch_empty_cache_steps torchdynamo tpu_metrics_debug tpu_num_cores
    trackio_bucket_id trackio_space_id trackio_static_space_id train_sampling_strategy use_cache use_cpu use_ipex
    use_legacy_prediction_loop use_liger_kernel use_mps_device warmup_ratio warmup_steps weight_decay xpu_backend
"""
"""Of `TrainingArguments`, which the settings of all trainers inherit."""

_OWN: Mapping[str, str] = {
    "BCOConfig": """
    beta dataset_num_proc disable_dropout generate_during_eval is_encoder_decoder label_pad_token_id max_completion_length
    max_density_ratio max_length max_prompt_length min_density_ratio model_init_kwargs padding_value
    precompute_ref_log_probs prompt_sample_size ref_model_init_kwargs truncation_mode trust_remote_code
    """,
    "CPOConfig": """
    alpha beta cpo_alpha dataset_num_proc disable_dropout generate_during_eval is_encoder_decoder label_pad_token_id
    label_smoothing loss_type max_completion_length max_length max_prompt_length max_target_length model_init_kwargs
    padding_value simpo_gamma truncation_mode trust_remote_code
    """,
    "DPOConfig": """
    activation_offloading base_model_attribute_name beta dataset_num_proc disable_dropout discopop_tau
    f_alpha_divergence_coef f_divergence_type force_use_ref_model generate_during_eval is_encoder_decoder label_pad_token_id
    label_smoothing ld_alpha loss_type loss_weights max_completion_length max_length max_prompt_length max_target_length
    model_adapter_name model_init_kwargs pad_to_multiple_of pad_token padding_free padding_value precompute_ref_batch_size
    precompute_ref_log_probs ref_adapter_name ref_model_init_kwargs ref_model_mixup_alpha ref_model_sync_steps
    reference_free router_aux_loss_coef rpo_alpha sync_ref_model tools truncation_mode trust_remote_code use_liger_loss
    use_logits_to_keep use_num_logits_to_keep use_weighting
    """,
    "GKDConfig": """
    beta disable_dropout lmbda max_new_tokens seq_kd teacher_model_init_kwargs teacher_model_name_or_path temperature
    """,
    "GRPOConfig": """
    beta cache_implementation cast_lm_head_to_fp32 chat_template_kwargs delta disable_dropout ds3_gather_for_generation
    entropy_coef entropy_coef_delta entropy_coef_max entropy_coef_min entropy_target epsilon epsilon_high
    generation_batch_size generation_kwargs importance_sampling_level log_completions log_completions_hub_repo
    log_multimodal log_unique_prompts loss_type mask_truncated_completions max_completion_length max_prompt_length
    max_tool_calling_iterations min_p model_init_kwargs multi_objective_aggregation num_completions_to_print num_generations
    num_generations_eval num_iterations off_policy_mask_threshold pad_to_multiple_of ref_model_mixup_alpha
    ref_model_sync_steps repetition_penalty reward_weights router_aux_loss_coef sapo_temperature_neg sapo_temperature_pos
    scale_rewards shuffle_dataset steps_per_generation sync_ref_model temperature token_entropy_percentile_threshold
    top_entropy_quantile top_k top_p transformers_continuous_batching_config trust_remote_code use_adaptive_entropy
    use_bias_correction_kl use_liger_loss use_transformers_continuous_batching use_transformers_paged use_vllm vespo_k_neg
    vespo_k_pos vespo_lambda_neg vespo_lambda_pos vllm_device vllm_dtype vllm_enable_prefix_caching vllm_enable_sleep_mode
    vllm_gpu_memory_utilization vllm_group_port vllm_guided_decoding_regex vllm_importance_sampling_cap
    vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min vllm_importance_sampling_correction
    vllm_importance_sampling_mode vllm_max_model_len vllm_max_model_length vllm_mode vllm_model_impl vllm_server_base_url
    vllm_server_host vllm_server_port vllm_server_timeout vllm_structured_outputs_regex vllm_tensor_parallel_size
    wandb_log_unique_prompts
    """,
    "KTOConfig": """
    activation_offloading base_model_attribute_name beta dataset_num_proc desirable_weight disable_dropout
    generate_during_eval is_encoder_decoder label_pad_token_id loss_type max_completion_length max_density_ratio max_length
    max_prompt_length min_density_ratio model_init_kwargs pad_to_multiple_of padding_value precompute_ref_batch_size
    precompute_ref_log_probs prompt_sample_size ref_model_init_kwargs ref_model_mixup_alpha ref_model_sync_steps
    router_aux_loss_coef sync_ref_model truncation_mode trust_remote_code undesirable_weight use_liger_loss
    """,
    "ModelConfig": """
    attn_implementation bnb_4bit_quant_storage bnb_4bit_quant_type dtype load_in_4bit load_in_8bit lora_alpha lora_dropout
    lora_modules_to_save lora_r lora_target_modules lora_target_parameters lora_task_type model_name_or_path model_revision
    torch_dtype trust_remote_code use_bnb_nested_quant use_dora use_peft use_rslora
    """,
    "OnlineDPOConfig": """
    beta cache_implementation dataset_num_proc disable_dropout ds3_gather_for_generation exp_name force_use_ref_model
    generate_during_eval generation_kwargs gpu_memory_utilization is_encoder_decoder judge label_pad_token_id
    label_smoothing loss_type max_length max_new_tokens max_prompt_length max_target_length min_p missing_eos_penalty
    model_adapter_name model_init_kwargs num_epochs num_generation_per_prompt num_ppo_epochs padding_value
    precompute_ref_log_probs ref_adapter_name ref_model_init_kwargs ref_model_mixup_alpha ref_model_sync_steps
    reference_free repetition_penalty reward_model_path reward_weights rpo_alpha sync_ref_model temperature top_k top_p
    truncation_mode trust_remote_code use_transformers_paged use_vllm vllm_enable_sleep_mode vllm_gpu_memory_utilization
    vllm_group_port vllm_guided_decoding_regex vllm_mode vllm_model_impl vllm_server_base_url vllm_server_host
    vllm_server_port vllm_server_timeout vllm_structured_outputs_regex vllm_tensor_parallel_size
    """,
    "ORPOConfig": """
    beta dataset_num_proc disable_dropout generate_during_eval is_encoder_decoder label_pad_token_id max_completion_length
    max_length max_prompt_length model_init_kwargs padding_value truncation_mode trust_remote_code
    """,
    "PPOConfig": """
    accelerator_kwargs adap_kl_ctrl backward_batch_size batch_size cliprange cliprange_value compare_steps dataset_num_proc
    ds3_gather_for_generation early_stopping exp_name forward_batch_size gamma global_backward_batch_size global_batch_size
    horizon init_kl_coef is_encoder_decoder is_peft_model kl_coef kl_estimator kl_penalty lam local_batch_size
    local_mini_batch_size local_rollout_forward_batch_size log_with log_with_wandb micro_batch_size mini_batch_size
    missing_eos_penalty model_adapter_name model_name num_mini_batches num_ppo_epochs num_sample_generations
    num_total_batches optimize_cuda_cache optimize_device_cache ppo_epochs project_kwargs push_to_hub_if_best_kwargs
    query_dataset ratio_threshold ref_adapter_name response_length reward_model reward_model_path score_clip sft_model_path
    steps stop_token stop_token_id target target_kl task_name temperature total_episodes tracker_kwargs tracker_project_name
    use_score_norm use_score_scaling vf_coef wandb_project whiten_rewards world_size
    """,
    "PRMConfig": """
    dataset_num_proc disable_dropout max_completion_length max_length max_prompt_length step_separator
    train_on_last_step_only
    """,
    "RewardConfig": """
    activation_offloading center_rewards_coefficient chat_template_path dataset_num_proc disable_dropout eos_token
    max_length model_init_kwargs pad_to_multiple_of pad_token trust_remote_code
    """,
    "RLOOConfig": """
    base_model beta cache_implementation chat_template_kwargs cliprange cliprange_value dataset_num_proc disable_dropout
    ds3_gather_for_generation epsilon epsilon_high exp_name gamma generation_batch_size generation_kwargs kl_coef lam
    local_rollout_forward_batch_size log_completions log_multimodal log_unique_prompts mask_truncated_completions
    max_completion_length max_prompt_length min_p missing_eos_penalty model_init_kwargs non_eos_penalty normalize_advantage
    normalize_advantages normalize_reward num_completions_to_print num_generations num_generations_eval num_iterations
    num_mini_batches num_ppo_epochs num_sample_generations pad_to_multiple_of penalty_reward_value ref_model_mixup_alpha
    ref_model_sync_steps repetition_penalty response_length reward_clip_range reward_model_path reward_weights rloo_k
    router_aux_loss_coef sanity_check sft_model_path shuffle_dataset steps_per_generation stop_token stop_token_id
    sync_ref_model temperature token_level_kl top_k top_p total_episodes transformers_continuous_batching_config
    truncate_token truncate_token_id trust_remote_code use_transformers_continuous_batching use_transformers_paged use_vllm
    vf_coef vllm_enable_sleep_mode vllm_gpu_memory_utilization vllm_group_port vllm_guided_decoding_regex
    vllm_max_model_length vllm_mode vllm_model_impl vllm_server_base_url vllm_server_host vllm_server_port
    vllm_server_timeout vllm_structured_outputs_regex vllm_tensor_parallel_size wandb_log_unique_prompts whiten_rewards
    """,
    "SFTConfig": """
    activation_offloading assistant_only_loss chars_per_token chat_template_path completion_only_loss dataset_batch_size
    dataset_kwargs dataset_num_proc dataset_text_field eos_token eval_packing loss_type max_length max_seq_length
    model_init_kwargs num_of_sequences packing packing_strategy pad_to_multiple_of pad_token padding_free
    router_aux_loss_coef shuffle_dataset truncation_mode trust_remote_code use_liger
    """,
}

_OF_ADAPTERS = """
    alora_invocation_tokens alpha_pattern arrow_config bias corda_config enable_lora ensure_weight_tying eva_config
    exclude_modules fan_in_fan_out init_lora_weights kasa_config layer_replication layers_pattern layers_to_transform
    loftq_config lora_alpha lora_bias lora_dropout lora_ga_config megatron_config megatron_core merge_weights
    modules_to_save monteclora_config qalora_group_size r rank_pattern runtime_config target_modules target_parameters
    trainable_token_indices use_bdlora use_dora use_qalora use_rslora velora_config
"""


def _one_of(names: str) -> str:
    return f"(?-i:{'|'.join(map(re.escape, names.split()))})"


OF_ANOTHER_VERSION = "|".join(
    [
        *(
            rf"\b{owner}\.__init__\(\) got an unexpected keyword argument '{_one_of(own + _TRAINING)}'"
            for owner, own in _OWN.items()
        ),
        rf"\b(?:Seq2Seq)?TrainingArguments\.__init__\(\) got an unexpected keyword argument '{_one_of(_TRAINING)}'",
        rf"\bLoraConfig\.__init__\(\) got an unexpected keyword argument '{_one_of(_OF_ADAPTERS)}'",
        r"\A(?:[\w.]+\.)?TypeError: Unexpected keyword argument '(?:guided_decoding|structured_outputs|best_of|use_beam_search)'",
    ]
)
"""What Python says of such a name. One of another class's is no matter of versions, as `num_generations` of an SFTConfig."""
