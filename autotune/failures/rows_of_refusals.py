"""Texts of settings that are refused, known by their words. Part of the table of failures, read behind the rows of memory."""

from __future__ import annotations

from autotune.failures.arguments import OF_ANOTHER_VERSION
from autotune.failures.rows_of_checks import FROM_FRAMEWORKS, READS_DATA
from autotune.failures.table import Row, any_of

ROWS_OF_REFUSALS: tuple[Row, ...] = (
    Row(
        name="trl_divisible",
        pattern=r"must be (?:evenly )?divisible by|must divide world size|requires at least 2 generations"
        r"|can ?not be both configured|is not supported by GRPO",
        kind="illegal",
        cause="illegal_config",
    ),
    Row(
        # Examples longer than what a data set's reader was told to let through.
        name="data_too_long",
        pattern=r"sequence_length=\d+ is larger than (?:self\.)?max_length=\d+|Prompt length \d+ is longer than \d+"
        r"|\bMaxLengthError\b|(?:length of row|row length) ?\(\d+\) is larger than",
        kind="other",
        cause="data",
    ),
    Row(
        name="data_too_long_where_read",
        pattern=r"\A(?:ValueError|RuntimeError|NotImplementedError|AssertionError|Exception): .{0,200}"
        r"\b(?:prompt|sequence|example|sample|input|text|response|tokens?|length)\w*\b.{0,120}"
        r"\b(?:longer|larger|greater|exceeds?|exceeded|too long|>)",
        places=rf"(?={FROM_FRAMEWORKS})\S*(?:{READS_DATA})",
        innermost=1,
        kind="other",
        cause="data",
    ),
    Row(
        name="length_refused",
        pattern=r"max_token_len must be greater than the sequence length"
        r"|This model's maximum context length is (?P<length>\d+) tokens"
        r"|max_model_len \((?P<wanted>\d+)\) is greater than the derived max_model_len \(\w+=(?P<length2>\d+)"
        r"|greater than the derived max_model_len|is too long to fit into the model|longer than the maximum model length of"
        r"|leaves no room to generate"
        r"|(?:prompt|input) \(?length.{0,80}(?:exceeds?|longer than|larger than).{0,60}(?:max|limit)",
        kind="illegal",
        cause="illegal_config",
    ),
    Row(
        name="unexpected_argument_within",
        pattern=r"TypeError: (?!\w*(?:Config|Arguments)\.__init__)(?:(?:.{0,200}got an )?unexpected keyword argument"
        r"|.{0,200}missing \d+ required (?:positional|keyword-only) argument|.{0,200}takes .{0,40}positional arguments? but)",
        places=rf"(?:site|dist)-packages/|{FROM_FRAMEWORKS}",
        innermost=1,
        kind="other",
        cause="version",
    ),
    Row(
        # Settings that were saved, and not by this version.
        name="saved_settings_unknown",
        pattern=r"TypeError: .{0,200}got an unexpected keyword argument",
        places=r"/peft/config\.py:from_peft_type\b|/(?:configuration_utils|config)\.py:(?:from_dict|from_json_file|from_pretrained)\b",
        innermost=1,
        kind="other",
        cause="version",
    ),
    Row(
        name="argument_of_another_version",
        pattern=OF_ANOTHER_VERSION,
        kind="other",
        cause="version",
    ),
    Row(
        # A setting's word is looked up in a module.
        name="word_looked_up",
        pattern=r"\AAttributeError: module '[\w.]+' has no attribute",
        places=r"(?:site|dist)-packages/\S* .*\bgetattr\(torch, (?!['\"])",
        innermost=1,
        kind="illegal",
        cause="illegal_config",
    ),
    Row(
        # What a trainer takes changes from version to version; what its settings take is checked in their own classes.
        name="trainer_argument",
        pattern=r"TypeError: \w*Trainer\.__init__\(\) got an unexpected keyword argument",
        kind="other",
        cause="version",
    ),
    Row(
        name="arguments_refused",
        pattern=any_of(
            r"(?m:^[\w./-]+: error: (?:unrecognized arguments|argument |the following arguments are required|ambiguous option"
            r"|expected |invalid ))",
            r"Some specified arguments are not used by",
            r"Some keys are not used by the HfArgumentParser",
            r"\bNo such option: ",
            r"(?m:^Error: (?:Invalid value for|Missing option|Missing argument|Got unexpected extra argument))",
            r"\bCould not consume arg\b",
            r"\bUnrecognized (?:or misplaced )?options\b",
            r"Could not override '",
            r"is not in struct",
            r"\bConfigAttributeError\b|\bConfigKeyError\b",
            r"\bhydra\.errors\.|\bomegaconf\.errors\.",
            r"Cannot find primary config '|Primary config (?:module|directory) '|(?m:^In '[^']{1,200}': Could not find ')"
            r"|\bmismatched input '.{1,40}' expecting\b|hydra\.cc/docs/\S{1,20}/advanced/override_grammar"
            r"|No available node types can fulfill",
            r"MissingMandatoryValue|Error parsing override '|Error in call to target '[\w.]*config",
            r"\bDeepSpeedConfigError\b",
            r"(?:srun|sbatch): error: (?:Unable to allocate|Batch job submission failed|invalid )",
            r"\d+ nodes? .{0,40}available: .{0,200}Insufficient |FailedScheduling .{0,200}Insufficient ",
            r"can't open file '[^']{1,300}': \[Errno 2\]",
        ),
        kind="illegal",
        cause="illegal_config",
        said="anywhere",
    ),
    Row(
        name="argument_unknown",
        pattern=r"unexpected keyword argument",
        places=r"\A",
        innermost=1,
        kind="illegal",
        cause="illegal_config",
    ),
    Row(
        name="no_gradient",
        pattern=any_of(
            r"element 0 of tensors does not require grad|does not require grad and does not have a grad_fn",
            r"None of the inputs have requires_grad",
        ),
        kind="illegal",
        cause="illegal_config",
    ),
    Row(
        name="setting_refused",
        pattern=any_of(
            r"__init__\(\) got an unexpected keyword argument|\bStrictDataclass\w*Error\b",
            r"\byaml\.(?:scanner|parser|constructor|composer|reader)\.\w+|\bTOMLDecodeError\b",
            # Numbers and kinds of numbers
            r"'weight' must be 2-D|already exists and is not empty|\bZeRORuntimeException\b",
            r"Your setup doesn't support bf16|requires n_samples_per_prompt > 1|optimizer got an empty parameter list",
            r"Head size \d+ is not supported|unsupported head.?size|Attempting to unscale FP16 gradients",
            r"expected (?:m1 and m2|mat1 and mat2|scalar type \w+ but found|self and mat2)|must have the same dtype, but got"
            r"|expected .{0,60}to have the same dtype|No inf checks were recorded",
            r"FlashAttention\S* .{0,60}\b(?:only support|requires?)|only supported on (?:GPUs|Ampere)"
            r"|only supports Ampere GPUs",
            # Models and their parts
            r"does not have a padding token|chat_template is not set|no chat template|Repo id must |\bHFValidationError\b",
            r"is not a local folder and is not a valid model identifier|is not the path to a directory containing an? ",
            r"does not appear to have a file named|no file named .{1,120} found in directory"
            r"|Error\(s\) in loading state_dict",
            r"NotImplementedError: Cannot copy out of meta tensor|Cannot merge LORA layers|Target modules? .{0,300}not found",
            r"cannot perform fine-tuning on purely quantized|You can't train a model that has been loaded",
            # Processes
            r"invalid device ordinal|Duplicate GPU detected|larger than the number of available GPUs|ncclInvalidUsage",
            r"Expected to mark a variable ready only once|Expected to have finished reduction in the prior iteration",
            r"Unable to find a usable engine|Default process group has not been initialized"
            r"|DistributedDataParallel is not needed when a module|Cannot re-initialize CUDA in forked subprocess",
            r"cannot be scheduled right now|\b(?:Task|Actor)UnschedulableError\b"
            r"|placement group .{0,200}(?:infeasible|cannot be (?:scheduled|fulfilled))",
        ),
        kind="illegal",
        cause="illegal_config",
    ),
)
