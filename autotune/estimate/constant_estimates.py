"""Constants of the catalogue as estimates, for one GPU, and the communicators of NCCL that multiply one of them."""

from __future__ import annotations

from autotune.catalog import Gpu, constant, efficiency
from autotune.core.composition import Composition
from autotune.core.prediction import Estimate
from autotune.core.units import MIB

HOPPER = 9  # compute capability, major


def estimate(name: str, unit: float = MIB) -> Estimate:
    """Return a constant in bytes; `unit`: bytes of one."""
    known = constant(name)
    return Estimate(value=round(known.value * unit), low=round(known.low * unit), high=round(known.high * unit))


def percent(name: str) -> Estimate:
    """Return a constant in percent as a share."""
    known = constant(name)
    return Estimate(value=known.value / 100, low=known.low / 100, high=known.high / 100)


def offered(device_memory_bytes: int, gpu: Gpu | None) -> Estimate:
    """Memory that CUDA offers: the device's, less the driver's own part."""
    if gpu is not None and gpu.seen_by == "torch":
        return Estimate.exactly(device_memory_bytes)
    return Estimate.exactly(device_memory_bytes) - efficiency("driver_reserve_mib").scaled(MIB)


def context(gpu: Gpu | None) -> Estimate:
    """Bytes of the CUDA context and its loaded kernels, outside torch's allocator."""
    return bare_context(gpu) + estimate("kernels_mib")


def bare_context(gpu: Gpu | None) -> Estimate:
    """Bytes of the CUDA context of a process that runs no kernel."""
    if gpu is None or gpu.multiprocessors is None:
        return estimate("context_mib_unknown_gpu")
    return estimate("context_mib_per_multiprocessor", MIB * gpu.multiprocessors)


def cublas_workspace(gpu: Gpu | None) -> int:
    """Bytes that torch allocates per cuBLAS handle and stream."""
    known = gpu is not None and gpu.compute_capability is not None
    large = known and int(gpu.compute_capability.split(".")[0]) >= HOPPER  # type: ignore[union-attr]
    return int(estimate("cublas_workspace_mib_from_hopper_on" if large else "cublas_workspace_mib").value)


def communication(gpu: Gpu | None, ranks: int, count: int = 1) -> Estimate:
    """Bytes of the buffers of this many of NCCL's communicators on each GPU."""
    if ranks < 2 or count < 1:
        return Estimate.exactly(0)
    pcie, nvlink = estimate("nccl_mib_pcie"), estimate("nccl_mib_two_nvlink" if ranks == 2 else "nccl_mib_many_nvlink")
    if gpu is None or gpu.link is None:
        one = Estimate(value=nvlink.value, low=pcie.low, high=nvlink.high)
    else:
        one = nvlink if gpu.link == "nvlink" else pcie
    return one.scaled(count)


def communicators(composition: Composition) -> int:
    """Return the number of a training rank's communicators that carry anything: the first operation allocates their
    buffers. One that is created and never used has none (NCCL from 2.22 on, `runtimeConn` in its init.cc).

    torch's default one; one in which ZeRO-1 and ZeRO-2 reduce (ZeRO-3 uses the default one); for an engine under tensor
    parallelism its own and, in the trainer's process, one in which its prompts are gathered; the one with a server, to
    which weights are sent.
    """
    engine = composition.engine
    own = (composition.ranks > 1) + (composition.sharded_by in ("zero1", "zero2"))
    of_engine = 0 if engine is None or engine.tensor_parallel == 1 else 2 - engine.apart
    return max(composition.processes, own + of_engine + joins_server(composition))


def communicators_at_engine_start(composition: Composition) -> int:
    """Return the number when an engine in the trainer's process starts: the one with which ZeRO-3 loads its
    weights, and the engine's own. The first operation of the others comes later."""
    engine = composition.engine
    if engine is None or engine.apart:
        return communicators(composition)
    return (composition.sharded_by == "zero3") + (engine.tensor_parallel > 1)


def joins_server(composition: Composition) -> bool:
    """Return True if the trainer and a server, to which it sends weights, have a communicator."""
    return composition.generation == "server" and composition.split is not None
