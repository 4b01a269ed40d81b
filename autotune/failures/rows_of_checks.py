"""Failures whose words are nobody's in particular, known by where they were raised. Read behind all that is known by words.

A program that meets what it cannot work with says so with `raise` or `assert` in its own code, in words that change from
version to version. What it did not expect fails in the middle of some other statement. So where the innermost line of a
traceback is such a statement, and stands in a framework and not in the user's own code, the framework refused what it was given.
"""

from __future__ import annotations

from autotune.failures.table import Row

_REFUSAL = (
    r"\A(?:[\w.]+\.)?(?:ValueError|TypeError|AssertionError|NotImplementedError|RuntimeError|FileNotFoundError"
    r"|\w*(?:JSON|YAML|TOML)\w*Error)"
    r"\b"
)
"""How code says that it does not take what it was given: words that any failure may have, so that the place must tell."""

_OF_SETTINGS = (
    r"(?:training_args\w*|\w+_config|configuration_\w+|arg_utils|hf_argparser|argparse|parser|arguments?|rlhf_args"
    r"|config_utils"
    r"|_argparse|hf_deepspeed|integrations/deepspeed|accelerate/utils/deepspeed)\.py:"
    r"|/(?:vllm|peft|verl|swift|openrlhf|accelerate|deepspeed)/(?:[\w/]+/)?(?:config|configs|arguments"
    r"|dataclasses)(?:/\w+)?\.py:"
    r"|(?:site|dist)-packages/\S*:(?:__post_init__|_?validate\w*|_?verify\w*|_?check_\w+|_?sanity_check\w*"
    r"|trainer_config_process|inject_adapter|merge_and_unload|_batch_assertion|deepspeed_init|get_peft_model|update_layer)\b"
    r"|/(?:trl/trainer|trl/experimental/\w+|transformers)/\w*trainer\.py:__init__|/torch/optim/\w+\.py:__init__"
)

_WORDS_OF_REFUSAL = (
    r"\bis not (?:a valid|supported|allowed|implemented)\b|\bmust (?:be|match|not|have)\b|\bshould (?:be|not|match)\b"
    r"|\b(?:unknown|unsupported|unrecogni[sz]ed|invalid|no valid)\b|\b(?:select|choose) (?:one|from)\b|\bexpected one of\b"
    r"|\b(?:in|not )compatible with\b|\bcan ?not be (?:used|set|combined|both)\b|\bcan't be (?:used|set|combined)\b"
    r"|\bmutually exclusive\b|\b(?:is|are) required\b|\byou (?:must|can ?not|can't|need to|have to|should|have set|didn't)\b"
    r"|\bplease (?:set|specify|select|choose|provide|use|pass)\b|\bdoes(?: not|n't) support\b|\bonly supports?\b"
)

_INSTALLED = r"(?:(?:site|dist)-packages|src|trl|verl|vllm|OpenRLHF|ms-swift|DeepSpeed|accelerate|transformers|peft|unsloth\w*)/"
_NAMES = (
    r"(?:trl|transformers|peft|accelerate|deepspeed|vllm|verl|openrlhf|orz|swift|unsloth\w*|bitsandbytes|torch"
    r"|torchao|liger_kernel|ray"
    r"|sglang|flash_attn|xformers|mistral_common|megatron|fairscale|compressed_tensors|auto_gptq|gptqmodel|awq"
    r"|optimum|lightning|hydra|omegaconf|llamafactory|axolotl)"
)
_CHECKED_OUT = (
    r"(?:verl|openrlhf|orz|swift|llamafactory|axolotl|sglang|areal|slime|nemo_rl|skyrl_train|open_instruct|unsloth_compiled_cache)/"
    r"(?!examples/|scripts/|recipe/|recipes/|tests/|my\w*/)(?:\w+/)*\w+\.py:"
)
"""Trainers that run from where they were cloned to. What is an example there, or somebody's own, is left out."""

FROM_FRAMEWORKS = rf"/(?:{_INSTALLED}{_NAMES}/|{_CHECKED_OUT})"

_THROWN_THERE = r"\S* (?:(?-i:raise (?:\w+\.)*[A-Z])|assert\b)|.*(?:❱|->) +\d+ +(?:(?-i:raise (?:\w+\.)*[A-Z])|assert\b)"
"""The line that failed does nothing but refuse; what is raised a second time, as for a loader's worker, was not refused there."""

_CHECKED = (
    rf"{FROM_FRAMEWORKS}(?!torch/(?:_utils|_tensor|nn/functional|nn/modules/module)\.py:|torch/_(?:dynamo|inductor)/)"
    rf"(?!\S*:(?:_?_?(?:del|reraise)_*|_calculate_rewards)\b)(?:{_THROWN_THERE})"
)

_NOT_OF_OTHERS = (
    r"(?!.{0,4000}(?:\b(?:worker|process|proc|actor|task|job|engine|thread|child|rank|subprocess)\w* .{0,60}(?:failed"
    r"|died|exited|crashed)"
    r"|\bdied unexpectedly|see (?:the )?(?:above|earlier|previous|root|logs?)|internal error"
    r"|this is (?:likely )?a bug|should (?:never|not) happen"
    r"|unreachable|(?:open|file|raise|report) (?:an? |this )(?:issue|bug)))"
)
"""Of what befell somebody else, or of what should not have come about at all, a check tells no more than that."""

_TYPES = (
    r"(?:[\w.]+\.)?(?:ValueError|TypeError|AssertionError|NotImplementedError|RuntimeError|KeyError|OSError|FileNotFoundError"
    r"|IndexError|AttributeError|Exception|\w*(?:Argument|Config|Usage|Length|Validation)\w*Error)"
)

_SAID = rf"\A{_NOT_OF_OTHERS}{_TYPES}: \W*\S+ \S"
"""At least two words: a bare assertion says nothing."""

_OF_DATA = (
    r"(?:in|from|of|to) (?:the|your|this|an?|each) (?:\w+ )?(?:dataset|batch|example|sample|conversation)s?\b"
    r"|\b(?:dataset|example|sample|conversation)s? .{0,60}\b(?:is empty|are empty|missing|lacks?|invalid)\b"
    r"|\b(?:missing|empty|invalid|no) .{0,40}\b(?:columns?|datasets?|examples?|samples?|messages|roles?)\b"
    r"|\bdataset (?:format|type|columns?)\b|\bcolumns? (?:named|called) |\b(?:dataset|columns?) (?:must|should) have\b"
    r"|\b(?:image|video|audio) (?:tokens?|features|placeholders?)\b|\bnumber of images\b"
)

READS_DATA = (
    r"/(?:data|dataset|datasets|template|templates|preprocessor|data_processing)/"
    r"|/\w*(?:data_utils|dataset|collator|chat_template_utils|image_utils|audio_utils|video_utils|image_processing_(?!auto)\w*"
    r"|vision_process|mm_plugin|processing_utils|tokenization_utils\w*)\.py:|:(?:torch_call|\w*collate\w*|_?tokenize\w*)\b"
)

_PACKAGES = r"(?:site|dist)-packages/"

_TYPES_OF_IMPORTS = (
    r"(?:[\w.]+\.)?(?:ValueError|TypeError|AssertionError|NotImplementedError|RuntimeError|KeyError|AttributeError|NameError"
    r"|SyntaxError|IndexError|OSError)"
)

_OF_OPTIONS = (
    r"(?!.{0,2000}(?: --\w|\bmust be one of\b|\b(?:mode|strategy|option)\b|[Tt]urn off\b|can only be used with"
    r"|\w=(?:True|False|')|\b(?:is|are) not (?:yet )?(?:supported|implemented)\b|does not support --))"
)
"""What reads data has settings too, and refuses them in these words."""

ROWS_OF_CHECKS: tuple[Row, ...] = (
    Row(
        name="data_where_it_is_read",
        pattern=r"\A(?!(?:[\w.]+\.)?(?:KeyboardInterrupt|SystemExit|RayTaskError)|.{0,80}abruptly died"
        r"|.{0,80}\b(?:strategy|mode|option)\b.{0,80}\bmust be one of\b)\w",
        places=r"(?:site|dist)-packages/(?:datasets|pyarrow|pandas)/|:(?:_prepare_dataset|is_conversational|maybe_apply_chat_template"
        r"|apply_chat_template|maybe_extract_prompt|tokenize_fn|extract_prompt|_tokenize_prompts"
        r"|_set_signature_columns_if_needed"
        r"|_tokenize|tokenize_row|prepare_dataset|load_dataset)\b",
        innermost=5,
        kind="other",
        cause="data",
    ),
    Row(
        # A check inside a settings class: its own words count where they say more than that.
        name="validation",
        pattern=r"validation errors? for \w+",
        kind="illegal",
        cause="illegal_config",
    ),
    Row(
        # A user's own rewards have these shapes too, and there they are no data.
        name="data_shapes",
        pattern=r"expected sequence of length \d+ at dim|too many dimensions 'str'",
        places=r"\A(?!\S*:_calculate_rewards\b)",
        innermost=1,
        kind="other",
        cause="data",
    ),
    Row(
        # Registers of models and tokenizers: what they do not hold came out later, or was taken out.
        name="not_registered",
        pattern=r"does not exist or is not currently imported|does not recogni[sz]e|(?:architectures?|model[ _]types?)\b"
        r".{0,120}\b(?:not|un)[ -]?(?:supported|implemented|registered|available|recogni[sz]ed)",
        places=r"/models/auto/\w+\.py:|/models/registry\.py:|/model_loader/|/models/\w*loader\w*\.py:",
        innermost=3,
        kind="other",
        cause="version",
    ),
    Row(
        # What a package does while it is imported depends on nothing that a user gave it: what fails there does not go together.
        name="import_within",
        pattern=rf"\A{_TYPES_OF_IMPORTS}\b",
        # A program's own file is no import: what it runs into came from its arguments.
        places=rf"{_PACKAGES}(?!\S*(?:/cli/|/scripts?/|/bin/|/entrypoints/|__main__|/main\w*\.py|/train\w*\.py|/launch\w*\.py))"
        r"\S*:<module> (?!.*\bmain\w*\()",
        innermost=10,
        kind="other",
        cause="version",
    ),
    Row(
        name="data_checked",
        pattern=rf"\A{_OF_OPTIONS}{_SAID}",
        places=rf"(?={_CHECKED})\S*(?:{READS_DATA})",
        innermost=1,
        kind="other",
        cause="data",
    ),
    Row(
        name="data_refused",
        pattern=rf"\A(?!.{{0,2000}}(?: --\w| is not (?:yet )?supported\b)){_SAID}.{{0,2000}}?(?:{_OF_DATA})",
        places=_CHECKED,
        innermost=1,
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
        places=FROM_FRAMEWORKS,
        innermost=1,
        kind="illegal",
        cause="illegal_config",
    ),
    Row(
        # A name or a method that the other package has no more, or not yet: an object of a class, so no value of the user's.
        name="attribute_within",
        # Classes that look attributes up themselves leave out the marks around their name.
        pattern=r"AttributeError: (?:type object )?(?P<mark>'?)(?!NoneType)(?-i:[A-Z])\w*(?P=mark) (?:object )?has no attribute"
        r"|NameError: name '\w+' is not defined",
        # A model's own code, that came with its weights, was written for some version as well.
        places=rf"(?:{FROM_FRAMEWORKS}|/transformers_modules/)(?!\S*:_calculate_rewards\b)",
        innermost=1,
        kind="other",
        cause="version",
    ),
    Row(
        name="model_type_within",
        pattern=r"\AKeyError: '\w+'",
        places=r"/models/auto/\w+\.py:|/model_executor/models/registry\.py:",
        innermost=2,
        kind="other",
        cause="version",
    ),
    Row(
        name="data_key_within",
        pattern=r"\AKeyError: '(?:completion|chosen|rejected|messages|text|conversations?|input_ids|labels|label|images?)'",
        places=FROM_FRAMEWORKS,
        innermost=3,
        kind="other",
        cause="data",
    ),
    Row(
        name="json_within",
        pattern=r"\A(?:[\w.]+\.)?JSONDecodeError\b",
        # A file, or lines of one, and not what a model has written.
        places=rf"{FROM_FRAMEWORKS}|.* json\.load\(|.*\bjson\.loads\((?:line|row|l|text_line)\b",
        innermost=4,
        kind="other",
        cause="data",
    ),
    Row(
        name="timeout_within",
        pattern=r"\A(?:[\w.]+\.)?TimeoutError\b",
        places=FROM_FRAMEWORKS,
        innermost=3,
        kind="other",
        cause="hang_or_nccl",
    ),
    Row(
        name="devices_apart",
        pattern=r"Expected all tensors to be on the same device",
        places=FROM_FRAMEWORKS,
        innermost=1,
        kind="illegal",
        cause="illegal_config",
    ),
    Row(
        # Packages whose whole business is to talk to somebody else.
        name="connection_within",
        pattern=r"\A(?!(?:[\w.]+\.)?(?:KeyboardInterrupt|SystemExit|KeyError|AttributeError|TypeError|IndexError)\b)\w",
        places=r"(?:site|dist)-packages/(?:requests|httpx|httpcore|urllib3|aiohttp|openai|anthropic|modelscope|boto3|botocore|s3fs"
        r"|gcsfs|paramiko|wandb|comet_ml|mlflow|swanlab|neptune|clearml)/\S*:(?!<module>)",
        innermost=1,
        kind="other",
        cause="network",
    ),
    Row(
        name="hub_within",
        pattern=rf"\A{_TYPES}\b",
        places=r"(?:site|dist)-packages/huggingface_hub/(?:file_download|_snapshot_download|hf_api|utils/_http|utils/_headers)\.py:",
        innermost=1,
        kind="other",
        cause="network",
    ),
    Row(
        name="checked_by_a_framework",
        pattern=_SAID,
        places=_CHECKED,
        innermost=1,
        kind="illegal",
        cause="illegal_config",
    ),
)
