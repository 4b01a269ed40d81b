"""Bad input: exit code 2, one clear sentence, what to type instead, and nothing half-written."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.cli.command import Done, autotune, bound_by_permissions, shape_only

CLONE = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working folder with a model in it."""
    shape_only(tmp_path / "model")
    return tmp_path


def refused(
    folder: Path,
    *arguments: str,
    says: str,
    instead: str,
    model: bool = True,
    launcher: Sequence[str] = (),
    **variables: str,
) -> Done:
    before = set(folder.rglob("*"))
    flags = [*(["--model", "model"] if model else []), *arguments]
    if "--gpus" not in arguments:
        flags += ["--gpus", "cpu"]
    done = autotune("run", *flags, cwd=folder, launcher=launcher, **variables)
    assert done.code == 2, done.err
    assert done.out == "", "an error says nothing on stdout"
    assert "Traceback" not in done.err
    assert done.err.startswith("Error: ") and done.err.count("\n") == 1, done.err
    assert says in done.err and instead in done.err, done.err
    assert set(folder.rglob("*")) == before, "something was left behind"
    return done


def test_no_model(folder: Path) -> None:
    refused(
        folder,
        model=False,
        says="No model was named",
        instead="--model Qwen2.5-7B",
    )


def test_an_unknown_model(folder: Path) -> None:
    refused(
        folder,
        "--model",
        "Qwen2.5-7X",
        model=False,
        says="Unknown model 'Qwen2.5-7X'",
        instead="'Qwen2.5-7B'",
    )


def test_an_ambiguous_model(folder: Path) -> None:
    refused(
        folder,
        "--model",
        "Mistral-7B",
        model=False,
        says="could be several models",
        instead="Mistral-7B-v0.3",
    )


def test_an_argument_that_is_not_text(folder: Path) -> None:
    refused(
        folder,
        "--out",
        os.fsdecode(b"out-\xff"),
        says=r"'out-\udcff' is not UTF-8 text",
        instead="Rename",
    )


def test_a_pipe_that_a_library_would_wait_for(folder: Path) -> None:
    os.mkfifo(folder / "prompts.jsonl")
    refused(
        folder,
        "--dataset",
        "prompts.jsonl",
        says="prompts.jsonl is a pipe or a device",
        instead="dataset's folder",
    )
    os.mkfifo(folder / "model" / "tokenizer.json")
    refused(
        folder,
        says="model/tokenizer.json is a pipe or a device",
        instead="Save or download the model again",
    )


def test_a_dataset_file_that_is_missing_or_holds_no_rows(folder: Path) -> None:
    refused(
        folder,
        "--dataset",
        "data/rows.jsonl",
        says="Dataset data/rows.jsonl: there is no such file",
        instead="full one",
    )
    (folder / "rows.txt").write_text("a row\n")
    refused(
        folder,
        "--dataset",
        "rows.txt",
        says="Dataset rows.txt: not a file of rows (.json,",
        instead=".jsonl",
    )


def test_an_unknown_gpu(folder: Path) -> None:
    refused(folder, "--gpus", "2xA101-40G", says="Unknown GPU 'A101-40G'", instead="'A100-40G'")


def test_an_ambiguous_gpu(folder: Path) -> None:
    refused(
        folder, "--gpus", "A100", says="different amounts of memory", instead="A100-40G or A100-80G"
    )


def test_missing_hardware_is_reported_first(folder: Path) -> None:
    flags = ["--gpus", "64xB200", "--mode", "probe"]
    done = refused(folder, *flags, says="64xB200 is not on this machine", instead="--gpus cpu")
    assert "can't be measured" in done.err.splitlines()[0]


def test_what_no_probe_can_use(folder: Path) -> None:
    refused(
        folder,
        "--gpus",
        "MI300X",
        "--mode",
        "probe",
        says="MI300X is no NVIDIA GPU",
        instead="`autotune predict`",
    )


def test_more_devices_than_are_here(folder: Path) -> None:
    refused(folder, "--gpus", "9999xcpu", says="9999 CPU ranks", instead="xcpu.")


def test_an_unknown_knob(folder: Path) -> None:
    refused(
        folder,
        "--hold",
        "num_generation=8",
        says="Unknown knob 'num_generation'",
        instead="'num_generations'",
    )
    refused(
        folder,
        "--search",
        "max_completion=8,16",
        says="Unknown knob",
        instead="'max_completion_length'",
    )


def test_a_bad_value(folder: Path) -> None:
    refused(
        folder,
        "--hold",
        "num_generations=many",
        says="can't be 'many'",
        instead="a whole number, like 16, 8 or 4",
    )
    refused(
        folder,
        "--search",
        "use_vllm=true,perhaps",
        says="can't be 'perhaps'",
        instead="true or false",
    )
    refused(
        folder, "--hold", "num_generations", says="not of the form K=V", instead="num_generations=8"
    )
    refused(folder, "--budget", "soon", says="'soon' is not a duration", instead="20m")
    refused(folder, "--max-completion-length", "0", says="not above zero", instead="at least 1")
    refused(folder, "--sampler", "genetic", says="'genetic' is not one of", instead="'tpe'")


def test_a_value_that_no_candidate_can_have(folder: Path) -> None:
    refused(
        folder,
        "--gpus",
        "cpu",
        "--search",
        "vllm_enable_sleep_mode=true",
        says="needs a GPU",
        instead="Give vllm_enable_sleep_mode another",
    )


def test_a_knob_given_twice(folder: Path) -> None:
    refused(
        folder,
        "--num-generations",
        "8",
        "--search",
        "num_generations=4,8",
        says="both held",
        instead="--search",
    )


def test_a_limit_above_the_device(folder: Path) -> None:
    refused(
        folder,
        "--gpus",
        "cpu",
        "--memory-limit",
        "900T",
        says="above this machine's memory",
        instead="at most",
    )
    refused(
        folder,
        "--gpus",
        "cpu",
        "--memory-limit",
        "lots",
        says="'lots' is not a size",
        instead="38G",
    )
    refused(
        folder,
        "--gpus",
        "cpu",
        "--memory-limit",
        "3",
        says="'3' has no unit",
        instead="Did you mean 3GiB?",
    )


def test_a_window_below_prompt_and_completion(folder: Path) -> None:
    flags = [
        "--gpus",
        "cpu",
        "--hold",
        "use_vllm=true",
        "--max-prompt-length",
        "64",
        "--max-completion-length",
        "64",
    ]
    done = refused(
        folder,
        *flags,
        "--hold",
        "vllm_max_model_length=100",
        says="vllm_max_model_length (100)",
        instead="64 + 64 = 128",
    )
    assert "must be at least" in done.err


def test_such_a_window_while_the_engine_is_only_one_choice(folder: Path) -> None:
    flags = ["--gpus", "cpu", "--space", "demo", "--hold", "vllm_max_model_length=30"]
    refused(folder, *flags, says="vllm_max_model_length (30)", instead="another value")


def test_such_a_window_in_the_configuration(folder: Path) -> None:
    (folder / "train.yaml").write_text(
        "use_vllm: true\nvllm_mode: colocate\nvllm_max_model_length: 100\nmax_completion_length:"
        " 64\n"
    )
    flags = ["--gpus", "cpu", "--config", "train.yaml", "--max-prompt-length", "64"]
    refused(
        folder,
        *flags,
        says="train.yaml can't be trained as it is",
        instead="vllm_max_model_length (100)",
    )


def test_an_empty_space(folder: Path) -> None:
    refused(
        folder,
        "--gpus",
        "cpu",
        "--global-batch",
        "7",
        says="holds no legal candidate",
        instead="--search",
    )
    (folder / "space.yaml").write_text(
        "about: x\nmethod: grpo\nframework: trl\nobjective: preference\nknobs: []\n"
    )
    refused(folder, "--space", "./space.yaml", says="no knobs", instead="List at least one knob")
    refused(
        folder, "--search", "num_generations=,", says="no value", instead="num_generations=V1,V2"
    )


def test_an_unknown_space(folder: Path) -> None:
    refused(folder, "--space", "grpo-wild", says="Unknown search space", instead="'grpo-wide'")


def test_a_space_of_another_method(folder: Path) -> None:
    refused(
        folder,
        "--space",
        "sft",
        "--method",
        "dpo",
        says="is for sft with trl, not for --method dpo",
        instead="leave out",
    )


def test_broken_yaml_with_its_place(folder: Path) -> None:
    (folder / "train.yaml").write_text("learning_rate: 1e-6\nnum_generations: [8\n")
    refused(
        folder,
        "--config",
        "train.yaml",
        says="train.yaml, line 3, column 1: broken YAML",
        instead="Mend that line",
    )


def test_an_unknown_key_with_its_place(folder: Path) -> None:
    (folder / "train.yaml").write_text("learning_rate: 1e-6\n\n  \nnum_generation: 8\n")
    refused(
        folder,
        "--config",
        "train.yaml",
        says="train.yaml, line 4, column 1",
        instead="'num_generations'",
    )


def test_a_bad_value_with_its_place(folder: Path) -> None:
    (folder / "train.yaml").write_text("learning_rate: fast\n")
    refused(
        folder,
        "--config",
        "train.yaml",
        says="train.yaml, line 1, column 1: learning_rate takes",
        instead="Correct the value",
    )


def test_a_configuration_that_is_not_there(folder: Path) -> None:
    refused(folder, "--config", "nope.yaml", says="no file 'nope.yaml'", instead="Check the path")


def test_a_broken_space_with_its_place(folder: Path) -> None:
    knob = "  - {name: beta, choices: [0.0], effect: magic, says: x}\n"
    (folder / "space.yaml").write_text(
        "about: x\nmethod: grpo\nframework: trl\nobjective: preference\nknobs:\n" + knob
    )
    refused(folder, "--space", "./space.yaml", says="space.yaml, line 6", instead="magic")


def test_an_output_folder_that_is_a_file(folder: Path) -> None:
    (folder / "taken").write_text("mine")
    refused(
        folder,
        "--gpus",
        "cpu",
        "--out",
        "taken",
        says="--out taken is a file",
        instead="--out autotune-out",
    )


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[object]:
    """Mounts a tiny tmpfs, read-only or full; only root may."""
    places: list[Path] = []

    def mount(options: str) -> Path:
        place = tmp_path / f"mount{len(places)}"
        place.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)],
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            pytest.skip(f"a tmpfs can't be mounted here, which takes root: {done.stderr.strip()}")
        places.append(place)
        return place

    yield mount
    for place in places:
        subprocess.run(["umount", str(place)], check=True)


def test_a_read_only_output_folder(folder: Path, mounted: object) -> None:
    place = mounted("size=64m,ro")  # type: ignore[operator]
    refused(
        folder,
        "--gpus",
        "cpu",
        "--out",
        str(place / "out"),
        says="can't be written: Read-only file system",
        instead="Give another folder",
    )


def test_a_full_output_folder(folder: Path, mounted: object) -> None:
    place = mounted("size=64k")  # type: ignore[operator]
    refused(
        folder,
        "--gpus",
        "cpu",
        "--out",
        str(place / "out"),
        says="0 MiB left",
        instead="Free some space",
    )
    (place / "filler").write_bytes(b"x" * (64 * 1024 - 4096))
    refused(folder, "--gpus", "cpu", "--out", str(place), says="--out", instead="another folder")


def test_a_folder_of_another_user(folder: Path) -> None:
    closed = folder / "closed"
    closed.mkdir(mode=0o500)
    refused(
        folder,
        "--gpus",
        "cpu",
        "--out",
        "closed/out",
        says="Permission denied",
        instead="Give another folder",
        launcher=bound_by_permissions(),
    )


def test_a_missing_extra(folder: Path) -> None:
    url = "postgresql+psycopg://nobody@localhost/none"
    script = (
        "import sys; sys.modules['psycopg'] = None; sys.modules['psycopg2'] = None\n"
        "from autotune.cli import main; main(sys.argv[1:])"
    )
    flags = [
        "run",
        "--model",
        "model",
        "--gpus",
        "cpu",
        "--space",
        "demo",
        "--storage",
        url,
        "--out",
        "out",
    ]
    done = subprocess.run(
        [sys.executable, "-c", script, *flags],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=120,
    )
    assert done.returncode == 2, done.stderr
    assert "needs the extra 'postgres'" in done.stderr
    assert f"pip install '{CLONE}[postgres]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_training_packages_missing_from_our_own_environment(folder: Path) -> None:
    # The interpreter is ours and has no TRL: nothing is found in it.
    script = (
        "from autotune.machine import environment\n"
        "environment._FUNCTIONS = 'def is_installed(name): return False'\n"
        "from autotune.cli import main; import sys; main(sys.argv[1:])"
    )
    flags = ["run", "--model", "model", "--gpus", "cpu"]
    done = subprocess.run(
        [sys.executable, "-c", script, *flags],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=60,
    )
    assert done.returncode == 2
    assert f"pip install '{CLONE}[train]'" in done.stderr


def test_a_storage_that_cant_be_opened(folder: Path) -> None:
    for url in ("sqlite:////nowhere/at/all/study.db", "nonsense", "oracle9://x/y"):
        done = autotune(
            "run",
            "--model",
            "model",
            "--gpus",
            "cpu",
            "--space",
            "demo",
            "--storage",
            url,
            "--out",
            "out",
            cwd=folder,
        )
        assert done.code == 2, done.err
        assert "can't be opened" in done.err and "sqlite:///path/to/study.db" in done.err
        assert "Traceback" not in done.err
        assert not (folder / "out").exists()


def test_resume_and_fresh_exclude_each_other(folder: Path) -> None:
    refused(
        folder, "--resume", "--fresh", says="--resume continues a study", instead="one of the two"
    )


def test_real_weights_that_are_not_here(folder: Path) -> None:
    refused(folder, "--weights", "real", says="needs the weights", instead="leave --weights out")


def test_an_adapter_rank_without_an_adapter(folder: Path) -> None:
    refused(
        folder,
        "--tuning",
        "full",
        "--lora-rank",
        "8",
        says="full tuning has none",
        instead="--tuning lora",
    )


def test_an_unknown_flag_and_an_unknown_command(folder: Path) -> None:
    refused(folder, "--bugdet", "5m", says="No such option '--bugdet'", instead="--budget")
    done = autotune("rnu", cwd=folder)
    assert done.code == 2 and "rnu" in done.err and "autotune --help" in done.err


def test_with_json_the_error_is_a_document_too(folder: Path) -> None:
    done = autotune("run", "--model", "model", "--gpus", "A100", "--json", cwd=folder)
    assert done.code == 2
    assert done.document["status"] == "error"
    assert done.document["error"]["exit_code"] == 2
    assert "A100-40G or A100-80G" in done.document["error"]["way_out"]
