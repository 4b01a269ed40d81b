"""Logs of labels.yaml, each created by running its script on this machine, under the conditions of
its label.

python tests/diagnosis/provoke/run.py [NAME ...] [--into FOLDER]

PROVOKE_FRAMEWORKS names a folder with the frameworks that need packages of their own (`frameworks:
true`): ray, verl, openrlhf, ms_swift, unsloth, loguru, wandb and IPython, as `pip install --no-deps
--target` installs them.

A log contains standard output and standard error together, from the launcher down. Paths and host
names of the machine are replaced, always in the same way; nothing else is changed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
LABELS = HERE.parent / "labels.yaml"
LOGS = HERE.parent / "logs"
LONGEST_BYTES = 60_000
SECONDS = 240
GROUPS = Path("/sys/fs/cgroup/memory")

STARTS = {
    "python": [sys.executable],
    "torchrun": [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        "2",
        "--master_port",
        "{port}",
    ],
    "accelerate": [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--multi_gpu",
        "--num_processes",
        "2",
        "--num_machines",
        "1",
        "--mixed_precision",
        "no",
        "--dynamo_backend",
        "no",
        "--main_process_port",
        "{port}",
    ],
    "deepspeed": [
        sys.executable,
        "-m",
        "deepspeed.launcher.launch",
        "--world_info=eyJsb2NhbGhvc3QiOiBbMCwgMV19",
        "--master_addr=127.0.0.1",
        "--master_port={port}",
    ],
    "bash": ["bash"],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="which logs; all of them otherwise")
    parser.add_argument("--into", type=Path, default=LOGS)
    arguments = parser.parse_args()
    arguments.into.mkdir(parents=True, exist_ok=True)
    labels = yaml.safe_load(LABELS.read_text())["logs"]
    for label in labels:
        if not arguments.names or label["name"] in arguments.names:
            log = make(label)
            (arguments.into / f"{label['name']}.log").write_text(log)
            print(f"{label['name']}: {len(log)} characters", flush=True)
    return 0


def make(label: dict[str, Any]) -> str:
    """Return one log: a fresh folder, the script in it, its command under the label's
    conditions, and its whole output.
    """
    with tempfile.TemporaryDirectory(prefix="provoke-") as folder:
        task = Path(folder) / "job"
        task.mkdir(mode=0o777)
        Path(folder).chmod(0o755)
        script = HERE / label["script"]
        shutil.copy(script, task / script.name)
        shutil.copy(HERE / "parts.py", task / "parts.py")
        model = _model(Path(folder))
        command = [part.format(port=_free_port()) for part in STARTS[label.get("start", "python")]]
        command = _under(
            label.get("under") or {},
            task,
            [*command, script.name, *map(str, label.get("arguments") or [])],
        )
        environment = _environment(label, task, model)
        return shortened(scrubbed(_printed(command, task, environment), task, model))


def _printed(
    command: list[str],
    task: Path,
    environment: dict[str, str],
) -> str:
    """Return the output of the command and its children; none of them outlives it."""
    process = subprocess.Popen(
        command,
        cwd=task,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    output, _ = process.communicate()
    with contextlib.suppress(OSError):
        (GROUPS / f"provoke-{os.getpid()}").rmdir()
    return output.decode(errors="replace")


def _model(folder: Path) -> Path:
    """The tiny model, made once for all logs of this run."""
    cached = Path(tempfile.gettempdir()) / f"provoke-model-{os.getuid()}" / "Qwen2-tiny"
    if not (cached / "config.json").exists():
        from autotune.worker.synthetic import tiny_config, write_model_folder

        write_model_folder(cached, tiny_config(), weights=True)
    shutil.copytree(cached, folder / "models" / "Qwen2-tiny")
    return folder / "models" / "Qwen2-tiny"


def _environment(
    label: dict[str, Any],
    task: Path,
    model: Path,
) -> dict[str, str]:
    home = task.parent / "home"
    home.mkdir(exist_ok=True)
    inherited = {
        name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ
    }
    variables = {
        "HOME": str(home),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PROVOKE_MODEL": str(model),
        "DS_ACCELERATOR": "cpu",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "TMPDIR": str(task.parent),
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.environ.get("PROVOKE_FRAMEWORKS", "") if label.get("frameworks") else "",
        "TORCH_EXTENSIONS_DIR": "/tmp/provoke-extensions",
        "VLLM_NO_USAGE_STATS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    variables["PATH"] = f"{Path(sys.executable).parent}:{inherited.get('PATH', '')}"
    return {
        **inherited,
        **variables,
        **{name: str(value) for name, value in (label.get("environment") or {}).items()},
    }


def _under(
    limits: dict[str, Any],
    task: Path,
    command: list[str],
) -> list[str]:
    """Return the command in a shell that first removes the resources of the label: memory, disk,
    network, rights, time."""
    lines: list[str] = []
    if "data_kib" in limits:
        lines.append(f"ulimit -d {limits['data_kib']}")
    if "files" in limits:
        lines.append(f"ulimit -n {limits['files']}")
    if "tmpfs" in limits:
        lines.append(f"mkdir -p out && mount -t tmpfs -o size={limits['tmpfs']} tmpfs out")
    if "shm" in limits:
        lines.append(f"mount -t tmpfs -o size={limits['shm']} tmpfs /dev/shm")
    if "memory" in limits:
        group = GROUPS / f"provoke-{os.getpid()}"
        limit = limits["memory"]
        lines.append(
            f"mkdir -p {group}; echo {limit} > {group}/memory.limit_in_bytes; echo $$ >"
            f" {group}/cgroup.procs"
        )
    if limits.get("read_only"):
        lines.append("mkdir -p out && mount -t tmpfs -o ro tmpfs out")
    shell_line = " ".join(_quoted(part) for part in command)
    if "seconds" in limits:
        shell_line = (
            f"timeout --signal={limits.get('signal', 'TERM')} {limits['seconds']} {shell_line}"
        )
    if limits.get("user"):
        lines.append("mkdir -p out && chmod 700 out && chmod -R a+rX ..")
        lines += ["chmod 000 ../models/*/*"] if limits.get("locked_model") else []
        shell_line = f"setpriv --reuid={limits['user']} --clear-groups {shell_line}"
    lines.append(
        shell_line
        if limits.get("shell", True) is False
        else f"{shell_line}\nstatus=$?\nexit $status"
    )
    spaces = ["--mount"] if {"tmpfs", "shm", "read_only"} & set(limits) else []
    spaces += ["--net"] if limits.get("no_network") else []
    shell = ["bash", "-c", "\n".join(lines)]
    return ["unshare", *spaces, "--", *shell] if spaces else shell


def _quoted(word: str) -> str:
    return "'" + word.replace("'", "'\\''") + "'"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def scrubbed(
    text: str,
    task: Path,
    model: Path,
) -> str:
    """Without this machine's paths and names."""
    import sysconfig

    frameworks = os.environ.get("PROVOKE_FRAMEWORKS", "")
    paths = {
        str(model.parent): "/data/models",
        str(task): "/job",
        str(task.parent / "home"): "/home/user",
        str(task.parent): "/tmp",
        **({frameworks: "/venv/lib/python3.11/site-packages"} if frameworks else {}),
        sysconfig.get_paths()["purelib"]: "/venv/lib/python3.11/site-packages",
        sys.prefix: "/venv",
        sys.base_prefix: "/usr",
        str(HERE.parents[2]): "/src",
    }
    for real, shown in sorted(paths.items(), key=lambda pair: -len(pair[0])):
        text = text.replace(real, shown)
    for name in {socket.gethostname(), socket.getfqdn(), os.uname().nodename} - {"localhost", ""}:
        text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", "node-0", text)
    text = re.sub(r"\b(?!127\.|0\.|255\.)(?:\d{1,3}\.){3}\d{1,3}\b", "10.0.0.2", text)
    text = re.sub(r"/tmp/provoke-model-\d+", "/data/models", text)
    return re.sub(
        r"https?://(?!huggingface\.co|docs\.|pytorch\.org|github\.com|127\.0\.0\.1|wandb\.ai)"
        r"[\w.:-]+",
        "http://host",
        text,
    )


def shortened(text: str) -> str:
    """Progress bars redraw one line: its last drawing stays. Of what is still too long, the
    middle goes.
    """
    text = "\n".join(
        line.rsplit("\r", 1)[-1] if line.endswith("it/s]") else line for line in text.split("\n")
    )
    if len(text) <= LONGEST_BYTES:
        return text
    half = LONGEST_BYTES // 2
    return f"{text[:half]}\n...\n{text[-half:]}"


if __name__ == "__main__":
    raise SystemExit(main())
