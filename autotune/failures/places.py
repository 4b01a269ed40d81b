"""Which functions of which libraries mean what: rows for `file:function statement`, read by frames.py.

WITHIN       what happens anywhere behind such a place is for one thing, whatever is called there
CAUSES       otherwise the innermost place that says something decides
IN_GENERAL   and where none does, the innermost of these: what code of that kind usually needs memory for
"""

from __future__ import annotations

from autotune.measurement import Phase

_LOGITS = (
    r"(?<!\w)(?!\w*(?:router|gat(?:e|ing)|expert|attn|attention|mask)\w*logits|\w*logits_to_keep|num_logits)"
    r"\w*logits\w*(?:[\"']\])?(?:\[[^=]{0,80}?\])*"
)
"""A name with that word, or a part of what it holds; routers and masks call other numbers so too."""

_LOGITS_MADE = (
    rf"{_LOGITS}\.(?:float|to|div_?|exp|sum|clone|contiguous|(?:log_)?softmax|sort|type|half|double|masked_fill_?|detach|cpu|cuda"
    r"|logsumexp|gather|type_as|bfloat16)\("
    rf"|{_LOGITS} (?:[-+*/]?=) (?!.*\b(?:model|net|network|policy|actor|llm|module|engine|encoder|decoder|forward)\w*\()"
    r"|\b(?:cat|stack|softmax|log_softmax|gather|sort|topk|where|nan_to_num|logsumexp|kl_div|tanh|all_gather\w*"
    rf"|(?:zeros|empty|full|ones)_like)\([\[(]*{_LOGITS}"
)

_PACKAGE = r"/(?:vllm|sglang|lmdeploy)/"

WAKES_CACHE = r"(?:wake_up|resume\w*|onload\w*)\(.{0,80}(?:kv_?cache|KV_CACHE)"
"""What an engine that wakes up asks for is its cache, by the words of the statement."""

WITHIN: tuple[tuple[str, str], ...] = (
    # An engine that wakes up says which part of its memory it asks for.
    (rf"{WAKES_CACHE}|:onload_kv\w*", "kv_cache"),
    (
        (
            r":(?:_?profile_run|profile_\w*memory|determine_(?:num_)?available_\w+|_?dummy_\w*run|capture_model|compile_or_warm_up_model"
            r"|_?warm_?up_model|_capture_cudagraphs?|capture_one_batch_size|init_(?:device|cuda|piecewise_cuda)_graphs?"
            r"|_dummy_pooler_run\w*|_dummy_sampler_run|kernel_warmup|warmup_kernels|_kernel_warmup|_run_warmup|profile_max_num_token)\b"
        ),
        "engine_startup",
    ),
    (rf"{_PACKAGE}\S*cuda_?graph\w*\.py", "engine_startup"),
    (
        (
            r":_?load_\w*optim\w*|:_?load_zero_checkpoint|:_?onload_\w*optim\w*|:reload_optim\w*|:_?set_optimizer_state_dict"
            r"|:(?:sharded_|full_|shard_full_|rekey_|scatter_full_)?optim_state_dict\w*|\boptim\w*\.load_state_dict\(|OPTIMIZER_NAME"
            r"|/optim\w*\.py:load_state_dict|load\(.{0,80}(?:optimi[sz]er|optim)[\w.-]*\.(?:pt|bin|pth)"
        ),
        "optimizer",
    ),
    (
        (
            r":(?:from_pretrained|_load_pretrained_model|_load_state_dict_into_\w+|load_checkpoint_in_model|load_checkpoint_and_dispatch"
            r"|set_module_tensor_to_device|dispatch_model|caching_allocator_warmup|resize_token_embeddings|_fast_init|_initialize_weights"
            r"|fsdp2_load_full_state_dict|set_model_state_dict|set_peft_model_state_dict|load_peft_weights|_?load_adapter"
            r"|from_config|_from_config|deepcopy|_init_weights|initialize_weights|convert_and_load_state_dict_in_model|load_model_and_tokenizer)\b"
        ),
        "weights",
    ),
    (rf"{_PACKAGE}\S*:(?:load_model|process_weights_after_loading|initialize_model|_initialize_model)\b", "weights"),
)

HANDS_OVER = (
    r"_move_\w*model_to_vllm|sync_weights|sync_\w*weights\w*|broadcast_to_\w*(?:vllm|engine|inference)|:_?update_named_param"
    r"|:_?update_(?:\w+_)?weights?\w*\b|/sharding_manager/|:update_params_|:update_parameter\w*_in_bucket|:_?load_lora_from_\w*"
    r"|:rollout_mode|:_move_adapter_to_\w*|:update_adapter\w*|:refit\w*|:prepare_refit\w*|:_?broadcast_(?:weights?|param|bucket|to)\w*"
    r"|:reload_weights|/weight_sync/|/weight_update\w*/|:add_lora_from_tensor\w*|:push_weights\w*|:stream_weights\w*|:_?collective_rpc_weights"
)
"""Weights that are made ready for the engine's sake: what helps is what makes the handing over smaller."""

SAVES = r":_?save_\w+|:save\b|state_dict\b|:consolidate\w*|:get_fsdp_\w+"
"""Where weights are gathered to be written."""

CAUSES: tuple[tuple[str, str], ...] = (
    (
        r"allocate_kv_cache|initialize_(?:kv_)?cache|initialize_from_config|/cache_utils\.py|/(?:cache_engine|kv_cache\w*)\.py",
        "kv_cache",
    ),
    (r":_?(?:allocate|init)_kv_\w+|init_memory_pool|/memory_pool\w*\.py|/mem_cache/|:_?reorder_cache|:_setup_cache", "kv_cache"),
    (r"\bcat\([\[(].{0,40}\b(?:past|layer_past|cache)\w*|\bpast_key_values?\.update\(|\bpaged_attention\w* = ", "kv_cache"),
    (r"_all_gather|:_?all_gather_\w+|all_gather_params|gather_deepspeed3_params|GatheredParameters", "zero_gather"),
    (
        r"unwrap_model_for_generation|:fetch_sub_module|:summon_full_params|:_?zero3_consolidated_\w+|:save_16bit_model",
        "zero_gather",
    ),
    (r"/fsdp/_(?:flat_param|runtime_utils|unshard_utils)\.py:_?(?:unshard|pre_unshard|alloc\w*|\w*gather\w*)", "zero_gather"),
    (r"/fsdp/_state_dict_utils\.py:|:_unshard_fsdp_state_params|:_?get_(?:full_|model_)?state_dict\b", "zero_gather"),
    (
        (
            r"/_?fully_shard/\w+\.py:(?:unshard|wait_for_unshard|init_all_gather\w*|init_unsharded_param|alloc_all_gather\w*"
            r"|foreach_all_gather\w*|all_gather_copy_in\w*|split_with_sizes_copy)|/_composable/fsdp/\w+\.py:\w*(?:unshard|all_gather)\w*"
        ),
        "zero_gather",
    ),
    (r":_?gather_(?:full_)?state_dict\w*|:_gather_state_dict|:_offload_state_dict_to_cpu|:_iterate_state_dict", "zero_gather"),
    (r"model_loader/|create_weights|from_pretrained|_load_pretrained_model|caching_allocator_warmup", "weights"),
    (r"/bitsandbytes/(?:functional\.py:quantize\w*|nn/modules\.py:_quantize)", "weights"),
    (r":_zero_init_param|partition_parameters\.py:(?:partition|_partition\w*|_convert_to_\w+|wrapper)\b", "weights"),
    (r":flat_param_to|:load_\w*model\w*_to_gpu|:reload_model|:onload_\w*(?:model|param|weight)\w*", "weights"),
    (r":prepare_model_for_kbit_training|:prepare_model_for_training|:merge_and_unload|:unload_and_optionally_merge", "weights"),
    (
        (
            r"/fsdp/(?:fully_sharded_data_parallel\.py:__init__|_init_utils\.py:|wrap\.py:|_flat_param\.py:(?:flatten_tensors\w*|shard|_?init\w*))"
            r"|/_?fully_shard/\w+\.py:(?:_init_sharded_param|_move_states_to_device|fully_shard|to_empty)"
        ),
        "weights",
    ),
    (
        r"nn/parallel/distributed\.py:__init__|:fsdp2_prepare_model|:get_peft_model|:inject_adapter|:_create_and_replace",
        "weights",
    ),
    (
        r"nn/modules/module\.py:(?:to|cuda|convert|_apply|to_empty|half|float|bfloat16)\b|modeling_utils\.py:(?:to|cuda)\b",
        "weights",
    ),
    (r":create_reference_model|:prepare_(?:deepspeed|fsdp)\b|/copy\.py:deepcopy|nn/parameter\.py:__deepcopy__", "weights"),
    (
        r"_move_\w*model_to_vllm|sync_weights|merge_adapter|update_named_param|wake_up|:full_tensor\b|\b_?resume_memory_occ\w*",
        "weight_sync",
    ),
    (
        r"broadcast_to_\w*vllm|:update_weights?\b|:reload_weights|sharding_manager|:rollout_mode|:update_weights?_from\w*",
        "weight_sync",
    ),
    (r"fixed_cross_entropy|selective_log_softmax|log_softmax|lm_head|ForCausalLMLoss|logprob|cross_entropy", "logits"),
    (
        r"entropy_from_logits|compute_entropy|log_probs_from|fused_linear|chunked_entropy|:entropy\w*|:compute_logits|:_?get_logits",
        "logits",
    ),
    (
        r":_?(?:get_)?(?:batch|seq|token|per_token)_logps?\b|:gather_log_prob\w*|:\w*liger_\w*loss\w*|/chunked_loss/|output_layer\(",
        "logits",
    ),
    (r":grpo_(?:compute|accumulated)_loss\b|:UnslothEfficientGRPO\b|:LigerFused\w+|:\w*vocab_parallel\w*|:kl_div\b", "logits"),
    # What a model returns under mixed precision is made float32 by accelerate: its logits.
    (r"accelerate/utils/operations\.py:_?(?:convert_to_fp32|_convert_to_fp32)", "logits"),
    (_LOGITS_MADE, "logits"),
    # What an evaluation keeps of each batch are its predictions, and those are logits.
    (
        r":(?:nested_concat|torch_pad_and_concatenate|nested_gather|pad_across_processes|gather_for_metrics|nested_numpify)\b",
        "logits",
    ),
    (r":evaluation_loop .*(?:logits|preds|all_gather|gather|nested)|:prediction_step .*logits", "logits"),
    (r"/optim(?:izer)?/|torch/optim|bitsandbytes/optim|:_?init\w*_optimizer_states|/distrib_optimizer\.py", "optimizer"),
    (
        r"deepspeed/runtime/zero/stage.*:(?:step|__init__|_create_fp32\w*|_optimizer_step)|:_configure_(?:\w+_)?optimizer",
        "optimizer",
    ),
    (
        r"deepspeed/ops/(?:adam|adagrad|lamb|lion|muon)/|/(?:bf16|fp16|fused|unfused|mixed_precision)\w*_optimizer\.py:",
        "optimizer",
    ),
    (
        (
            r"/apex/optimizers/|/torchao/optim/|/megatron/core/optimizer/|/(?:galore_torch|schedulefree|lomo_optim|heavyball)/"
            r"|/(?:adamw?|lion|muon|sophia|adafactor|shampoo|soap|lamb|adalomo|came|dion)\w*\.py:(?:step|_?init\w*|_?update\w*)"
            r"|transformers/optimization\.py:step|/multi_tensor_apply/"
        ),
        "optimizer",
    ),
    (r"profile_run|determine_available_memory|_dummy_\w*run|capture_model|warm_?up_model|cuda_?graph\w*\.py", "engine_startup"),
    (
        r"/models/\w+/modeling_\w+\.py:(?!__init__|from_|_init_)|torch/utils/checkpoint\.py|unsloth_zoo/gradient_checkpointing\.py",
        "activations",
    ),
    (r"_get_per_token_logps", "logits"),
)

IN_GENERAL: tuple[tuple[str, str], ...] = (
    (r"torch/nn/modules/(?!module\.py)\w+\.py:|torch/nn/functional\.py:|:\w*forward\b", "activations"),
    (
        r"/(?:flash_attn|xformers|unsloth|liger_kernel|transformer_engine|timm|diffusers)/|/peft/tuners/\S*:(?!merge|update|inject)",
        "activations",
    ),
    (
        r"/megatron/core/(?:transformer|tensor_parallel|models|pipeline_parallel|fusions|ssm)/|/transformers/integrations/",
        "activations",
    ),
    (r"/peft/tuners/\S*:(?:merge|update_layer|inject)\w*|\bmerge_and_unload\(|\.merge_adapter\(", "weights"),
    (r"\b(?:optimizer|optim|opt)\.step\(", "optimizer"),
    (r"torch/serialization\.py:|safetensors/torch\.py:|/safetensors/|:load_state_dict\b|\.load_state_dict\(", "weights"),
    (r" \w*model\w* = .*\.(?:to|cuda)\(|\bmodel\w*\.(?:to|cuda|half|float|bfloat16)\(", "weights"),
)

PHASES: tuple[tuple[str, Phase], ...] = (
    (r"_move_\w*model_to_vllm|sync_weights|wake_up|update_named_param|merge_adapter", "sync"),
    (r"broadcast_to_\w*vllm|:update_weights?\b|:rollout_mode|:reload_weights|:update_weights?_from\w*", "sync"),
    (r"/sharding_manager/\S*:(?:__enter__|update_params)\b", "sync"),
    # A function of the user's own is applied in the forward pass, through a file of autograd's.
    (
        (
            r"torch/autograd/(?!function\.py:apply\b|grad_mode)|accelerator\.py:backward|_tensor\.py:backward|engine\.py:backward"
            r"|:backward\b|loss\w*\.backward\("
        ),
        "backward",
    ),
    (
        (
            r"torch/optim/\S*:(?!load_state_dict|__init__)|bitsandbytes/optim|/optimizer\.py:step|deepspeed/runtime/zero/stage\w*\.py:step"
            r"|:_?init\w*_optimizer_states|/apex/optimizers/\S*:step|/torchao/optim/|\b(?:optimizer|optim|opt)\.step\("
        ),
        "optimizer",
    ),
    (r":load_(?:fsdp|megatron)_optimizer", "optimizer"),
    (r":_calculate_rewards", "reward"),
    (
        (
            r":_generate_single_turn|/model_executor/layers/sampler\.py|/v1/sample/|/generation/utils\.py|vllm_generation\.py:generate|/llm\.py:generate|:generate_sequences"
            r"|:paged_generate|:_generate_(?:vllm|transformers|paged|completions?)\b|:batch_generation|:generate_rollouts?"
        ),
        "rollout",
    ),
    (r":_generate_and_score_completions|:compute_log_prob|:compute_ref_log_prob|:forward_only|:make_experience\w*", "score"),
    (r":_?compute_loss|:training_step\w*|:update_actor|:update_policy|:ppo_train|:policy_train", "forward"),
    (
        (
            r"from_pretrained|model_loader/|:load_model|_initialize_kv_caches|determine_available_memory|profile_run|capture_model"
            r"|warm_?up_model|/cuda_graph\w*\.py:|:_prepare_deepspeed|:_zero_init_param|:initialize_from_config"
            r"|(?:llm|core|trainer|vllm_generation)\.py:__init__|:init_model|:_load_optimizer_and_scheduler|:load_checkpoint"
            r"|:_load_from_checkpoint|:load_state\b|:prepare_model\b|:_prepare_fsdp2?\b|:_configure_\w*optimizer|:_create_fp32_partitions"
        ),
        "load",
    ),
)

LATEST: tuple[tuple[str, Phase], ...] = (
    (r":execute_model|/core\.py:(?:step|run_busy_loop)|:unwrap_model_for_generation", "rollout"),
    (r"nn/modules/module\.py:(?:to|cuda|convert)\b|modeling_utils\.py:(?:to|cuda)\b", "load"),
    (r"/nn/parallel/(?:data_parallel|parallel_apply)\.py:", "forward"),
)
"""Where nothing else tells: models are moved between steps too, and a replica does not know who called it."""

LAST: tuple[tuple[str, Phase], ...] = ((r"torch/nn/modules/(?!module\.py)\w+\.py:forward|:forward\b", "forward"),)
"""A model that is asked for its answer, outside of any trainer, generator or evaluation that is known."""

EVALUATES = r":evaluation_loop|:prediction_step|:evaluate\b|:predict\b|:prediction_loop|:_?validate\b"
