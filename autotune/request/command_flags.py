"""Flags of one command alone, with their declarations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from autotune.core.job import ExecutorName, Mode, SamplerName, TrackerName
from autotune.request.request_flags import (
    COMMAND,
    CONFIGURATION,
    HARDWARE,
    OUTPUT,
    SEARCH,
    Choices,
    Flag,
    GivenValues,
    Name,
    RequestOptions,
)


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
