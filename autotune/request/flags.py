"""Flags of a request. Each flag is declared once, with its type, default, group and help text.

The declarations yield the keyword arguments of the Python API, the options of the command line
(`autotune.cli.options`) and `Flags`, the values of one request.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypedDict, get_type_hints

from autotune.core.errors import UnknownName
from autotune.core.job import ExecutorName, Mode, SamplerName, TrackerName, Tuning, Weights
from autotune.core.secrets import without_password
from autotune.core.space import KnobValue
from autotune.core.user_script import Rewards

Name: TypeAlias = str | PathLike[str]
GivenValues: TypeAlias = Mapping[str, KnobValue] | Sequence[str]
"""`{"use_vllm": False}`, or as typed: `["use_vllm=false"]`."""

Choices: TypeAlias = Mapping[str, Sequence[KnobValue]] | Sequence[str]

MODEL, LENGTHS, CONFIGURATION, HARDWARE, ENVIRONMENT, SEARCH, OUTPUT, COMMAND = GROUPS = (
    "Model",
    "Lengths and batch",
    "Data and configuration",
    "Hardware",
    "Training environment",
    "Search",
    "Study and output",
    "Your own command (--framework command)",
)


@dataclass(frozen=True)
class Flag:
    """Declaration of one flag; its type is the annotated one."""

    group: str
    help: str
    metavar: str | None = None
    default: Any = None
    minimum: int | None = None
    completes: str | None = None  # shell completion: `models`, `gpus`, `spaces` or `file`


class CommonOptions(TypedDict, total=False):
    """Flags of all requests, including those about an unchanged configuration."""

    gpus: Annotated[
        str,
        Flag(
            HARDWARE,
            metavar="HARDWARE",
            default="local",
            completes="gpus",
            help=(
                "Devices of the job: local (this machine's), a GPU model with a count, or cpu."
                " Example: 2xA100-40G, 2xcpu."
            ),
        ),
    ]
    method: Annotated[
        str,
        Flag(
            ENVIRONMENT,
            metavar="METHOD",
            default="grpo",
            help=(
                "Training method: grpo, rloo, sft, dpo, kto, reward, online-dpo or async-grpo; ppo"
                " with verl, openrlhf and open-reasoner-zero."
            ),
        ),
    ]
    framework: Annotated[
        str,
        Flag(
            ENVIRONMENT,
            metavar="NAME",
            default="trl",
            help=(
                "Training framework: trl, swift, verl, openrlhf, open-reasoner-zero, skyrl,"
                " prime-rl or unsloth; command for your own program."
            ),
        ),
    ]
    python: Annotated[
        Name | None,
        Flag(
            ENVIRONMENT,
            metavar="PATH",
            completes="file",
            help=(
                "Python interpreter of the training environment. Default: autotune's own. Example:"
                " .venv/bin/python."
            ),
        ),
    ]
    max_prompt_length: Annotated[
        int | None,
        Flag(
            LENGTHS,
            metavar="N",
            help=(
                "Longest prompt, in tokens; constant during the search. Default with TRL: the"
                " longest of your data."
            ),
        ),
    ]
    search: Annotated[
        Choices,
        Flag(
            CONFIGURATION,
            metavar="K=V1,V2",
            help=(
                "Search a knob over these values. Repeatable. Example: --search"
                " num_generations=4,8."
            ),
        ),
    ]
    memory_limit: Annotated[
        str | None,
        Flag(
            HARDWARE,
            metavar="SIZE",
            help=(
                "Memory limit per GPU; on a CPU for all ranks together. Default: the whole device."
                " Examples: 38G, 95%."
            ),
        ),
    ]
    offline: Annotated[
        bool,
        Flag(
            MODEL,
            default=False,
            help=(
                "Fetch nothing. Without it, the config.json of a hub id that is neither in the"
                " catalogue nor in the local cache is fetched from the hub."
            ),
        ),
    ]
    weights: Annotated[
        Weights,
        Flag(
            MODEL,
            default="random",
            help=(
                "Weights that probes load. random needs no download: memory and speed are the same"
                " as with real ones."
            ),
        ),
    ]
    seed: Annotated[
        int,
        Flag(
            SEARCH,
            metavar="N",
            default=42,
            help="Random seed of probes and search.",
        ),
    ]
    space: Annotated[
        Name | None,
        Flag(
            SEARCH,
            metavar="NAME|FILE",
            completes="spaces",
            help=(
                "Search space: a name from `autotune show spaces`, or a YAML file. Default: the"
                " method's own."
            ),
        ),
    ]


class RequestOptions(CommonOptions, total=False):
    """Flags of `autotune run` and `autotune predict`."""

    model: Annotated[
        Name,
        Flag(
            MODEL,
            metavar="NAME|ID|FOLDER",
            completes="models",
            help=(
                "Model to train: a name from `autotune show models`, a hub id in the local cache,"
                " or a folder. Example: Qwen2.5-7B."
            ),
        ),
    ]
    tuning: Annotated[
        Tuning | None,
        Flag(
            MODEL,
            help=(
                "Trained parameters: all (full), a LoRA adapter (lora), or a LoRA adapter on 4-bit"
                " weights (qlora). Default: as in --config, else the search space's."
            ),
        ),
    ]
    lora_rank: Annotated[
        int | None, Flag(MODEL, metavar="N", help="Rank of the LoRA adapter. Example: 16.")
    ]
    dataset: Annotated[
        Name | None,
        Flag(
            CONFIGURATION,
            metavar="NAME|PATH",
            completes="file",
            help=(
                "Prompts or rows: a name on the hub, a folder or a file. Default: synthetic prompts"
                " of the longest length."
            ),
        ),
    ]
    max_completion_length: Annotated[
        int | None,
        Flag(
            LENGTHS, metavar="N", help="Longest completion, in tokens; constant during the search."
        ),
    ]
    image_size: Annotated[
        str | None,
        Flag(
            LENGTHS,
            metavar="WxH",
            help=(
                "Size of the images in each row, in pixels, for a vision-language model. The"
                " lengths of prompts and rows include their tokens. Example: 448x448."
            ),
        ),
    ]
    images_per_sample: Annotated[
        int | None,
        Flag(
            LENGTHS,
            metavar="N",
            minimum=1,
            help="Images in each row. [default: 1]",
        ),
    ]
    typical_completion_length: Annotated[
        int | None,
        Flag(
            LENGTHS,
            metavar="N",
            help=(
                "Usual completion length, in tokens. Candidates are ranked by speed at this length."
            ),
        ),
    ]
    lengths: Annotated[
        str | None,
        Flag(
            LENGTHS,
            metavar="SOURCE",
            completes="file",
            help=(
                "Completion lengths that occur: lognormal:MEAN,P95, a log of TRL, verl or swift, a"
                " W&B export, one number a line, a training's or an earlier study's output folder,"
                " or TRL's `completions`. The prefix growing: makes the lengths of a log, of a"
                " folder or of lognormal:MEAN,P95,MEAN,P95 change over training. Candidates are"
                " ranked by the speed at these lengths."
            ),
        ),
    ]
    prompt_lengths: Annotated[
        str | None,
        Flag(
            LENGTHS,
            metavar="SOURCE",
            completes="file",
            help=(
                "Prompt lengths that occur, for the memory at the lengths given:"
                " lognormal:MEAN,P95, or one number a line. Without it, prompts have the longest"
                " length."
            ),
        ),
    ]
    num_generations: Annotated[
        int | None,
        Flag(LENGTHS, metavar="N", help="Completions per prompt; constant during the search."),
    ]
    global_batch: Annotated[
        int | None,
        Flag(
            LENGTHS,
            metavar="N",
            help="Completions per optimizer step over all GPUs; constant during the search.",
        ),
    ]
    config: Annotated[
        Name | None,
        Flag(
            CONFIGURATION,
            metavar="FILE",
            completes="file",
            help=(
                "Your YAML file of `trl grpo --config`: the baseline. Its settings that affect"
                " learning stay constant."
            ),
        ),
    ]
    script: Annotated[
        Name | None,
        Flag(
            CONFIGURATION,
            metavar="FILE",
            completes="file",
            help=(
                "Your own TRL training script: the baseline. Its arguments go after two dashes:"
                " --script train.py -- --lr 1e-6."
            ),
        ),
    ]
    from_command: Annotated[
        Name | None,
        Flag(
            CONFIGURATION,
            metavar="FILE",
            completes="file",
            help=(
                "Your launch script of trl, verl, swift, openrlhf, open-reasoner-zero, skyrl or"
                " prime-rl: the baseline. It is read as bash expands it, and not run. Its arguments"
                " go after two dashes."
            ),
        ),
    ]
    rewards: Annotated[
        Rewards,
        Flag(
            CONFIGURATION,
            default="real",
            help="With --script: call its reward functions (real), or call none (skip).",
        ),
    ]
    hold: Annotated[
        GivenValues,
        Flag(
            CONFIGURATION,
            metavar="K=V",
            help="Keep a knob or another setting constant. Repeatable. Example: --hold beta=0.04.",
        ),
    ]
    arguments: Sequence[str]
    """Words after a bare `--`: a command line, or the arguments of --script."""


class RunOptions(RequestOptions, total=False):
    """Flags of `autotune run` alone."""

    budget: Annotated[
        str,
        Flag(
            SEARCH,
            metavar="TIME",
            default="auto",
            help=(
                "Wall-clock time for the search; auto: 20m, or what a usual search is predicted to"
                " take. Example: 1h30m."
            ),
        ),
    ]
    max_probes: Annotated[
        int,
        Flag(
            SEARCH,
            metavar="N",
            default=100,
            minimum=1,
            help="Maximum number of measured candidates.",
        ),
    ]
    mode: Annotated[
        Mode,
        Flag(
            SEARCH,
            default="auto",
            help=(
                "probe: measure on this machine; emulate: real probes on emulated GPUs, with"
                " predicted speed; predict: no GPU needed; auto: measure if possible."
            ),
        ),
    ]
    sampler: Annotated[
        SamplerName,
        Flag(
            SEARCH,
            default="value",
            help=(
                "Choice of the next candidate: expected gain per cost (value), or an Optuna sampler"
                " (tpe, gp, random)."
            ),
        ),
    ]
    soak: Annotated[
        str | None,
        Flag(
            SEARCH,
            metavar="TIME",
            help=(
                "Train the winner for this long beyond the budget and watch its memory grow."
                " Example: 5m."
            ),
        ),
    ]
    headroom: Annotated[
        str | None,
        Flag(
            HARDWARE,
            metavar="SIZE",
            help=(
                "Memory below the limit that the recommendation leaves free. Default: 2% of the"
                " limit, or the spread of its own peaks if that is more. Examples: 0, 3%, 1G."
            ),
        ),
    ]
    executor: Annotated[
        ExecutorName,
        Flag(
            HARDWARE,
            default="local",
            help="Location of probes: this machine (local), or the nodes of a Ray cluster (ray).",
        ),
    ]
    address: Annotated[
        str | None,
        Flag(
            HARDWARE,
            metavar="ADDRESS",
            help=(
                "Address of the Ray cluster. Default: the one that Ray finds. Example:"
                " 10.0.0.1:6379."
            ),
        ),
    ]
    slots: Annotated[
        int | None,
        Flag(
            HARDWARE,
            metavar="N",
            minimum=1,
            help="Concurrent probes. Default: as many as the job's GPUs allow.",
        ),
    ]
    storage: Annotated[
        str | None,
        Flag(
            OUTPUT,
            metavar="URL",
            help="Optuna storage of the study. Default: study.db in the output folder.",
        ),
    ]
    storage_file: Annotated[
        Name | None,
        Flag(
            OUTPUT,
            metavar="FILE",
            completes="file",
            help="File with the URL for --storage: its password stays out of the command line.",
        ),
    ]
    study: Annotated[
        str | None,
        Flag(
            OUTPUT,
            metavar="NAME",
            help="Name of the study in the storage. Default: derived from model and hardware.",
        ),
    ]
    resume: Annotated[
        bool,
        Flag(OUTPUT, default=False, help="Continue an earlier study; nothing is measured twice."),
    ]
    fresh: Annotated[
        bool,
        Flag(
            OUTPUT,
            default=False,
            help=(
                "Discard an earlier study of this name and all stored measurements; measure again."
            ),
        ),
    ]
    out: Annotated[
        Name,
        Flag(
            OUTPUT,
            metavar="FOLDER",
            default="autotune-out",
            help="Output folder for the recommendation and its report.",
        ),
    ]
    log_to: Annotated[
        TrackerName | None,
        Flag(
            OUTPUT,
            help=(
                "Experiment tracker that receives the measurements and the answer, in its own"
                " configured place and mode."
            ),
        ),
    ]
    metrics: Annotated[
        Name | None,
        Flag(
            COMMAND,
            metavar="FILE",
            help="JSON lines with the command's speed, or - for its printed output.",
        ),
    ]
    speed_pattern: Annotated[
        str | None,
        Flag(
            COMMAND,
            metavar="REGEX",
            help=(
                "Regular expression for the speed in printed lines. Example:"
                " '(?P<tokens_per_second>[0-9.]+) tok/s'."
            ),
        ),
    ]
    learning: Annotated[
        Sequence[str],
        Flag(
            COMMAND,
            metavar="K",
            help="Placeholder that changes what is learned. Repeatable. Example: --learning lr.",
        ),
    ]


class ConfigurationOptions(RequestOptions, total=False):
    """Flags of commands about one configuration."""

    set: Annotated[
        GivenValues,
        Flag(
            CONFIGURATION,
            metavar="K=V",
            help=(
                "Value of a knob or another setting in the configuration. Repeatable. Example:"
                " --set sharding=zero3."
            ),
        ),
    ]


class PredictOptions(ConfigurationOptions, total=False):
    """Flags of `autotune predict` alone."""

    unknown: Annotated[
        Choices,
        Flag(
            CONFIGURATION,
            metavar="K=V1,V2",
            help=(
                "Unknown value and its possible ones; each is predicted. Repeatable. Example:"
                " --unknown num_generations=4,8."
            ),
        ),
    ]


class SolveOptions(ConfigurationOptions, total=False):
    """Flags of `autotune solve` alone."""

    price: Annotated[
        Name | None,
        Flag(
            HARDWARE,
            metavar="FILE",
            completes="file",
            help=(
                "With solve gpus: YAML file of hardware and its price per hour. Example line:"
                " 2xA100-80G: 3.60."
            ),
        ),
    ]


REPEATED = ("hold", "set", "search", "unknown", "learning")
"""Flags that may be given several times."""
_HINTS: dict[str, Any] = {
    name: hint
    for kind in (RunOptions, PredictOptions, SolveOptions)
    for name, hint in get_type_hints(kind, include_extras=True).items()
    if name != "arguments"
}


def _help_order(name: str) -> tuple[int, bool]:
    """Sort by group; within a group, flags of CommonOptions go after those of RequestOptions."""
    common = name in CommonOptions.__annotations__ or name not in RequestOptions.__annotations__
    return GROUPS.index(_HINTS[name].__metadata__[0].group), common


FLAGS: dict[str, tuple[Any, Flag]] = {
    name: (_HINTS[name].__origin__, _HINTS[name].__metadata__[0])
    for name in sorted(_HINTS, key=_help_order)
}
"""Name -> (type, declaration), in the order of --help."""

_TYPED_FIRST = ("model", "gpus", "method", "framework", "python")

DEFAULTS = {
    **{name: () if name in REPEATED else flag.default for name, (_, flag) in FLAGS.items()},
    "arguments": (),
}

if TYPE_CHECKING:
    # The fields are made from the declarations above, which mypy can't evaluate.
    class Flags:
        """Values of all flags of a request, as typed; None: not given."""

        def __init__(self, **values: Any) -> None: ...
        def __getattr__(self, name: str) -> Any: ...
        def replace(self, **changes: Any) -> Flags: ...

else:
    Flags = dataclasses.make_dataclass(
        "Flags",
        [(name, Any, dataclasses.field(default=default)) for name, default in DEFAULTS.items()],
        namespace={"replace": dataclasses.replace, "__module__": __name__},
        frozen=True,
        kw_only=True,
    )


def flags_of(options: Mapping[str, Any], names: Collection[str] = tuple(DEFAULTS)) -> Flags:
    """Convert keyword arguments; one outside `names` is an error with the nearest names."""
    for name in options:
        if name not in names:
            raise UnknownName("keyword", name, names)
    return Flags(**{name: _as_typed(name, value) for name, value in options.items()})


def typed(flags: Flags) -> list[str]:
    """Return the command-line words of all non-default flags. Storage passwords are redacted."""
    line: list[str] = []
    for name in sorted(FLAGS, key=lambda name: name not in _TYPED_FIRST):
        value = getattr(flags, name)
        if value == DEFAULTS[name]:
            continue
        if isinstance(value, bool):
            line.append(option_name(name))
            continue
        for item in value if isinstance(value, tuple) else (value,):
            line += [option_name(name), without_password(str(item))]
    if not flags.arguments:
        return line
    return [*line, "--", *flags.arguments]


def option_name(name: str) -> str:
    """Return `--max-probes` for `max_probes`."""
    return f"--{name.replace('_', '-')}"


def _as_typed(name: str, value: Any) -> Any:
    """Return the value of a keyword argument in the form of the command line."""
    if isinstance(value, Mapping):
        return tuple(f"{knob}={_listed(choices)}" for knob, choices in value.items())
    if isinstance(value, PathLike):
        return str(value)
    return tuple(value) if isinstance(value, list) or name in REPEATED else value


def _listed(choices: Any) -> str:
    """Return `4,8` for a list of values, or one value, of a knob."""
    if not isinstance(choices, list | tuple | range):
        choices = (choices,)
    texts = [choice if isinstance(choice, str) else json.dumps(choice) for choice in choices]
    return ",".join(texts)
