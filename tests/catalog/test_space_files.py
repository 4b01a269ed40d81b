"""Search-space files: the shipped ones are valid, and errors name line and column."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autotune.catalog import space_files
from autotune.catalog.space_files import load_space, names, read_space
from autotune.core.errors import BadInput, UnknownName
from autotune.request.flags import Flags
from autotune.request.request_parser import parse_request

GOOD = """\
about: a test
method: grpo
framework: trl
objective: preference
relax: [length]
knobs:
  - name: length
    choices: [512, 256]
    effect: learning
    says: how long
  - name: batch
    choices: [1, 2]
    effect: neutral
    memory: grows
    says: how many
"""


@pytest.fixture
def written(tmp_path: Path):  # type: ignore[no-untyped-def]
    def write(text: str) -> Path:
        path = tmp_path / "mine.yaml"
        path.write_text(text)
        return path

    return write


def test_the_shipped_spaces_are_there() -> None:
    frameworks = {
        "verl",
        "verl-ppo",
        "openrlhf",
        "openrlhf-ppo",
        "open-reasoner-zero",
        "open-reasoner-zero-ppo",
        "swift-grpo",
        "swift-sft",
        "unsloth-dpo",
        "unsloth-grpo",
        "unsloth-sft",
        "skyrl",
        "prime-rl",
        "prime-rl-sft",
        "verl-async",
        "openrlhf-async",
        "async-grpo",
    }
    assert (
        set(names())
        == {
            "demo",
            "dpo",
            "grpo",
            "grpo-topology",
            "grpo-wide",
            "kto",
            "online-dpo",
            "reward",
            "rloo",
            "sft",
        }
        | frameworks
    )
    assert (
        load_space("grpo").objective == "preference"
        and load_space("grpo-wide").objective == "throughput"
    )
    assert load_space("grpo").relax == (
        "max_prompt_length",
        "num_generations",
        "max_completion_length",
        "load_in_4bit",
    )


@pytest.mark.parametrize("name", names())
def test_a_shipped_space_orders_its_choices_as_knob_promises(name: str) -> None:
    """Neutral knobs from the least memory to the most, which is how the study and the implied
    outcomes read them.
    """
    for knob in load_space(name).knobs:
        values: list[Any] = [value for value in knob.choices if value is not None]
        if knob.effect == "neutral" and knob.memory in ("grows", "shrinks"):
            assert values == sorted(values, reverse=knob.memory == "shrinks"), knob.name


def test_every_knob_is_one_of_the_frameworks_or_autotunes_own() -> None:
    from autotune import frameworks as trainers
    from autotune.frameworks.trl.settings import OWN_SETTINGS

    for name in names():
        space = load_space(name)
        fields = trainers.trainer(space.framework, space.method).fields()
        for knob in space.knobs:
            assert knob.name in fields or (
                space.framework == "trl" and knob.name in OWN_SETTINGS
            ), knob.name
            for setting in (*knob.learning_when, *knob.learning_unless):
                assert setting in fields, setting


def test_a_file_of_ones_own(written) -> None:  # type: ignore[no-untyped-def]
    space = load_space(str(written(GOOD)))
    assert space.name == "mine" and [knob.name for knob in space.knobs] == ["length", "batch"]
    assert space["batch"].memory == "grows" and space.relax == ("length",)


@pytest.mark.parametrize(
    ("old", "new", "line", "expected"),
    [
        ("[512, 256]", "[512, 256", 8, ["broken YAML"]),
        ("choices: [1, 2]", "choises: [1, 2]", 12, ["choises", "'choices'"]),
        ("relax:", "relacks:", 5, ["relacks", "'relax'"]),
        ("effect: neutral", "effect: nuetral", 13, ["nuetral"]),
        ("choices: [1, 2]", "choices: 3", 12, ["Expected `array`"]),
        ("choices: [1, 2]", "choices: []", 12, ["'batch' has no choices"]),
        ("choices: [1, 2]", "choices: [1, 1]", 12, ["'batch'", "twice"]),
        ("relax: [length]", "relax: [lenght]", 5, ["lenght", "'length'"]),
        ("relax: [length]", "relax: [batch]", 5, ["'batch' is neutral"]),
        ("name: batch", "name: length", 11, ["'length' is listed twice"]),
        ("    memory: grows", "    when: {engine: [true]}", 14, ["Unknown knob 'engine'"]),
        ("    memory: grows", "    when: {length: [7]}", 14, ["can never apply"]),
        (
            "says: how many",
            "says: how many\n    says: again",
            16,
            ["'says' is given twice", "line 15"],
        ),
        ("    says: how long\n", "", 7, ["missing required field `says`"]),
    ],
)
def test_errors_of_a_file_name_the_line(
    written,
    old: str,
    new: str,
    line: int,
    expected: list[str],
) -> None:  # type: ignore[no-untyped-def]
    assert old in GOOD
    with pytest.raises(BadInput) as caught:
        read_space(written(GOOD.replace(old, new, 1)))
    message = str(caught.value)
    place = message.split("mine.yaml, ")[1].split(":")[0]
    near = range(line, line + 2) if "broken" in expected[0] else [line]
    assert int(place.split(",")[0].removeprefix("line ")) in near and "column" in place, message
    for word in expected:
        assert word in message


@pytest.mark.parametrize(
    ("name", "framework", "method"), [("sft", "trl", "sft"), ("verl", "verl", "grpo")]
)
def test_a_space_brings_its_framework_and_method(
    name: str,
    framework: str,
    method: str,
) -> None:
    job = parse_request(
        Flags(
            model="Qwen2.5-0.5B",
            gpus="L4",
            space=name,
            mode="predict",
        )
    ).job
    assert (job.task.workload.framework, job.task.workload.method) == (framework, method)


@pytest.mark.parametrize("text", ["", "- a\n- b\n", "knobs: []\n"])
def test_a_file_without_a_space(written, text: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(BadInput, match=r"line 1, column 1"):
        read_space(written(text))


def test_an_empty_space_is_refused(written) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(BadInput, match=r"line 6.*no knobs"):
        read_space(
            written(
                GOOD.split("knobs:")[0].replace("relax: [length]\n", "relax: []\n") + "knobs: []\n"
            )
        )


def test_an_unknown_name_lists_the_known(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match=r"'grop'.*'grpo'"):
        load_space("grop")
    with pytest.raises(BadInput, match="There is no file"):
        load_space(str(tmp_path / "absent.yaml"))


def test_a_wheels_own_spaces_come_before_those_of_a_clone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "autotune"
    (package / "search_spaces").mkdir(parents=True)
    (package / "search_spaces" / "only.yaml").write_text(GOOD)
    assert space_files.folder() == Path(space_files.__file__).parents[2] / "search_spaces"
    monkeypatch.setattr(space_files, "_PACKAGE", package)
    assert names() == ("only",) and load_space("only").name == "only"
