"""Texts of failures that are not about memory. Part of the table of failures, read behind the rows of memory."""

from __future__ import annotations

from autotune.failures.table import Row

_REFUSAL = (
    r"\A(?:[\w.]+\.)?(?:ValueError|TypeError|AssertionError|NotImplementedError|RuntimeError|FileNotFoundError"
    r"|\w*(?:JSON|YAML|TOML)\w*Error)"
    r"\b"
)
"""How code says that it does not take what it was given: words that any failure may have, so that the place must tell."""

_OF_SETTINGS = (
    r"(?:training_args\w*|\w+_config|configuration_\w+|arg_utils|hf_argparser|argparse|parser|arguments?|rlhf_args|config_utils"
    r"|_argparse|hf_deepspeed|integrations/deepspeed)\.py:"
    r"|/(?:vllm|peft|verl|swift|openrlhf|accelerate|deepspeed)/(?:[\w/]+/)?(?:config|configs|arguments|dataclasses)(?:/\w+)?\.py:"
    r"|:(?:__post_init__|_?validate\w*|_?verify\w*|_?check_\w+|_?sanity_check\w*|trainer_config_process|inject_adapter"
    r"|merge_and_unload|_batch_assertion|deepspeed_init|get_peft_model|update_layer)\b"
    r"|/(?:trl/trainer|trl/experimental/\w+|transformers)/\w*trainer\.py:__init__"
)

_WORDS_OF_REFUSAL = (
    r"\bis not (?:a valid|supported|allowed|implemented)\b|\bmust (?:be|match|not|have)\b|\bshould (?:be|not|match)\b"
    r"|\b(?:unknown|unsupported|unrecogni[sz]ed|invalid|no valid)\b|\b(?:select|choose) (?:one|from)\b|\bexpected one of\b"
    r"|\b(?:in|not )compatible with\b|\bcan ?not be (?:used|set|combined|both)\b|\bcan't be (?:used|set|combined)\b"
    r"|\bmutually exclusive\b|\b(?:is|are) required\b|\byou (?:must|can ?not|can't|need to|have to|should|have set|didn't)\b"
    r"|\bplease (?:set|specify|select|choose|provide|use|pass)\b|\bdoes(?: not|n't) support\b|\bonly supports?\b"
)

_OF_FRAMEWORKS = (
    r"(?:site|dist)-packages/(?:trl|transformers|peft|accelerate|deepspeed|vllm|verl|openrlhf|swift|unsloth\w*|bitsandbytes|torch"
    r"|torchao|liger_kernel|ray|sglang)/"
)

_REFUSED = (
    Row(
        name="trl_divisible",
        pattern=r"must be (?:evenly )?divisible by|must divide world size|requires at least 2 generations"
        r"|can ?not be both configured|is not supported by GRPO",
        kind="illegal",
        cause="illegal_config",
    ),
    Row(
        name="length_refused",
        pattern=r"max_token_len must be greater than the sequence length"
        r"|This model's maximum context length is (?P<length>\d+) tokens"
        r"|max_model_len \((?P<wanted>\d+)\) is greater than the derived max_model_len \(\w+=(?P<length2>\d+)"
        r"|greater than the derived max_model_len|is too long to fit into the model|longer than the maximum model length of"
        r"|leaves no room to generate",
        kind="illegal",
        cause="illegal_config",
    ),
    Row(
        name="unexpected_argument_within",
        pattern=r"TypeError: (?!\w*(?:Config|Arguments)\.__init__).{0,200}got an unexpected keyword argument",
        places=r"(?:site|dist)-packages/",
        innermost=1,
        kind="other",
        cause="version",
    ),
    Row(
        name="arguments_refused",
        pattern=r"(?m:^[\w./-]+: error: (?:unrecognized arguments|argument |the following arguments are required|ambiguous option"
        r"|expected ))|Some specified arguments are not used by|Some keys are not used by the HfArgumentParser"
        r"|Could not override '|is not in struct|\bConfigAttributeError\b|\bConfigKeyError\b|\bhydra\.errors\."
        r"|MissingMandatoryValue|Error parsing override '|Error in call to target '[\w.]*config"
        r"|\bDeepSpeedConfigError\b",
        kind="illegal",
        cause="illegal_config",
        said="anywhere",
    ),
    Row(
        name="setting_refused",
        pattern=r"validation errors? for \w+|unexpected keyword argument|Your setup doesn't support bf16"
        r"|requires n_samples_per_prompt > 1|element 0 of tensors does not require grad|Head size \d+ is not supported"
        r"|unsupported head.?size|does not have a padding token|chat_template is not set|no chat template"
        r"|Repo id must |is not a local folder and is not a valid model identifier"
        r"|is not the path to a directory containing an? |does not appear to have a file named"
        r"|no file named .{1,120} found in directory|Error\(s\) in loading state_dict|invalid device ordinal"
        r"|Duplicate GPU detected|larger than the number of available GPUs|Attempting to unscale FP16 gradients"
        r"|Expected to mark a variable ready only once|Expected to have finished reduction in the prior iteration"
        r"|Unable to find a usable engine|only supported on (?:GPUs|Ampere)|only supports Ampere GPUs"
        r"|Default process group has not been initialized|\bNotImplementedError: Cannot copy out of meta tensor"
        r"|Cannot merge LORA layers|cannot perform fine-tuning on purely quantized|Target modules? .{0,300}not found"
        r"|You can't train a model that has been loaded|DistributedDataParallel is not needed when a module",
        kind="illegal",
        cause="illegal_config",
    ),
)

_MISSING = (
    Row(
        name="numeric",
        pattern=r"probability tensor contains either `inf`, `nan` or element < 0|\bFloatingPointError\b"
        r"|returned nan values in its \d+\w\w output|scale already at minimum|\bloss is (?:nan|NaN|inf)\b",
        kind="other",
        cause="numeric",
    ),
    Row(
        name="disk",
        pattern=r"No space left on device|Read-only file system|Permission denied|Disk quota exceeded"
        r"|Too many open files|\bFileExistsError\b"
        r"|\b(?:NotADirectory|IsADirectory|Permission)Error\b"
        r"|inline_container\.cc:\d+\] \. unexpected pos|Stale file handle|Input/output error|database or disk is full"
        r"|\bOutOfDiskError\b|\(os error (?:13|28|30|122)\)|unable to open database file|attempt to write a readonly database",
        kind="other",
        cause="disk_or_permission",
    ),
    Row(
        name="network",
        pattern=r"couldn't connect to|Max retries exceeded|LocalEntryNotFoundError|OfflineModeIsEnabled"
        r"|Temporary failure in name resolution|outgoing traffic has been disabled|Name or service not known"
        r"|(?:requests|httpx|httpcore|aiohttp|urllib3|urllib)(?:\.\w+)*\.\w*(?:Error|Timeout|Exception)\b|\bHfHubHTTPError\b"
        r"|\bGatedRepoError\b|\bRepositoryNotFoundError\b|\bRevisionNotFoundError\b|Couldn't reach .{1,200} on the Hub"
        r"|wandb\.(?:errors\.)?(?:\w+\.)?(?:CommError|UsageError|AuthenticationError)|\bgaierror\b|offline mode is enabled"
        r"|\bcheck your (?:internet|network) connection|You are trying to access a gated repo",
        kind="other",
        cause="network",
    ),
    Row(
        name="rendezvous",
        pattern=r"EADDRINUSE|address already in use|Timed out after \d+ seconds waiting for clients|\bRendezvous\w*Error\b"
        r"|client socket has (?:failed to connect|timed out)|The client socket has|current node timed out during startup"
        r"|failed to connect to any network address|Could not connect to (?:the )?(?:Ray|GCS)|Failed to connect to GCS",
        kind="other",
        cause="hang_or_nccl",
    ),
    Row(
        name="version",
        pattern=r"\bModuleNotFoundError\b|\bImportError\b|undefined symbol|no kernel image is available|PackageNotFoundError"
        r"|\bVersionConflict\b|module '[\w.]+' has no attribute|operator torchvision::nms does not exist"
        r"|is required for a normal functioning of this module|Torch not compiled with CUDA enabled|Found no NVIDIA driver"
        r"|No CUDA GPUs are available|driver on your system is too old|driver version is insufficient"
        r"|may indicate binary incompat"
        r"|version `?GLIBC\w*_[\d.]+'? not found|does not recognize this architecture|architectures .{0,200}not supported for now"
        r"|(?:needs?|requires?) .{1,80} to be installed|[Pp]lease install |(?:need to|must) install "
        r"|\bpip install\b|n't have \w+ built in"
        r"|(?:not|n't) (?:been )?(?:compiled|built) with|built without|\bneed a GPU\b"
        r"|cannot find any torch accelerator|no GPUs? found|found no CUDA devices"
        r"|Failed to infer device type|cannot open shared object file|CXXABI_[\d.]+|Using .{1,60} requires .{1,60}: `?pip install"
        r"|is a required dependency|No package metadata was found|Failed to import [\w.]+ because of the following error"
        r"|Could not import module '",
        kind="other",
        cause="version",
    ),
    Row(
        name="data",
        pattern=r"DatasetGenerationError|Couldn't find any data file|doesn't contain any data files|KeyError: 'prompt'"
        r"|Column .{1,60} not in the dataset|Couldn't find a dataset script|\bDatasetNotFoundError\b|\bDataFilesNotFoundError\b"
        r"|\bArrowInvalid\b|jinja2\.exceptions\.TemplateError|\bCastError\b|index out of range in self|Unable to find '"
        r"|\bSafetensorError\b|PytorchStreamReader failed|Unknown split|num_samples=0|Cannot find valid samples"
        r"|stack expects each tensor to be equal size|Can't instantiate a processor, a tokenizer"
        r"|\bEmptyDatasetError\b|\bNonMatchingSplitsSizesError\b|\bUnexpectedSplitsError\b",
        kind="other",
        cause="data",
    ),
    Row(
        name="data_where_it_is_read",
        pattern=r"\A(?!(?:[\w.]+\.)?(?:KeyboardInterrupt|SystemExit|RayTaskError)|.{0,80}abruptly died)\w",
        places=r"(?:site|dist)-packages/(?:datasets|pyarrow|pandas)/|:(?:_prepare_dataset|is_conversational|maybe_apply_chat_template"
        r"|apply_chat_template|maybe_extract_prompt|tokenize_fn|extract_prompt|_tokenize_prompts|_set_signature_columns_if_needed"
        r"|_tokenize|tokenize_row|prepare_dataset|load_dataset)\b",
        innermost=5,
        kind="other",
        cause="data",
    ),
    Row(
        name="refused_where_settings_are_read",
        pattern=_REFUSAL,
        places=_OF_SETTINGS,
        innermost=6,
        kind="illegal",
        cause="illegal_config",
    ),
    Row(
        name="refused_by_a_framework",
        pattern=rf"\A(?:[\w.]+\.)?(?:ValueError|AssertionError|NotImplementedError): .{{0,2000}}?(?:{_WORDS_OF_REFUSAL})",
        places=_OF_FRAMEWORKS,
        innermost=1,
        kind="illegal",
        cause="illegal_config",
    ),
)

_BROKEN = (
    # What the driver writes into the kernel's log.
    Row(
        name="xid",
        pattern=r"\bNVRM: Xid\b|GPU has fallen off the bus|\bGPU is lost\b",
        kind="other",
        cause="cuda_fault",
        said="anywhere",
    ),
    Row(
        name="cuda_fault",
        pattern=r"illegal memory access|device-side assert|unspecified launch failure|uncorrectable ECC|misaligned address"
        r"|CUDA error: (?!out of memory)|CUBLAS_STATUS_(?!ALLOC_FAILED)\w+"
        r"|\bCUDNN_STATUS_\w+|Triton Error \[CUDA\]: (?!out of memory)|an illegal instruction was encountered"
        r"|hardware stack error",
        kind="other",
        cause="cuda_fault",
        said="as an error",
    ),
)

# What the others say when one is gone: last, so that the root is found before them.
_ECHOES = (
    Row(
        name="peer_gone",
        pattern=r"Connection closed by peer|Connection reset by peer|Broken pipe|Socket Timeout"
        r"|remote process exited or there was a network error|subprocesses has abruptly died",
        kind="other",
        cause="hang_or_nccl",
        secondary=True,
        said="as an error",
    ),
    Row(
        name="collective_timeout",
        pattern=r"Watchdog caught collective operation timeout(?:.{0,200}?Timeout\(ms\)=(?P<milliseconds>\d+))?"
        r"|Timed out waiting (?P<milliseconds2>\d+)ms for (?:send|recv) operation|NCCL error|wait timeout after \d+ms"
        r"|failed to pass monitoredBarrier",
        kind="other",
        cause="hang_or_nccl",
        secondary=True,
        said="as an error",
    ),
    Row(
        name="engine_wrapper",
        pattern=r"Engine core initialization failed|EngineCore failed to start|EngineDeadError|EngineCore encountered an issue"
        r"|WorkerProc initialization failed|Engine process failed to start",
        kind="other",
        secondary=True,
        said="as an error",
    ),
)

ROWS_OF_OTHERS: tuple[Row, ...] = (*_REFUSED, *_MISSING, *_BROKEN, *_ECHOES)
