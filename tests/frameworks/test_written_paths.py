"""Paths and names in written files: what a reader of the file gets is the text that was given,
and no comment ends early.
"""

from __future__ import annotations

import ast
import dataclasses
import os
import shlex
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from autotune.core.files import comment
from autotune.core.job import Model, Task
from autotune.frameworks import trainer
from autotune.frameworks.hydra_strings import quoted
from autotune.frameworks.trl.script_files import ScriptAdvice, how_to_apply
from autotune.report.output_folder import publish
from tests.frameworks.conftest import make_task
from tests.frameworks.stand_ins import case_of

ODD = [
    "it's",
    '"two"',
    "a  b",
    "x" * 200,
    "tab\there",
    "line\nbreak",
    "\r",
    "# no",
    ": {",
    "$(id)",
    "`id`",
    "\\",
    "\\n",
    "é",
    "\x85",
    "\u2028",
    "'''",
    '"""',
    "- ",
    "%",
    "!",
    "&a",
    "*a",
    "~",
    "null",
    "0x1F",
    "\x07",
    "\ufeff",
    "-x",
    ";",
    "{{",
    "}}",
    "[,]",
    "{out}",
    "${HOME}",
    "\\${x}",
]
TEXT = st.lists(
    st.one_of(
        st.sampled_from(ODD),
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0/"), max_size=8),
    ),
    min_size=1,
    max_size=4,
).map("".join)
PATH = TEXT.map(lambda text: f"/folder/{text}/end")
KNOBS = {
    "per_device_train_batch_size": 4,
    "num_generations": 8,
    "max_completion_length": 16,
    "max_prompt_length": 30,
}
FEW = settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def a_task(path: str, **workload: Any) -> Task:
    return make_task(
        model=Model(
            name=path,
            config={"max_position_embeddings": 4096},
            folder=Path(path),
            origin="x",
        ),
        **workload,
    )


@pytest.fixture
def stub(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A folder with a `python` that writes its arguments, as the environment of a script."""
    program = tmp_path / "bin" / "python"
    program.parent.mkdir()
    program.write_text('#!/bin/bash\nprintf "%s\\0" "$@" > "$SAID"\n')
    program.chmod(0o755)
    (program.parent / "python3").symlink_to(program)
    yield {
        **os.environ,
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "SAID": str(tmp_path / "said"),
        "LC_ALL": "C.UTF-8",
    }


def said_by(script: Path, stub: dict[str, str]) -> list[str]:
    done = subprocess.run(
        ["bash", str(script)],
        env=stub,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), script.read_text()
    return Path(stub["SAID"]).read_bytes().decode().split("\0")[:-1]


@given(TEXT)
def test_a_comment_is_one_line_for_yaml_and_for_the_shell(text: str) -> None:
    line = comment(text)
    assert line.endswith("\n") and len(line.splitlines()) == 1 and line.startswith("#")
    assert yaml.safe_load(f"{line}a: 1\n") == {"a": 1}


@given(TEXT)
@example("\x85")
@FEW
def test_trl_files_name_the_place_to_which_they_are_moved(text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        destination, task = Path("/folder") / text, a_task(f"/models/{text}")
        candidate = trainer("trl").complete(KNOBS, task)
        trainer("trl").write_files(candidate, task, Path(folder), destination)
        content = (Path(folder) / "recommended.yaml").read_bytes().decode()
        read, home = yaml.safe_load(content), destination.resolve()
        assert read["config_file"] == str(home / "accelerate.yaml") and read["dataset_name"] == str(
            home / "placeholder"
        )
        assert read["model_name_or_path"] == f"/models/{text}" and folder not in content
        assert (
            subprocess.run(["bash", "-n", str(Path(folder) / "launch.sh")], check=False).returncode
            == 0
        )


def test_a_long_folder_is_named_by_its_final_path(tmp_path: Path) -> None:
    out, task = tmp_path / ("a folder with spaces " * 9) / "it's: 'out'\n# here", make_task()
    candidate = trainer("trl").complete(KNOBS, task)
    publish(
        out,
        lambda *folders: trainer("trl").write_files(candidate, task, *folders),
        lambda files: {"files": files},
        str,
    )
    read = yaml.safe_load((out / "recommended.yaml").read_text())
    assert Path(read["config_file"]).is_file() and Path(read["dataset_name"]).is_dir()


@pytest.mark.parametrize("framework", ["verl", "openrlhf", "open-reasoner-zero"])
def test_a_command_line_carries_the_paths_as_they_are(
    framework: str,
    stub: dict[str, str],
    tmp_path: Path,
) -> None:
    writer, candidate, task = case_of(framework)

    @given(PATH, PATH)
    @FEW
    def check(model: str, dataset: str) -> None:
        workload = dataclasses.replace(
            task.workload,
            dataset=dataset,
            model=dataclasses.replace(task.workload.model, name=model, folder=Path(model)),
        )
        (script,) = writer.write_files(
            candidate, dataclasses.replace(task, workload=workload), tmp_path
        )
        arguments = said_by(script, stub)
        model = str(Path(model))
        expected = (model, dataset) if framework == "openrlhf" else (quoted(model), quoted(dataset))
        assert all(any(part in word for word in arguments) for part in expected), arguments

    check()


@pytest.mark.parametrize("name", ["swift", "openrlhf", "skyrl", "trl"])
def test_scripts_are_as_open_as_the_umask_says(name: str, tmp_path: Path) -> None:
    writer = trainer(name, "grpo")
    task = a_task(
        "/m",
        framework=name,
        method="grpo",
        python=Path("/venv/bin/python"),
    )
    before = os.umask(0o027)
    try:
        files = writer.write_files(
            writer.complete(KNOBS if name == "trl" else {}, task), task, tmp_path / "out"
        )
    finally:
        os.umask(before)
    modes = {file.stat().st_mode & 0o777 for file in files if file.suffix == ".sh"}
    assert modes == {0o750}


def test_swift_and_its_shell(stub: dict[str, str], tmp_path: Path) -> None:
    @given(PATH, PATH)
    @FEW
    def check(model: str, dataset: str) -> None:
        stub_python = Path(stub["PATH"].split(":")[0]) / "python"
        writer = trainer("swift", "sft")
        task = a_task(
            model,
            framework="swift",
            method="sft",
            dataset=dataset,
            python=stub_python,
        )
        paths = writer.write_files(writer.complete({}, task), task, tmp_path / "out")
        arguments = said_by(next(path for path in paths if path.name == "launch.sh"), stub)
        assert str(Path(model)) in arguments and dataset in arguments
        assert f"{tmp_path / 'out'}/output" in arguments

    check()


@given(PATH, PATH)
@FEW
def test_the_script_of_unsloth(model: str, dataset: str) -> None:
    writer = trainer("unsloth", "sft")
    task = dataclasses.replace(
        a_task(
            model,
            framework="unsloth",
            method="sft",
            dataset=dataset,
            tuning="qlora",
        )
    )
    launch = writer.launch(writer.complete({}, task), task)  # type: ignore[attr-defined]
    text = launch.files["train.py"]
    tree = ast.parse(text)
    literals = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    assert {str(Path(model)), dataset} <= literals
    assert not {type(node) for node in tree.body} - {
        ast.Expr,
        ast.Import,
        ast.ImportFrom,
        ast.Assign,
        ast.ClassDef,
        ast.If,
    }


def test_hydra_reads_the_text_back() -> None:
    """Samples, read by Hydra 1.3's own parser when they were recorded."""
    samples = {
        "/a b": "'/a b'",
        "/a'b": r"'/a\'b'",
        "a\\'b": r"'a\\\'b'",
        "a\\": r"'a\\'",
        "/a,b": "'/a,b'",
        "/é": "'/é'",
        "123": "'123'",
        "null": "'null'",
        "/${x}": r"'/\${x}'",
        r"/a\${x}'": r"'/a\\\${x}\''",
        "/{out}": "'/{out}'",
        "/plain/path-1.0_x": "/plain/path-1.0_x",
        "org/model": "org/model",
        "/a\\b": r"'/a\b'",
    }
    assert {text: quoted(text) for text in samples} == samples


def test_the_advice_to_patch_is_words_of_the_shell() -> None:
    advice = ScriptAdvice(changes={}, patched_file="/a b/$(id)/train.py")
    (line,) = how_to_apply(advice, "it's out")
    assert shlex.split(line.partition(": ")[2]) == [
        "patch",
        "-p1",
        "-d",
        "/a b/$(id)",
        "<",
        "it's out/recommended.patch",
    ]
