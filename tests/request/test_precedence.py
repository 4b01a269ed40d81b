"""Who wins where two sources state one setting: the table of `autotune/request/precedence.py`,
row by row from the lowest.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.core.errors import BadInput
from autotune.core.job import Workload
from autotune.frameworks.trl.field_list import installed_defaults
from autotune.request import precedence
from autotune.request.flags import Flags
from autotune.request.job_builder import ParsedRequest, candidate_of_job
from autotune.request.origins import HeldSetting, Origin, Source
from autotune.request.request_parser import parse_request, read_sources

ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"


@pytest.fixture(autouse=True)
def without_exported_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ALLOCATOR, raising=False)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)


@pytest.fixture(name="config")
def a_config(tmp_path: Path) -> Path:
    return tmp_path / "train.yaml"


def write(config: Path, **settings: object) -> str:
    settings = {"model_name_or_path": "Qwen/Qwen2.5-0.5B", **settings}
    config.write_text(yaml.safe_dump(settings, sort_keys=False))
    return str(config)


def request_of(**flags: Any) -> ParsedRequest:
    """Return the request for a GPU that is not here, so that it is predicted."""
    return parse_request(Flags(**{"gpus": "A100-40G", "mode": "predict", **flags}))


def workload_of(request: ParsedRequest) -> Workload:
    return request.job.task.workload


def stated(request: ParsedRequest, name: str) -> tuple[object, Source]:
    return workload_of(request).held_values[name], request.origin(name).source


def test_the_table_lists_every_source_in_its_order() -> None:
    assert precedence.__doc__ is not None
    rows = filter(str.strip, precedence.__doc__.splitlines())
    assert sources_in([row.split()[0] for row in rows]) == SOURCES


def test_the_documentation_has_the_same_table() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "architecture.md"
    names = []
    for line in page.read_text().splitlines():
        if line.startswith("| `"):
            names.append(line.split("|")[1].strip(" `"))
    assert sources_in(names) == SOURCES


SOURCES = [source.name for source in sorted(Source, reverse=True)]


def sources_in(names: list[str]) -> list[str]:
    return [name for name in names if name in Source.__members__]


# Row by row.


def test_the_space_wins_over_the_frameworks_default() -> None:
    request = request_of(model="Qwen2.5-0.5B")
    assert installed_defaults(workload_of(request).python, "grpo")["num_generations"] == 8
    assert candidate_of_job(request).settings["num_generations"] == 16
    assert request.origin("num_generations").source is Source.SPACE
    assert request.origin("warmup_steps").source is Source.FRAMEWORK


@pytest.fixture(name="with_data")
def a_model_with_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Flags of a request whose longest prompt has 23 tokens."""
    from autotune.core.dataset import PromptLengths
    from autotune.frameworks.trl.trainers import TrlGrpo

    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "a"}) + "\n")
    lengths = PromptLengths(
        rows=1,
        kept=1,
        percentiles={100: 23},
    )
    monkeypatch.setattr(TrlGrpo, "prompt_lengths", lambda *_: lengths)
    return {"model": "Qwen2.5-0.5B", "dataset": str(rows), "gpus": "A100-40G", "mode": "predict"}


def with_prompts(flags: dict[str, Any], **more_flags: Any) -> ParsedRequest:
    """Return the request for which the prompts of the data are measured."""
    return parse_request(Flags(**flags, **more_flags), limit_prompts=True)


def test_the_longest_prompt_of_the_data_wins_over_the_space(with_data: dict[str, Any]) -> None:
    request = with_prompts(with_data)
    assert stated(request, "max_prompt_length") == (23, Source.DATA)
    assert request.job.space["max_prompt_length"].choices == (23,)


def test_data_and_the_defaults_of_a_file_stand_side_by_side(
    with_data: dict[str, Any], config: Path
) -> None:
    request = with_prompts(with_data, config=write(config, beta=0.1))
    assert stated(request, "max_prompt_length") == (23, Source.DATA)
    assert stated(request, "num_generations") == (8, Source.FILE_DEFAULT)


def test_a_file_wins_over_the_data(with_data: dict[str, Any], config: Path) -> None:
    request = with_prompts(with_data, config=write(config, max_prompt_length=64))
    assert stated(request, "max_prompt_length") == (64, Source.FILE)


def test_defaults_of_a_file_win_over_the_space(config: Path) -> None:
    request = request_of(config=write(config, beta=0.1))
    assert stated(request, "num_generations") == (8, Source.FILE_DEFAULT)
    assert request.job.space["num_generations"].choices == (8,)


def test_an_exported_variable_and_the_defaults_of_a_file_stand_side_by_side(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ALLOCATOR, "max_split_size_mb:64")
    request = request_of(config=write(config, beta=0.1), mode="emulate")
    assert stated(request, ALLOCATOR) == ("max_split_size_mb:64", Source.VARIABLE)
    assert stated(request, "num_generations") == (8, Source.FILE_DEFAULT)


@pytest.mark.parametrize("variable", [ALLOCATOR, "PYTORCH_ALLOC_CONF"])
def test_a_file_wins_over_an_exported_variable(
    config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
) -> None:
    """TRL sets the block `env` of its file, and a script its own exports, after the shell."""
    monkeypatch.setenv(ALLOCATOR, "max_split_size_mb:64")
    value = "expandable_segments:True"
    request = request_of(config=write(config, env={variable: value}), mode="emulate")
    assert ALLOCATOR not in workload_of(request).held_values
    assert workload_of(request).user_settings["env"] == {variable: value}

    script = tmp_path / "run.sh"
    script.write_text(
        f"export {variable}={value}\ntrl grpo --model_name_or_path Qwen/Qwen2.5-0.5B\n"
    )
    request = request_of(from_command=str(script), mode="emulate")
    assert ALLOCATOR not in workload_of(request).held_values


def test_a_file_wins_over_the_defaults(config: Path) -> None:
    request = request_of(config=write(config, num_generations=4))
    assert stated(request, "num_generations") == (4, Source.FILE)


def test_the_tuning_wins_over_a_file(config: Path) -> None:
    file = write(config, use_peft=True, load_in_4bit=True)
    request = request_of(config=file, tuning="full")
    assert stated(request, "use_peft") == (False, Source.TUNING)
    assert stated(request, "load_in_4bit") == (False, Source.TUNING)
    assert workload_of(request).tuning == "full"


def test_the_tuning_and_a_search_stand_side_by_side() -> None:
    request = request_of(
        model="Qwen2.5-0.5B",
        tuning="full",
        search=("num_generations=4,8",),
    )
    assert stated(request, "use_peft") == (False, Source.TUNING)
    assert request.origin("num_generations").source is Source.SEARCH


def test_a_search_wins_over_a_file_whose_value_stays_the_baseline(config: Path) -> None:
    request = request_of(config=write(config, num_generations=2), search=("num_generations=4,8",))
    assert request.job.space["num_generations"].choices == (4, 8)
    assert workload_of(request).held_values["num_generations"] == 2
    assert request.origin("num_generations").source is Source.SEARCH


def test_what_is_held_is_not_searched() -> None:
    with pytest.raises(BadInput, match="both held and given another way"):
        request_of(
            model="Qwen2.5-0.5B",
            hold=("num_generations=8",),
            search=("num_generations=4,8",),
        )


def test_a_hold_wins_over_the_tuning() -> None:
    request = request_of(
        model="Qwen2.5-0.5B",
        tuning="full",
        hold=("load_in_4bit=true",),
    )
    assert stated(request, "load_in_4bit") == (True, Source.HOLD)


@pytest.mark.parametrize(
    ("tuning", "hold", "trained"),
    [
        (None, "use_peft=false", "full"),
        (None, "load_in_4bit=true", "qlora"),
        ("lora", "load_in_4bit=true", "qlora"),
        ("qlora", "load_in_4bit=false", "lora"),
        ("full", "use_peft=true", "lora"),
        ("lora", "use_peft=true", "lora"),
    ],
)
def test_the_tuning_of_the_job_is_that_of_the_settings_that_won(
    tuning: str | None,
    hold: str,
    trained: str,
) -> None:
    request = request_of(
        model="Qwen2.5-0.5B",
        tuning=tuning,
        hold=(hold,),
    )
    settings = candidate_of_job(request).settings
    assert workload_of(request).tuning == trained
    assert settings["use_peft"] is (trained != "full")
    assert bool(settings.get("load_in_4bit")) is (trained == "qlora")
    for assumption in request.assumed:
        assert not assumption.startswith(("LoRA", "full fine"))


def test_a_held_adapter_has_a_rank() -> None:
    request = request_of(
        model="Qwen2.5-0.5B",
        tuning="full",
        hold=("use_peft=true",),
        lora_rank=8,
    )
    assert candidate_of_job(request).settings["lora_r"] == 8


def test_a_set_wins_over_a_hold() -> None:
    request = request_of(
        model="Qwen2.5-0.5B",
        hold=("num_generations=8",),
        set=("num_generations=4",),
    )
    assert stated(request, "num_generations") == (4, Source.SET)


def test_an_unknown_value_wins_over_a_file(config: Path) -> None:
    flags = Flags(
        config=write(config, num_generations=2),
        gpus="A100-40G",
        unknown=("num_generations=4,8",),
    )
    variants = read_sources(flags, mode="predict").variants()
    values = [stated(sources.parse(), "num_generations") for _, sources in variants]
    assert values == [(4, Source.SET), (8, Source.SET)]


def test_a_setting_with_a_flag_of_its_own_is_given_once() -> None:
    with pytest.raises(BadInput, match="both held and given another way"):
        request_of(
            model="Qwen2.5-0.5B",
            num_generations=4,
            set=("num_generations=8",),
        )


def test_a_flag_of_its_own_wins_over_a_file(config: Path) -> None:
    request = request_of(config=write(config, num_generations=2), num_generations=4)
    assert stated(request, "num_generations") == (4, Source.FLAG)


# Within a launch script, and beside settings.


def test_the_command_line_of_a_launch_script_wins_over_its_file(
    config: Path, tmp_path: Path
) -> None:
    file = write(config, num_generations=4, beta=0.1)
    script = tmp_path / "run.sh"
    script.write_text(f"export X=1\ntrl grpo --config {file} --num_generations 2\n")
    request = request_of(from_command=str(script))
    assert stated(request, "num_generations") == (2, Source.FILE)
    assert str(request.origin("num_generations")) == f"{script}, line 2"
    assert str(request.origin("beta")) == f"{file}, line 3"


@pytest.mark.parametrize(
    "flags", [{"framework": "swift"}, {"method": "sft"}], ids=lambda flags: next(iter(flags))
)
def test_another_framework_or_method_than_a_launch_script_has_is_refused(
    flags: dict[str, str], tmp_path: Path
) -> None:
    script = tmp_path / "run.sh"
    script.write_text("trl grpo --model_name_or_path Qwen/Qwen2.5-0.5B\n")
    with pytest.raises(BadInput, match=r"run\.sh trains grpo with trl\. Leave --\w+ out"):
        request_of(from_command=str(script), **flags)


def test_model_and_dataset_of_a_flag_win_over_a_file(config: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a"}\n')
    file = write(config, dataset_name="trl-lib/tldr")
    workload = workload_of(request_of(config=file))
    assert (workload.model.name, workload.dataset) == ("Qwen/Qwen2.5-0.5B", "trl-lib/tldr")
    flags = {"model": "Qwen2.5-1.5B", "dataset": str(rows)}
    workload = workload_of(request_of(config=file, **flags))
    assert (workload.model.name, workload.dataset) == ("Qwen/Qwen2.5-1.5B", str(rows))


def test_the_global_batch_of_a_flag_wins_over_the_file_and_that_over_the_space(
    config: Path,
) -> None:
    file = write(config, per_device_train_batch_size=8, gradient_accumulation_steps=2)
    assert workload_of(request_of(model="Qwen2.5-0.5B")).global_batch == 64
    assert workload_of(request_of(config=file)).global_batch == 16
    flags = {"global_batch": 32, "hold": ("per_device_train_batch_size=16",)}
    assert workload_of(request_of(config=file, **flags)).global_batch == 32
    with pytest.raises(BadInput, match=r"the global batch is held at 32, and .* makes 16"):
        request_of(config=file, global_batch=32)


def test_a_micro_batch_of_a_flag_drops_the_accumulation_of_the_file(config: Path) -> None:
    file = write(config, per_device_train_batch_size=8, gradient_accumulation_steps=2)
    settings = request_of(
        config=file, hold=("per_device_train_batch_size=16",)
    ).job.task.workload.held_values
    assert settings["per_device_train_batch_size"] == 16
    assert "gradient_accumulation_steps" not in settings


def test_a_micro_batch_of_a_flag_drops_the_default_accumulation_of_a_launch(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "swift sft --model Qwen/Qwen2.5-7B-Instruct --per_device_train_batch_size 8\n"
    )
    request = request_of(
        from_command=str(script),
        gpus="8xA100-80G",
        set=("per_device_train_batch_size=4",),
    )
    assert "gradient_accumulation_steps" not in workload_of(request).defaults
    assert candidate_of_job(request).settings["gradient_accumulation_steps"] == 2


def test_the_higher_source_wins_in_any_order() -> None:
    settings = []
    for source in Source:
        setting = HeldSetting(
            name="x",
            value=source.name,
            origin=Origin(source=source, place=""),
        )
        settings.append(setting)
    for order in (settings, settings[::-1]):
        assert precedence.merged(order)["x"].value == max(Source).name


def test_each_held_setting_has_an_origin(config: Path) -> None:
    file = write(
        config,
        torch_dtype="bfloat16",
        use_peft=True,
        accelerate_config="zero2",
    )
    request = request_of(
        config=file,
        gpus="2xA100-40G",
        hold=("beta=0.1",),
        lora_rank=8,
    )
    settings = workload_of(request).held_values
    assert settings == {name: setting.value for name, setting in request.held_settings.items()}

    def origin(name: str) -> str:
        return str(request.held_settings[name].origin)

    assert origin("dtype") == f"{file}, line 2", "under its former name in the file"
    assert origin("sharding") == file, "from accelerate's configuration"
    assert (origin("beta"), origin("lora_r")) == ("--hold", "--lora-rank")
