"""Commands of README and docs, run here or by the test that is named. A command without a row
fails.

Each is run as typed, in a folder with the files that the pages assume. Parts that this machine
lacks are replaced, and the row states the replacement: a tiny model and a CPU where a page names
GPUs, a file where it names a server.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from tests.cli.command import environment
from tests.e2e.demo import demo_flags
from tests.light_environment import light_python_path
from tests.pipeline import make_project
from tests.test_documents import BLOCKS, COMMANDS, ROOT

HERE = Path(__file__).resolve().parent
LINES = sorted({line for _, line in COMMANDS})
CPU = "--gpus cpu --memory-limit 2G --space demo --hold use_vllm=false --max-probes 1"
PREFLIGHT = {"train.yaml": "train.yaml --gpus cpu --memory-limit 2G"}
TINY = {"Qwen2.5-7B": "model"}


@dataclass(frozen=True, kw_only=True)
class Run:
    """Way to run one line."""

    code: int = 0
    says: str = ""
    """Words of what it prints."""

    instead: Mapping[str, str] = field(default_factory=dict)
    """Parts that this machine lacks or has no time for, with their replacements; the first
    occurrence of each.
    """

    before: Callable[[Path], None] = lambda folder: None

    is_long: bool = False
    """Whether another slow test measures the same way of a run: `make test-long` types this one."""

    def typed(self, line: str) -> str:
        for original, replacement in self.instead.items():
            assert original in line, f"{line!r} does not say {original!r} any more"
            line = line.replace(original, replacement, 1)
        return line


def _script(name: str, suffix: str = "") -> Callable[[Path], None]:
    def lay_down(folder: Path) -> None:
        (folder / "train.py").write_text((HERE / name).read_text() + suffix)

    return lay_down


def _failing(folder: Path) -> None:
    (folder / "train.py").write_text(
        "raise RuntimeError('CUDA out of memory. Tried to allocate 2.00 GiB')\n"
    )


def _own_command(folder: Path) -> None:
    text = (HERE / "frameworks" / "scripts" / "plain_torch.py").read_text()
    (folder / "train.py").write_text(
        text.replace('"--log", type=Path', '"--log", type=Path, default=Path("speed.jsonl")')
    )


def _launch_script(folder: Path) -> None:
    (folder / "run.sh").write_text(
        "CONFIG=train.yaml\ntrl grpo --config $CONFIG --num_generations 4\n"
    )


def _for_gpus(folder: Path) -> None:
    """The same configuration, for where there are some."""
    lines = (folder / "train.yaml").read_text().splitlines()
    (folder / "gpus.yaml").write_text(
        "\n".join(line for line in lines if not line.startswith(("use_cpu", "bf16"))) + "\n"
    )


def _prices(folder: Path) -> None:
    """The price list that the page shows."""
    page = (ROOT / "docs" / "predictions.md").read_text()
    block = re.search(r"```yaml\n(currency:.*?)```", page, re.DOTALL)
    assert block is not None
    (folder / "prices.yaml").write_text(block[1])


def _never_trained(folder: Path) -> None:
    shutil.rmtree(folder / "out", ignore_errors=True)


def _with_a_study(folder: Path) -> None:
    if not (folder / "autotune-out" / "study.db").exists():
        _really(FIRST, SLOW[FIRST], folder, seconds=SECONDS)


def _with_an_export(folder: Path) -> None:
    (folder / "elsewhere.db").unlink(missing_ok=True)
    if not (folder / "study.json").exists():
        export = "autotune study export --storage sqlite:///autotune-out/study.db study.json"
        _really(export, SLOW[export], folder, seconds=SECONDS)


FIRST = "autotune run --config train.yaml --memory-limit 38G"
"""It writes `autotune-out` with a study in it."""

SECONDS = 400.0

QUICK = {
    "autotune diagnose train.log": Run(says="optimizer"),
    "autotune diagnose --check --python .venv/bin/python": Run(says="known conflict"),
    "autotune report autotune-out": Run(says="Written: autotune-out/report.html"),
    "autotune show gpus": Run(says="A100-40G"),
    "autotune show models": Run(says="Qwen2.5-7B"),
    "autotune show spaces": Run(says="grpo-wide"),
    "autotune show knobs --space grpo-wide": Run(says="num_generations"),
    "autotune completion bash > ~/.local/share/bash-completion/completions/autotune": Run(),
    "autotune completion zsh > ~/.zfunc/_autotune": Run(),
    "autotune completion fish > ~/.config/fish/completions/autotune.fish": Run(),
    **{
        f"make {target}": Run(
            instead={f"make {target}": f"make -C {ROOT} --dry-run {target}"}, says="python"
        )
        for target in (
            "test",
            "test-all",
            "test-long",
            "step-models",
            "first-light",
            "first-light MINUTES=30",
            "first-light-predictions GPU=H100",
            "first-light-emulated GPU=H100",
        )
    },
}
"""Commands that take a second or two. For targets that run for hours, make prints their commands;
their parts are separate tests."""

SLOW = {
    FIRST: Run(
        instead={"38G": "2G --gpus cpu --hold use_vllm=false --max-probes 2"},
        says="autotune-out/recommended.yaml",
    ),
    "autotune study export --storage sqlite:///autotune-out/study.db study.json": Run(
        before=_with_a_study, says="Written: study.json"
    ),
    "autotune study export --storage postgresql://me@db/autotune study.json": Run(
        instead={"postgresql://me@db/autotune": "sqlite:///autotune-out/study.db"},
        before=_with_a_study,
        says="study.json",
    ),
    "autotune study import --storage postgresql://me@db/autotune study.json": Run(
        instead={"postgresql://me@db/autotune": "sqlite:///elsewhere.db"},
        before=_with_an_export,
        says="trials",
    ),
    "autotune run --model Qwen2.5-0.5B --gpus local --budget 20m": Run(
        instead={"Qwen2.5-0.5B": "model", "--gpus local": f"{CPU} --out three"},
        says="recommended.yaml",
        is_long=True,  # e2e/test_demo.py
    ),
    "autotune run --model ./my-model --gpus 2xcpu --search num_generations=4,8": Run(
        instead={
            "--gpus 2xcpu": (
                CPU.replace("--gpus cpu --memory-limit 2G", "--gpus 2xcpu --memory-limit 4G")
                + " --out four"
            )
        },
        says="recommended.yaml",
    ),
    "autotune run --model ./small --gpus cpu --slots 2": Run(
        instead={"--gpus cpu": f"{CPU} --out five"},
        says="recommended.yaml",
        is_long=True,  # executors/test_local.py
    ),
    (
        "autotune run --framework command --metrics speed.jsonl --search batch=1,2,4"
        " -- torchrun train.py --bs {batch}"
    ): Run(
        instead={"batch=1,2,4": "batch=1,2 --gpus cpu --memory-limit 2G --budget 6m --out six"},
        before=_own_command,
        says="launch.sh",
    ),
    "autotune run --from-command run.sh --gpus local": Run(
        instead={"--gpus local": f"{CPU} --out seven"},
        before=_launch_script,
        says="changed-run.sh",
    ),
    "autotune run --script train.py --memory-limit 38G -- --learning_rate 1e-6": Run(
        instead={
            "--memory-limit 38G": f"{CPU} --out eight",
            "1e-6": "1e-6 --output_dir runs --model_name_or_path model --max_steps 1 --bf16 false",
        },
        before=_script("own_scripts/parsed.py"),
        says="eight/",
        is_long=True,  # e2e/test_own_script.py
    ),
    # Where the GPUs are not, it is the prediction that runs.
    "autotune run --model Qwen2.5-7B --gpus 2xA100-40G": Run(
        instead={**TINY, "2xA100-40G": "2xA100-40G --space demo --out nine"},
        says="Predicted, nothing was measured.",
    ),
    "autotune run --model Qwen2.5-7B --gpus 2xA100-40G --slots 2": Run(
        instead={**TINY, "2xA100-40G": "2xA100-40G --space demo --out ten"},
        says="Predicted, nothing was measured.",
        is_long=True,  # the one above
    ),
    (
        "autotune predict --config train.yaml --gpus A100-40G"
        " --unknown per_device_train_batch_size=1,8"
    ): Run(
        instead={"train.yaml": "gpus.yaml"},
        before=_for_gpus,
        says="fits",
    ),
    "autotune predict --config train.yaml --gpus A100-80G --set per_device_train_batch_size=16": (
        Run(
            instead={"train.yaml": "gpus.yaml"},
            before=_for_gpus,
            says="fits",
            is_long=True,  # cli/test_predict.py
        )
    ),
    "autotune predict --model Llama-3.1-8B --gpus 4xH100 --tuning full --set sharding=zero3": Run(
        says="predicted"
    ),
    "autotune predict --model Qwen2.5-7B --gpus 2xA100-40G": Run(says="predicted"),
    "autotune solve max_completion_length --model Qwen2.5-7B --gpus A100-40G": Run(
        instead=TINY, says="surely fits"
    ),
    "autotune solve per_device_train_batch_size --config train.yaml --gpus 2xA100-80G": Run(
        instead={"train.yaml": "gpus.yaml"},
        before=_for_gpus,
        says="surely fits",
        is_long=True,  # the one above, and cli/test_solve.py
    ),
    "autotune solve gpus --price prices.yaml --model Qwen2.5-7B": Run(
        instead=TINY,
        before=_prices,
        says="cheapest per hour",
        is_long=True,  # cli/test_solve.py
    ),
    "autotune diagnose train.log --config train.yaml --gpus 2xA100-40G": Run(says="optimizer"),
    "torchrun --nproc_per_node 2 train.py 2>&1 | tee train.log | autotune diagnose -": Run(
        before=_failing, says="memory"
    ),
    "autotune preflight train.yaml --memory-limit 38G --dry-run": Run(
        instead={"--memory-limit 38G": "--gpus cpu --memory-limit 2G"}, says="fits"
    ),
    "autotune preflight train.yaml -- trl grpo --config train.yaml": Run(
        instead=PREFLIGHT, says="train_runtime"
    ),
    "autotune preflight train.yaml --tune -- trl grpo --config train.yaml": Run(
        instead=PREFLIGHT,
        before=_never_trained,
        says="train_runtime",
        is_long=True,  # preflight/test_preflight.py
    ),
    "autotune guard train.yaml -- trl grpo --config train.yaml": Run(
        instead={"guard": "guard --gpus cpu --memory-limit 2G"}, says="0 restarts"
    ),
    "autotune guard train.yaml --resume -- trl grpo --config train.yaml": Run(
        instead={"guard": "guard --gpus cpu --memory-limit 2G"},
        says="0 restarts",
        is_long=True,  # guard/test_requeued.py
    ),
    "autotune guard --values micro=8,4,2 -- python train.py --micro {micro}": Run(
        instead={"python train.py": "true"}, says="0 restarts"
    ),
    (
        "autotune guard --values micro=8,4,2 --values accumulate=1,2,4"
        " --checkpoints 'out/step_{step}' -- python train.py --micro {micro}"
        " --accumulate {accumulate} --resume {checkpoint}"
    ): Run(instead={"python train.py": "true"}, says="0 restarts"),
    "pip install .": Run(
        instead={"install .": f"install --dry-run --no-deps --no-build-isolation {ROOT}"},
        says="grpo-autotune",
    ),
    "pip install '.[train,vllm]'": Run(
        instead={"install '.": f"install --dry-run --no-deps --no-build-isolation '{ROOT}"},
        says="grpo-autotune",
    ),
    "pip install '.[train,vllm,ray]'": Run(
        instead={"install '.": f"install --dry-run --no-deps --no-build-isolation '{ROOT}"},
        says="grpo-autotune",
    ),
    **{
        f"python -m pytest -q -m gpu tests/gpu/{name}.py": Run(
            instead={"tests/gpu": f"--collect-only --rootdir {ROOT} {ROOT}/tests/gpu"},
            says=f"{name}.py",
        )
        for name in ("test_probes", "test_limits", "test_committed")
    },
}

OTHER_TESTS = {
    "autotune run --model .demo/model --gpus cpu --space demo --global-batch 64"
    " --memory-limit 1150M --budget 4m": "e2e/test_demo.py::demo",
    (
        "autotune predict --model Qwen2.5-7B --gpus A100-40G --set gradient_checkpointing=false"
        " --set per_device_train_batch_size=4"
    ): ("test_documents.py::test_the_prediction_that_a_page_shows_is_what_is_predicted"),
    "autotune run --model Qwen2.5-7B --gpus 2xA100-40G --executor ray --address 10.0.0.1:6379": (
        "test_clusters.py::test_the_one_for_slurm_measures_on_a_cluster_of_ray"
    ),
    "autotune run ... --storage postgresql://me@db/autotune --study qwen --resume": (
        "search/test_postgres.py::test_three_drivers_share_a_study_and_measure_nothing_twice"
    ),
    "autotune predict --model Qwen2.5-7B --gpus 2xA100-40G --map map.html": (
        "report/html/test_map_in_a_browser.py"
        "::test_the_copied_command_predicts_the_figures_of_the_page"
    ),
    "autotune predict --from-command launch.sh --gpus 8xH100-80G --explain": (
        "cli/test_explain.py::test_explain_lists_settings_and_json_has_them"
    ),
    "autotune rehearse --gpus 2xA100-40G -- torchrun --nproc-per-node 2 train.py": (
        "emulator/test_rehearsal.py::test_a_command_that_fits_ends_with_its_peaks_by_phase"
    ),
    "autotune rehearse --gpus L4 --limit 4GiB --vary micro=1,4,16 -- python loop.py --micro 1": (
        "emulator/test_rehearsal.py::test_several_values_end_with_a_table"
    ),
    "autotune rehearse --gpus L4 --limit 20GiB --vary micro=1,2,4 -- python train.py --micro 1": (
        "emulator/test_rehearsal.py::test_several_values_end_with_a_table"
    ),
    "autotune rehearse --gpus 4xA100-80G -- torchrun --nproc-per-node 4 train.py": (
        "emulator/test_rehearsal.py::test_each_rank_of_a_launcher_is_told_in_the_document"
    ),
    "autotune rehearse --gpus A100-40G --python .venv/bin/python -- bash launch.sh": (
        "emulator/test_rehearsal.py"
        "::test_a_command_that_does_not_fit_ends_with_its_error_and_its_place"
    ),
    "autotune predict --model Qwen2.5-7B --gpus 2xA100-40G --check --python .venv/bin/python": (
        "emulator/test_prediction_check.py::test_one_configuration_on_emulated_cards"
    ),
    "autotune run --model Qwen2.5-7B --gpus 2xA100-40G --mode emulate --python .venv/bin/python": (
        "emulator/test_emulated_search.py"
        "::test_a_search_on_emulated_cards_and_the_run_that_it_recommends"
    ),
    "autotune dashboard autotune-out": (
        "test_documents_run.py::test_the_dashboard_is_served_until_it_is_interrupted"
    ),
    "make demo": "e2e/test_demo.py::demo",
    "xdg-open demo-out/report.html": "e2e/test_demo.py::test_its_report_opens_in_a_browser",
}


def test_no_command_is_passed_over_and_no_row_is_left_over() -> None:
    assert sorted({*QUICK, *SLOW, *OTHER_TESTS}) == LINES


@pytest.mark.parametrize("test", sorted(set(OTHER_TESTS.values())))
def test_the_test_that_is_named_is_there(test: str) -> None:
    file, _, name = test.partition("::")
    assert re.search(rf"^def {name}\(", (HERE / file).read_text(), re.MULTILINE)


def test_the_picture_of_the_readme_shows_the_command_above_it() -> None:
    commands = [block.text.strip() for block in BLOCKS if block.page.name == "README.md"]
    line = " ".join(["autotune run --model .demo/model", *demo_flags()])
    assert line in commands
    assert line.replace(" ", "&#160;") in (ROOT / "docs" / "pictures" / "terminal.svg").read_text()


def test_the_verdict_in_the_readme_is_what_its_first_command_prints() -> None:
    """Figures included: they come from a step of the package."""
    readme = (ROOT / "README.md").read_text()
    first = next(block for block in BLOCKS if block.page.name == "README.md").text.strip()
    program = first.replace("autotune", f"{sys.executable} -m autotune", 1)
    done = subprocess.run(
        program,
        shell=True,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[0] in readme


@pytest.fixture(scope="module", name="folder")
def what_the_pages_take_for_granted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The answer of an earlier run, an environment, and the programs that are typed."""
    folder = tmp_path_factory.mktemp("pages")
    (folder / ".venv").symlink_to(sys.prefix)
    shutil.copytree(ROOT / "examples" / "tiny-qwen2-on-a-cpu", folder / "autotune-out")
    for shells in (
        ".local/share/bash-completion/completions",
        ".zfunc",
        ".config/fish/completions",
    ):
        (folder / shells).mkdir(parents=True)
    (folder / "bin").mkdir()
    for name, module in (
        ("autotune", "autotune"),
        ("python", ""),
        ("pip", "pip"),
        ("torchrun", "torch.distributed.run"),
    ):
        interpreter = f'"{sys.executable}" -m {module}' if module else f'"{sys.executable}"'
        (folder / "bin" / name).write_text(f'#!/bin/sh\nexec {interpreter} "$@"\n')
        (folder / "bin" / name).chmod(0o755)
    return folder


@pytest.fixture(scope="module", name="project")
def with_a_model(folder: Path) -> Path:
    """A model under the names that pages give it, data and a configuration too."""
    make_project(folder)
    for name in ("my-model", "small"):
        (folder / name).symlink_to("model")
    return folder


def _environment(folder: Path) -> dict[str, str]:
    programs = os.pathsep.join(
        [str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
    )
    folders = {
        "HOME": str(folder),
        "XDG_DATA_HOME": str(folder / "data"),
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    return environment(
        PATH=programs,
        PYTHONPATH=light_python_path(ROOT),
        **folders,
    )


def _really(
    line: str,
    run: Run,
    folder: Path,
    seconds: float,
) -> None:
    shutil.copy(HERE / "diagnosis" / "logs-third" / "eight-bit-managed.log", folder / "train.log")
    run.before(folder)
    command = ["bash", "-c", run.typed(line)]
    done = subprocess.run(
        command,
        cwd=folder,
        env=_environment(folder),
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    output = done.stdout + done.stderr
    assert done.returncode == run.code, output[-4000:]
    assert run.says in output, output[-4000:]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("line", QUICK)
def test_it_really_runs(line: str, folder: Path) -> None:
    _really(line, QUICK[line], folder, seconds=200)
    written = line.partition("> ~/")[2]
    assert not written or "autotune" in (folder / written).read_text()


def _parameter(line: str) -> ParameterSet:
    marks = [pytest.mark.long] if SLOW[line].is_long else []
    return pytest.param(line, marks=marks, id=line)


@pytest.mark.slow
@pytest.mark.parametrize("line", [_parameter(line) for line in SLOW])
def test_it_really_runs_and_takes_its_time(line: str, project: Path) -> None:
    _really(line, SLOW[line], project, seconds=SECONDS)


@pytest.mark.slow
def test_the_dashboard_is_served_until_it_is_interrupted(project: Path) -> None:
    _with_a_study(project)
    command = ["bash", "-c", "exec autotune dashboard autotune-out --port 0"]
    with subprocess.Popen(
        command,
        cwd=project,
        env=_environment(project),
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=_hears_interrupts,
    ) as served:
        giving_up = threading.Timer(120, served.kill)
        giving_up.start()
        assert served.stdout is not None
        url = re.search(r"http://127\.0\.0\.1:\d+/dashboard", served.stdout.readline())
        assert url is not None
        with urllib.request.urlopen(url[0], timeout=60) as page:
            assert page.status == 200
        served.send_signal(signal.SIGINT)
        assert served.wait(timeout=60) == 0
        giving_up.cancel()


def _hears_interrupts() -> None:
    """Whatever is started in a shell's background is deaf to them, and so is what it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_a_row_that_says_what_no_page_says_any_more_fails() -> None:
    with pytest.raises(AssertionError, match="does not say"):
        dataclasses.replace(Run(), instead={"--gpus local": "--gpus cpu"}).typed(
            "autotune run --gpus cpu"
        )
