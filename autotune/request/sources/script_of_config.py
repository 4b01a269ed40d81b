"""Training script that reads a YAML file of its author's: the file's keys mean what it says.

The script is one that a document of the project starts with the file, or with another file of the
same folder; else one of the project that trains, reads YAML and takes a file by an option. It is
inspected as if it had been started with the file.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from autotune.core.errors import AutotuneError
from autotune.core.files import text_if_readable
from autotune.core.job import Hardware
from autotune.core.yaml_document import Document, read_document
from autotune.frameworks.trl.class_names import CLASS_PREFIXES
from autotune.frameworks.trl.former_keys import former_keys
from autotune.frameworks.trl.user_config import author_names
from autotune.frameworks.trl.user_launch_files import LaunchFile
from autotune.request.origins import Origin, Source
from autotune.request.sources.config_file import METHOD_OF_PATH, method_of_file
from autotune.request.sources.documented_launch import (
    documented_launches,
    launches_in,
    project_documents,
)
from autotune.request.sources.launch_text import MAX_SCRIPT_BYTES
from autotune.request.sources.launched_program import (
    TRAINER,
    LaunchedProgram,
    launcher_of_example,
    read_launched_program,
)
from autotune.request.sources.scripts_of_file import programs_of_file, undocumented_launch
from autotune.request.values import FileChoice, UserFile

YAML_SUFFIXES = (".yaml", ".yml")
FILE_OPTION = re.compile(r"""["'](--?[\w-]*(?:config|cfg|recipe|yaml)[\w-]*)["']""")
"""Option of a parser that takes a file of settings."""

YAML_READER = re.compile(r"\byaml\b|OmegaConf|TrlParser|(?:Hf|H4)ArgumentParser")
TAKES_FILE = re.compile(r"H4ArgumentParser\(\(")
"""Parser of the alignment handbook, whose scripts take a file without an option."""

TAKES_FLAG = re.compile(r"TrlParser")
"""Parser of TRL, which has the option `--config` itself."""

_PREFIXES = "|".join(CLASS_PREFIXES.values())
TRAINER_OF_METHOD = re.compile(rf"\w*?({_PREFIXES})\w*Trainer\b")
CONFIG_OF_METHOD = re.compile(rf"\b({_PREFIXES})Config\b")
"""Configuration of a trainer whose own name says no method."""

OTHER_TRAINER = re.compile(r"\b(?:GKD|GOLD|PPO|PRM|ORPO|CPO|BCO|XPO|NashMD|MiniLLM)Trainer\b")
"""Trainer of TRL whose method is none of those predicted."""

OF_TESTS = re.compile(r"(?:^|[/_])tests?(?:[/_.]|$)")

SIZE_SETTINGS = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "max_length",
    "max_completion_length",
    "num_generations",
)
"""Settings that a script takes from its file as they are, if it reads the file."""

MOST_SCRIPTS = 2  # that are tried: each is run up to its trainer


def read_by_its_script(
    choice: FileChoice,
    python: Path,
    hardware: Hardware,
    method: str | None,
) -> tuple[UserFile | None, str]:
    """Return the file as its script reads it, or None and the sentence why it cannot be.

    Without a word: the file is TRL's, or the project has no script that reads it.
    """
    document = read_document(Path(choice.path), last_counts=True)
    if not _needs_its_script(document):
        return None, ""
    failure = ""
    for program in itertools.islice(_programs(choice), MOST_SCRIPTS):
        try:
            file = _followed(program, python, hardware, method)
        except AutotuneError as error:
            sentence, _, _ = str(error).partition(". ")
            if "KeyError" in sentence and not author_names(document):
                continue  # the script needs keys that the file lacks: it is for another
            failure = failure or (
                f"TRL's meaning of its keys: {program.choice.path}, which reads it, could not be"
                f" followed ({sentence.rstrip('.')})"
            )
            continue
        if not program.line and not _is_read(document, file):
            failure = failure or (
                f"TRL's meaning of its keys: {program.choice.path}, which may read it, trains with"
                " other sizes"
            )
            continue
        sentence = (
            f"{choice.path} as {program.choice.path} reads it ({_origin(program)});"
            f" --script {program.choice.path} -- ARGUMENTS gives others"
        )
        overridden = tuple(_overridden(document, program))
        config = replace(file.config, assumed=(sentence, *overridden, *file.config.assumed))
        return with_launcher(replace(file, config=config), program), ""
    return None, failure


def _followed(
    program: LaunchedProgram,
    python: Path,
    hardware: Hardware,
    method: str | None,
) -> UserFile:
    """Return the training of a script: on the request's GPUs, or where it refuses their number, as
    it may a batch that they do not divide, in the processes of the document's command.
    """
    try:
        return read_launched_program(program, python, hardware, method, True)
    except AutotuneError:
        _, gpus = launcher_of_example(program) if program.line else (None, None)
        if gpus is None or gpus.count == hardware.count:
            raise
        as_documented = replace(
            program,
            is_example=False,
        )
        return read_launched_program(as_documented, python, hardware, method, True)


def documented_launch_of(choice: FileChoice) -> LaunchedProgram | None:
    """Return the command by which a document of the project starts a file; None: none does."""
    return next(_documented_programs(choice, set()), None)


def with_launcher(
    file: UserFile,
    program: LaunchedProgram,
) -> UserFile:
    """Return the file with the sharding of a document's command, and with its processes if it
    starts this very file.
    """
    if not program.line:
        return file
    launch, gpus = launcher_of_example(program)
    of_launcher = launch.settings.get("sharding")
    if file.config.settings.get("sharding", of_launcher) != of_launcher:
        launch = LaunchFile(settings={})  # the file names a sharding itself
    sentences = list(launch.assumed)
    if launch.settings:
        listed = ", ".join(f"{name}={value}" for name, value in launch.settings.items())
        sentences.append(f"{listed} of its launcher ({_origin(program)})")
    new_sentences = [line for line in sentences if line not in file.config.assumed]
    settings = {**file.config.settings, **launch.settings}
    origin = Origin(
        source=Source.FILE,
        place=program.launch_path,
        line=program.line,
    )
    config = replace(
        file.config,
        settings=settings,
        assumed=(*file.config.assumed, *new_sentences),
    )
    script_gpus = file.script_gpus
    if script_gpus is None and gpus is not None and not program.takes_other_file:
        script_gpus = replace(gpus, stated=f"{gpus.stated} of {_origin(program)}")
    return replace(
        file,
        config=config,
        origins={**file.origins, **dict.fromkeys(launch.settings, origin)},
        script_gpus=script_gpus,
    )


def _overridden(
    document: Document,
    program: LaunchedProgram,
) -> Iterator[str]:
    """Yield the settings of the file that the arguments of its launch give another value."""
    arguments = [*program.choice.arguments, ""]
    for argument, following in itertools.pairwise(arguments):
        option, equals, value = argument.partition("=")
        name = option.removeprefix("--").replace("-", "_")
        if not equals:
            value = following
        if name == argument or name not in document.content:
            continue
        stated = str(document.content[name])
        is_same = stated.lower() == value.lower()
        if not is_same:
            place = _origin(program)
            yield f"{name}={value} of {place}, where the file has {stated}"


def _is_read(
    document: Document,
    file: UserFile,
) -> bool:
    """Return False if the script trains with none of the sizes that the file states: it reads
    another file, or could not be followed to where it reads this one.
    """
    states_sizes = False
    for name in SIZE_SETTINGS:
        if name not in document.content:
            continue
        states_sizes = True
        size = document.content[name]
        if file.config.settings.get(name) == size:
            return True
    return not states_sizes


def _origin(program: LaunchedProgram) -> str:
    if not program.line:
        return "the project's script with such an option"
    place = f"{program.launch_path}, line {program.line}"
    return f"{place}, starts it with another" if program.takes_other_file else place


def _needs_its_script(document: Document) -> bool:
    """Return True for a file of no other program: what loads its model is the author's script,
    whatever the keys are about.
    """
    return former_keys().foreign.keys().isdisjoint(document.content)


def _programs(choice: FileChoice) -> Iterator[LaunchedProgram]:
    """Yield the launches with this file, the most certain first."""
    # 1. A document starts it with this file, or with another of its folder.
    tried: set[str] = set()
    yield from _documented_programs(choice, tried)

    # 2. A script of the project names it itself, or Hydra takes it from the script's folder.
    method = _method_of(choice)
    for program in programs_of_file(choice, method):
        if program.choice.path not in tried:
            tried.add(program.choice.path)
            yield program

    # 3. A script of the project takes such a file, and trains by its method: as a document starts
    # it with a file of another folder, or with the option alone.
    for script, option in _scripts(choice):
        if str(script) in tried:
            continue
        file = Path(choice.path)
        started = _with_other_file(script, option, file)
        yield started or undocumented_launch(
            FileChoice(
                flag="--script",
                path=str(script),
                arguments=(option, str(file)) if option else (str(file),),
                model=choice.model,
            )
        )


def _documented_programs(
    choice: FileChoice,
    tried: set[str],
) -> Iterator[LaunchedProgram]:
    """Yield the first command for each script with which a document of the project starts it with
    this file, else with another of its folder, which may be one of Hydra's groups: `+math=file`.
    The scripts are added to `tried`.
    """
    file = Path(choice.path)
    documents = project_documents(file)
    group = re.escape(file.resolve().parent.name)
    names = (
        re.escape(file.name),
        rf"{group}={re.escape(file.stem)}(?![\w.-])",
        rf"{group}/[\w.-]+\.ya?ml",
        rf"{group}=[\w.-]+",
    )
    for name in names:
        pattern = re.compile(rf"(?<![\w-]){name}")
        for document in documents:
            for program in launches_in(document, pattern, choice.model):
                started = _with_file(program, file)
                if started is not None and started.choice.path not in tried:
                    tried.add(started.choice.path)
                    yield started


def _scripts(choice: FileChoice) -> list[tuple[Path, str]]:
    """Return the project's scripts that take such a file, with the option: first those that speak
    of most of the file's own keys. A file without such keys is read by a script that names it, or
    by the only one whose parser is TRL's.
    """
    file = Path(choice.path)
    document = read_document(file, last_counts=True)
    own_names = author_names(document)
    method = _method_of(choice)
    scripts: list[tuple[int, Path, str]] = []
    with_parser_of_trl: list[tuple[Path, str]] = []
    for script in project_documents(file, (".py",)):
        text = text_if_readable(script, largest_bytes=MAX_SCRIPT_BYTES)
        option = _option_of(script, text, method)
        if option is None:
            continue
        if TAKES_FLAG.search(text):
            with_parser_of_trl.append((script, option))
        mentioned = sum(name in text for name in own_names)
        is_of_handbook = not option and "dataset_mixer" in document.content
        if own_names or is_of_handbook or _names_folder(text, file):
            scripts.append((-mentioned, script, option))
    if not scripts and len(with_parser_of_trl) == 1:
        return with_parser_of_trl
    scripts.sort(key=lambda entry: entry[0])
    return [(script, option) for _, script, option in scripts]


def _names_folder(
    text: str,
    file: Path,
) -> bool:
    """Return True for a script that names a file of the same folder: `configs/sft.yaml`."""
    folder = re.escape(file.resolve().parent.name)
    return re.search(rf"{folder}/[\w.-]+\.ya?ml", text) is not None


def _with_other_file(
    script: Path,
    option: str,
    file: Path,
) -> LaunchedProgram | None:
    """Return a documented launch of the script with this file in place of its own."""
    choice = FileChoice(flag="--script", path=str(script))
    for program in documented_launches(choice):
        arguments = list(program.choice.arguments)
        for index, argument in enumerate(arguments):
            name, equals, value = argument.rpartition("=")
            is_taken = name == option or (index > 0 and arguments[index - 1] == option)
            is_taken |= not option and index == 0
            if is_taken and value.endswith(YAML_SUFFIXES):
                arguments[index] = f"{name}{equals}{file}"
                started = replace(program.choice, arguments=tuple(arguments))
                return replace(
                    program,
                    choice=started,
                    takes_other_file=True,
                )
    return None


def _with_file(
    program: LaunchedProgram,
    file: Path,
) -> LaunchedProgram | None:
    """Return the launch with this file in the place of one of the same folder; None: it has
    neither.
    """
    arguments = list(program.choice.arguments)
    folder = file.resolve().parent
    for index, argument in enumerate(arguments):
        option, equals, value = argument.rpartition("=")
        if option.lstrip("+") == folder.name and _is_in_group(value, file):
            arguments[index] = f"{option}={file.stem}"
            choice = replace(program.choice, arguments=tuple(arguments))
            is_other = value.removesuffix(".yaml") != file.stem
            return replace(
                program,
                choice=choice,
                takes_other_file=is_other,
            )
        if not value.endswith(YAML_SUFFIXES):
            continue
        stated = Path(value).resolve()
        is_neighbour = stated.parent == folder and stated.is_file()
        if stated == file.resolve() or is_neighbour:
            arguments[index] = f"{option}{equals}{file}"
            choice = replace(program.choice, arguments=tuple(arguments))
            return replace(program, choice=choice, takes_other_file=stated != file.resolve())
    return None


def _is_in_group(
    value: str,
    file: Path,
) -> bool:
    """Return True for the name of a file in the same group of Hydra's; a sweep has several."""
    first, _, _ = value.partition(",")
    stem = first.removesuffix(".yaml")
    return bool(stem) and file.with_name(f"{stem}.yaml").is_file()


def _method_of(choice: FileChoice) -> str | None:
    """Return the method of which the file has settings, or which its path names."""
    by_settings = method_of_file(choice)
    if by_settings is not None:
        method, _ = by_settings
        return method
    document = read_document(Path(choice.path), last_counts=True)
    if "num_generations" in document.content:
        return "rloo" if "rloo" in choice.path.lower() else "grpo"
    methods = METHOD_OF_PATH.findall(choice.path.lower())
    if not methods:
        return None
    return str(methods[-1])


def _option_of(
    script: Path,
    text: str,
    method: str | None,
) -> str | None:
    """Return the option by which a script that trains by the method, if one is known, takes a file
    of settings; empty: its first argument is one; None: it takes none.
    """
    if OF_TESTS.search(str(script)):
        return None
    if not TRAINER.search(text) or not YAML_READER.search(text):
        return None
    trainer_names = TRAINER_OF_METHOD.findall(text) or CONFIG_OF_METHOD.findall(text)
    methods = {name.lower() for name in trainer_names}
    is_of_others = not methods and OTHER_TRAINER.search(text) is not None
    if method is not None and method not in methods and (methods or is_of_others):
        return None
    option = FILE_OPTION.search(text)
    if option is not None:
        return option[1]
    if TAKES_FLAG.search(text):
        return "--config"
    return "" if TAKES_FILE.search(text) else None
