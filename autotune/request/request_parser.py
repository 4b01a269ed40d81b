"""The way of a request: flags -> sources -> job, for one command and its variations."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from autotune.core.errors import BadInput, IllegalConfiguration
from autotune.core.job import Job, Mode
from autotune.core.space import Candidate, KnobValue
from autotune.frameworks.base import Trainer
from autotune.machine import hardware_detection
from autotune.request.command_flags import PredictOptions
from autotune.request.flags import Flags, option_name, typed
from autotune.request.job_builder import ParsedRequest, build_request
from autotune.request.measured_data import with_longest_prompt
from autotune.request.origins import HeldSetting, HeldSettings, Origin, Source, by_name
from autotune.request.sources.command_line import FLAG_OF_SETTING, flag_values
from autotune.request.sources.reader import SourceReader
from autotune.request.values import LOCAL, FlagValues, SettingChoice

MAX_VARIANTS = 16  # combinations of unknown values; each is predicted


def parse_request(flags: Flags, *, limit_prompts: bool = False) -> ParsedRequest:
    """Parse the flags of one request: about the user's own command, or about a known framework.
    `limit_prompts` measures the user's data, and limits prompts to the longest one unless a
    limit is given.
    """
    return read_sources(flags).parse(limit_prompts=limit_prompts)


def read_sources(flags: Flags, mode: Mode | None = None) -> RequestSources:
    """Return the sources of a request. `mode`: that of the command; None: that of the flags."""
    if mode is not None:
        flags = flags.replace(mode=mode)
    return RequestSources(values=flag_values(flags), flags=flags)


def failed_file(flags: Flags) -> str:
    """Return the configuration file of a failed training, whose GPUs have to be known."""
    if flags.gpus == LOCAL and hardware_detection.hardware(LOCAL).kind != "cuda":
        raise BadInput(
            "--config is predicted for GPUs, and this machine has none.",
            way_out="Name the failed run's GPUs: --gpus 2xA100-40G",
        )
    path = str(flags.config)
    if not Path(path).is_file():
        raise BadInput(
            f"--config {path} is no file.",
            way_out="Name the YAML file that was given to `trl grpo --config`.",
        )
    return path


@dataclass(frozen=True, kw_only=True)
class RequestSources:
    """Sources of a request. Variations of it share what was read."""

    values: FlagValues
    flags: Flags  # as typed: for command lines that a reader copies
    reader: SourceReader = field(default_factory=SourceReader)

    def parse(self, *, limit_prompts: bool = False) -> ParsedRequest:
        """Merge the sources into a job."""
        if self.values.command is not None:
            from autotune.request.command_job import parse_command_request  # with NVML and ctypes

            return parse_command_request(self.values, self.values.command)
        request = build_request(self.values, self.reader)
        return with_longest_prompt(request) if limit_prompts else request

    def command_line(self, mode: Mode | None = None) -> list[str]:
        """Return the words of `autotune run` for this request, in this mode."""
        flags = self.flags if mode is None else self.flags.replace(mode=mode)
        return ["autotune", "run", *typed(flags)]

    def map_command_line(self, page: Path) -> list[str]:
        """Return the words of `autotune predict` that write the map of this request's space."""
        options = {name: getattr(self.flags, name) for name in PredictOptions.__annotations__}
        own_flags = Flags(**options)
        without_program = own_flags.replace(arguments=())
        line = ["autotune", "predict", *typed(without_program), "--map", str(page)]
        if own_flags.arguments:
            line += ["--", *own_flags.arguments]
        return line

    # Variations.

    @property
    def names_gpus(self) -> bool:
        return self.values.hardware.gpus != LOCAL

    def on(self, gpus: str) -> RequestSources:
        """Return the same request for other hardware."""
        hardware = replace(self.values.hardware, gpus=gpus)
        values = replace(self.values, hardware=hardware)
        return replace(self, values=values)

    def variants(self) -> list[RequestVariant]:
        """Return each combination of unknown values; a single one without --unknown."""
        choice = self.values.settings
        for name in choice.unknown:
            is_set = name in choice.hold or name in choice.set
            if is_set or name in choice.own:
                raise BadInput(f"{name} is both given and unknown.", way_out=f"Give {name} once.")
        counts = [len(values) for values in choice.unknown.values()]
        count = math.prod(counts)
        if count > MAX_VARIANTS:
            raise BadInput(
                f"The unknown values combine in {count} ways; at most {MAX_VARIANTS} are"
                " predicted.",
                way_out="Give only the smallest and the largest value of each.",
            )
        variants = []
        combinations = itertools.product(*choice.unknown.values())
        for values in combinations:
            facts = dict(zip(choice.unknown, values, strict=True))
            variant = RequestVariant(facts=facts, sources=self._with_facts(facts))
            variants.append(variant)
        return variants

    def _with_facts(self, facts: Mapping[str, KnobValue]) -> RequestSources:
        choice = self.values.settings
        settings = {**choice.set, **_assumed(facts, "--unknown")}
        choice = replace(choice, set=settings, unknown={})
        return self._with_settings(choice)

    def with_value(self, name: SettingName, value: KnobValue) -> RequestSources:
        """Return the request with another value of one setting."""
        choice = self.values.settings
        own_name = name.of_autotune
        hold = dict(choice.hold)
        settings = dict(choice.set)
        by_flag = dict(choice.own)
        hold.pop(name.of_framework, None)
        settings.pop(name.of_framework, None)
        if own_name is None:
            assumed = _assumed({name.of_framework: value}, "--set")
            settings.update(assumed)
        else:
            flag = option_name(FLAG_OF_SETTING[own_name])
            origin = Origin(source=Source.FLAG, place=flag)
            by_flag[own_name] = HeldSetting(
                name=own_name,
                value=value,
                origin=origin,
            )
        return self._with_settings(
            replace(
                choice,
                hold=hold,
                set=settings,
                own=by_flag,
            )
        )

    def _with_settings(self, choice: SettingChoice) -> RequestSources:
        values = replace(self.values, settings=choice)
        return replace(self, values=values)

    def as_search(
        self,
        held_values: Mapping[str, KnobValue],
        study: str,
        memory_limit_bytes: int | None,
    ) -> RequestSources:
        """Return the request of a search for another configuration, with more settings held.

        It resumes an earlier search, unless everything is to be measured anew.
        """
        flags = self.flags
        hold = [f"{name}={json.dumps(value)}" for name, value in held_values.items()]
        if memory_limit_bytes is not None:
            flags = flags.replace(memory_limit=f"{memory_limit_bytes}B")
        return read_sources(
            flags.replace(
                hold=(*flags.hold, *hold),
                study=flags.study or study,
                resume=not flags.fresh,
            )
        )


class RequestVariant(NamedTuple):
    """Request with one of the possible values for each unknown setting."""

    facts: Mapping[str, KnobValue]
    sources: RequestSources


def _assumed(values: Mapping[str, KnobValue], flag: str) -> HeldSettings:
    origin = Origin(source=Source.SET, place=flag)
    return by_name(
        HeldSetting(
            name=name,
            value=value,
            origin=origin,
        )
        for name, value in values.items()
    )


@dataclass(frozen=True, kw_only=True)
class SettingName:
    """Names of one setting."""

    of_framework: str
    of_autotune: str | None  # None: no flag of its own states it


def setting_name(text: str, trainer: Trainer) -> SettingName:
    """Return the names of a setting that is named as its flag, or in either way."""
    setting_of_flag = {flag: setting for setting, flag in FLAG_OF_SETTING.items()}
    name = setting_of_flag.get(text, text)
    for own_name, framework_name in trainer.canonical.items():
        if framework_name == name:
            name = own_name
            break
    has_flag = name in trainer.canonical and name in FLAG_OF_SETTING
    return SettingName(
        of_framework=trainer.canonical.get(name, name), of_autotune=name if has_flag else None
    )


# Candidates.


def possible_candidates(
    request: ParsedRequest, legal: Callable[[Job, Trainer], tuple[Candidate, ...]]
) -> tuple[Candidate, ...]:
    """Return the legal candidates. A named value that no candidate has is an error."""
    try:
        candidates = legal(request.job, request.trainer)
    except BadInput:
        # No candidate is legal: prefer a reason that concerns the named values.
        _refuse_impossible_values(request, ())
        raise
    _refuse_impossible_values(request, candidates)
    return candidates


def _refuse_impossible_values(request: ParsedRequest, legal: Collection[Candidate]) -> None:
    possible: set[tuple[str, KnobValue]] = set()
    for candidate in legal:
        possible.update(candidate.knobs.items())
    for name, values in request.flag_choices.items():
        for value in values:
            if (name, value) in possible:
                continue
            # A setting that does not matter here may have its default.
            is_default = any(candidate.settings.get(name) == value for candidate in legal)
            if not is_default:
                _refuse_impossible(request, name, value, some_are_legal=bool(legal))


def _refuse_impossible(
    request: ParsedRequest,
    name: str,
    value: KnobValue,
    *,
    some_are_legal: bool,
) -> None:
    reason = _why_never(request, name, value)
    if reason is None:
        if not some_are_legal:
            return
        reason = "it only matters together with other settings, which are not so here."
    raise IllegalConfiguration(
        f"{name}={value}: no candidate can have it. {reason}",
        way_out=f"Give {name} another value.",
    )


def _why_never(
    request: ParsedRequest,
    name: str,
    value: KnobValue,
) -> str | None:
    """Return a reason why all candidates with this value are illegal, if it names the knob."""
    job = request.job
    trainer = request.trainer
    space = job.space.with_choices({name: (value,)})
    for knobs in space.assignments():
        if name not in knobs:
            continue
        candidate = trainer.complete(knobs, job.task)
        reason = trainer.why_illegal(candidate, job.task)
        if reason is not None and name in reason:
            return reason
    return None
