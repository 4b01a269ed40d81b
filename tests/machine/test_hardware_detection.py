from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.core.errors import BadInput, UnknownName
from autotune.core.units import GIB, MIB
from autotune.machine import host_memory
from autotune.machine.hardware_detection import gpu_named, hardware, recognise
from autotune.machine.nvml import Device

A100 = Device(name="NVIDIA A100-SXM4-40GB", memory_bytes=40960 * MIB)
H200 = Device(name="NVIDIA H200", memory_bytes=143771 * MIB)


@pytest.mark.parametrize("text", ["9" * 150 + "xA100-40G", "999999999xA100-40G", "100001xcpu"])
def test_more_devices_than_anything_has(text: str) -> None:
    with pytest.raises(BadInput, match="more than 100000 devices"):
        hardware(text, here=())


@pytest.mark.parametrize("text", ["9" * 5000 + "xA100-40G", "local" + "9" * 9000])
def test_a_text_that_no_name_is_as_long_as(text: str) -> None:
    with pytest.raises(BadInput, match="longer than any name"):
        hardware(text, here=())


@pytest.mark.parametrize(
    ("text", "count", "name"),
    [
        ("2xA100-40G", 2, "A100-40G"),
        ("A100-40G", 1, "A100-40G"),
        ("a100 40gb", 1, "A100-40G"),
        ("8 x h100", 8, "H100"),
        ("4090", 1, "RTX4090"),
    ],
)
def test_gpus_by_name(
    text: str,
    count: int,
    name: str,
) -> None:
    recognised = hardware(text, here=())
    assert (recognised.count, recognised.name, recognised.kind, recognised.here) == (
        count,
        name,
        "cuda",
        False,
    )
    assert recognised.memory_bytes > 20 * GIB


@pytest.mark.parametrize(
    ("text", "choices"),
    [
        ("A100", "A100-40G or A100-80G"),
        ("2xV100", "V100-16G or V100-32G"),
        ("RTX 3050", "RTX3050-4G"),
    ],
)
def test_an_ambiguous_gpu_is_never_guessed(text: str, choices: str) -> None:
    with pytest.raises(BadInput, match=choices):
        hardware(text, here=())


@pytest.mark.parametrize(
    ("text", "count", "name", "gib"),
    [
        ("2xH300=280G", 2, "H300", 280),
        ("GPU=141G", 1, "GPU=141G", 141),
        ("H200=100G", 1, "H200", 100),
    ],
)
def test_a_card_by_its_memory_is_predicted_for(
    text: str,
    count: int,
    name: str,
    gib: int,
) -> None:
    recognised = hardware(text, here=(H200,))
    assert (recognised.count, recognised.name, recognised.memory_bytes, recognised.here) == (
        count,
        name,
        gib * GIB,
        False,
    )


@pytest.mark.parametrize(
    "text", ["GPU=", "=3G", "GPU=141", "GPU=x", "A100=40G", "GPU=-3G", "GPU=0G"]
)
def test_a_card_by_its_memory_needs_a_size_with_its_unit(text: str) -> None:
    with pytest.raises(BadInput):
        hardware(text, here=())


def test_an_ambiguous_name_stays_so_even_where_one_of_them_is_here() -> None:
    with pytest.raises(BadInput, match="A100-80G"):
        hardware("A100", here=(A100,))


def test_an_unknown_gpu_names_the_nearest() -> None:
    with pytest.raises(UnknownName, match="'H200'"):
        hardware("2xH201", here=())


@pytest.mark.parametrize("text", ["", "x", "2x", "0xcpu", "0xH100", "-1xH100"])
def test_invalid_hardware_is_refused(text: str) -> None:
    with pytest.raises(BadInput):
        hardware(text, here=())


def test_memory_is_the_drivers_figure() -> None:
    recognised = hardware("2xA100-40G", here=(A100, A100))
    assert recognised.here and recognised.memory_bytes == 40960 * MIB


def test_more_than_are_here() -> None:
    assert not hardware("4xA100-40G", here=(A100, A100)).here, (
        "it can be predicted, and not measured"
    )
    with pytest.raises(BadInput, match="this machine has 1"):
        hardware("2xlocal", here=(A100,))


def test_local_means_all_that_is_here() -> None:
    recognised = hardware("local", here=(H200, H200, H200))
    assert (recognised.count, recognised.name, recognised.here) == (3, "H200", True)
    with pytest.raises(BadInput, match=r"--gpus cpu .*like --gpus 2xA100-40G"):
        hardware("local", here=())


@pytest.mark.parametrize(
    ("text", "count", "name"),
    [
        ("NVIDIA A100-SXM4-40GB", 1, "A100-40G"),
        ("2xNVIDIA A100-SXM4-80GB", 2, "A100-80G"),
        ("NVIDIA H100 80GB HBM3", 1, "H100"),
        ("Tesla V100-SXM2-32GB", 1, "V100-32G"),
        ("NVIDIA A800-SXM4-80GB", 1, "A800-80G"),
        ("NVIDIA GeForce RTX 4090", 1, "RTX4090"),
        ("H100x8", 8, "H100"),
        ("rtx4090 x 2", 2, "RTX4090"),
        ("A100-80Gx4", 4, "A100-80G"),
        ("H800", 1, "H800"),
    ],
)
def test_the_drivers_names_and_a_count_behind_the_name(
    text: str,
    count: int,
    name: str,
) -> None:
    recognised = hardware(text, here=())
    assert (recognised.count, recognised.name) == (count, name)


def test_local_takes_a_gpu_that_the_catalogue_lacks() -> None:
    recognised = hardware("local", here=(Device(name="NVIDIA Future 9000", memory_bytes=96 * GIB),))
    assert (recognised.name, recognised.memory_bytes) == ("NVIDIA Future 9000", 96 * GIB)


@pytest.mark.parametrize("text", ["local", "A100-40G"])
def test_what_a_rehearsal_shows_is_emulated(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hardware(text, here=(A100,)).basis == "measured"
    monkeypatch.setenv("AUTOTUNE_EMULATED_MACHINE", "/tmp/machine")
    rehearsed = hardware(text, here=(A100,))
    assert rehearsed.basis == "emulated"
    assert str(rehearsed) == "emulated A100-40G"
    assert hardware("H100", here=(A100,)).basis == "predicted"


def test_local_refuses_a_mixture() -> None:
    with pytest.raises(BadInput, match="differ"):
        hardware("local", here=(A100, H200))


def test_cpu_ranks() -> None:
    recognised = hardware("2xcpu", here=(A100,))
    assert (recognised.kind, recognised.count, recognised.memory_is_shared) == ("cpu", 2, True)
    with pytest.raises(BadInput, match="cores"):
        hardware("5000xcpu", here=())


@pytest.mark.parametrize(
    ("driver_name", "mib", "name"),
    [
        ("NVIDIA A10", 23028, "A10"),
        ("NVIDIA A100-SXM4-40GB", 40960, "A100-40G"),
        ("NVIDIA A100 80GB PCIe", 81920, "A100-80G"),
        ("NVIDIA H100 80GB HBM3", 81559, "H100"),
        ("NVIDIA H100 PCIe", 81559, "H100-PCIE-80G"),
        ("NVIDIA H100 NVL", 95830, "H100-NVL-94G"),
        ("NVIDIA H200", 143771, "H200"),
        ("NVIDIA L4", 23034, "L4"),
        ("NVIDIA L40S", 46068, "L40S"),
        ("Tesla V100-SXM2-32GB", 32768, "V100-32G"),
        ("Tesla V100-SXM2-16GB", 16160, "V100-16G"),
        ("NVIDIA GeForce RTX 3050 Laptop GPU", 4096, "RTX3050-4G"),
        ("NVIDIA GeForce RTX 4090", 24564, "RTX4090"),
        ("NVIDIA GeForce RTX 4060 Ti", 16380, "RTX4060TI-16G"),
        ("NVIDIA GeForce RTX 4070", 12282, "RTX4070"),
        ("NVIDIA RTX 6000 Ada Generation", 49140, "RTX6000ADA"),
    ],
)
def test_gpus_are_recognised_by_name_and_memory(
    driver_name: str,
    mib: int,
    name: str,
) -> None:
    gpu = recognise(Device(name=driver_name, memory_bytes=mib * MIB))
    assert gpu is not None and gpu.name == name


@pytest.mark.parametrize(
    ("driver_name", "mib"),
    [
        ("NVIDIA GeForce RTX 4070 Ti", 12282),
        ("NVIDIA GeForce RTX 4070 SUPER", 12282),
        ("NVIDIA GeForce RTX 3090 Ti", 24564),
        ("NVIDIA GeForce RTX 4090 D", 24564),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 16376),
    ],
)
def test_a_sister_of_a_known_gpu_is_not_taken_for_it(driver_name: str, mib: int) -> None:
    assert recognise(Device(name=driver_name, memory_bytes=mib * MIB)) is None


def test_a_mig_slice_is_not_the_whole_gpu() -> None:
    assert recognise(Device(name="NVIDIA A100-SXM4-40GB", memory_bytes=10 * GIB)) is None
    assert gpu_named("A100-40G").memory_bytes == 40 * GIB


def test_machine_memory_is_at_most_the_machines() -> None:
    import psutil

    assert 0 < host_memory.machine_memory_bytes() <= psutil.virtual_memory().total


def test_a_cgroup_limit_of_a_parent_counts(tmp_path: Path) -> None:
    (tmp_path / "memory" / "jobs" / "mine").mkdir(parents=True)
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (tmp_path / "memory" / "jobs" / "memory.limit_in_bytes").write_text(f"{3 * GIB}\n")
    (tmp_path / "memory" / "jobs" / "mine" / "memory.limit_in_bytes").write_text(f"{5 * GIB}\n")
    cgroup = tmp_path / "cgroup"
    cgroup.write_text("3:cpu,cpuacct:/\n2:memory:/jobs/mine\n")
    assert host_memory.machine_memory_bytes(cgroup, tmp_path) == 3 * GIB
    (tmp_path / "jobs" / "mine").mkdir(parents=True)
    (tmp_path / "jobs" / "mine" / "memory.max").write_text("max\n")
    (tmp_path / "jobs" / "memory.max").write_text(f"{2 * GIB}\n")
    cgroup.write_text("0::/jobs/mine\n")
    assert host_memory.machine_memory_bytes(cgroup, tmp_path) == 2 * GIB


CGROUPS = [("memory.current", "inactive_file"), ("memory.usage_in_bytes", "total_inactive_file")]


@pytest.mark.parametrize(("usage", "stat"), CGROUPS)
def test_memory_of_a_pod_is_what_its_cgroup_leaves(
    tmp_path: Path,
    usage: str,
    stat: str,
) -> None:
    """The machine's free memory says nothing about a pod with a limit of its own."""
    version_2 = usage == "memory.current"
    root, pod = tmp_path, (tmp_path if version_2 else tmp_path / "memory") / "pod"
    pod.mkdir(parents=True)
    (pod / ("memory.max" if version_2 else "memory.limit_in_bytes")).write_text("1048576000\n")
    (pod / usage).write_text("1040000000\n")
    (pod / "memory.stat").write_text(f"anon 900000000\n{stat} 40000000\n")
    cgroup = tmp_path / "cgroup"
    cgroup.write_text("0::/pod\n" if version_2 else "2:memory:/pod\n")
    assert host_memory.available_memory_bytes(cgroup, root) == 1048576000 - 1040000000 + 40000000
    cgroup.write_text("0::/elsewhere\n")
    assert host_memory.available_memory_bytes(cgroup, root) > 0


def test_nvidia_smi_is_read_where_nvml_is_missing(tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\nfor i in 0 1; do echo $i, GPU-$i, 40960, NVIDIA A100-SXM4-40GB; done\n"
    )
    program.chmod(0o755)
    code = (
        "import sys; sys.modules['pynvml'] = None\n"
        "from autotune.machine import hardware_detection as found\n"
        "print(found.hardware('local'), [d.memory_bytes for d in found.gpus_here()])"
    )

    def ask(**variables: str) -> str:
        environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", **variables}
        environment.pop("CUDA_VISIBLE_DEVICES", None) if not variables else None
        return subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env=environment,
        ).stdout.strip()

    size = 40960 * MIB
    assert ask() == f"2xA100-40G [{size}, {size}]"
    assert ask(CUDA_VISIBLE_DEVICES="1") == f"A100-40G [{size}]"
    with pytest.raises(subprocess.CalledProcessError) as refused:
        ask(CUDA_VISIBLE_DEVICES="")
    assert "no NVIDIA GPU is visible" in refused.value.stderr
