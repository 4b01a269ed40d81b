"""The catalogue's constants as estimates in bytes, for one GPU."""

from __future__ import annotations

from autotune.catalogue import Gpu
from autotune.catalogue.constants import constant
from autotune.prediction import Estimate
from autotune.units import MIB

HOPPER = 9


def estimate(name: str, unit: float = MIB) -> Estimate:
    """A constant of the catalogue in bytes; `unit` is what one of it is."""
    known = constant(name)
    return Estimate(value=round(known.value * unit), low=round(known.low * unit), high=round(known.high * unit))


def percent(name: str) -> Estimate:
    """A constant that is a share."""
    known = constant(name)
    return Estimate(value=known.value / 100, low=known.low / 100, high=known.high / 100)


def context(gpu: Gpu | None) -> Estimate:
    """The CUDA context and the kernels that are loaded into it: what a process takes outside torch's allocator."""
    if gpu is None or gpu.multiprocessors is None:
        bare = estimate("context_mib_unknown_gpu")
    else:
        bare = estimate("context_mib_per_multiprocessor", MIB * gpu.multiprocessors)
    return bare + estimate("kernels_mib")


def cublas_workspace(gpu: Gpu | None) -> int:
    """Bytes that torch allocates for one handle on one stream."""
    major = _major(gpu)
    large = major is not None and major >= HOPPER
    return int(estimate("cublas_workspace_mib_from_hopper_on" if large else "cublas_workspace_mib").value)


def communication(gpu: Gpu | None, ranks: int, communicators: int = 1) -> Estimate:
    """NCCL's buffers on each GPU."""
    if ranks < 2 or communicators < 1:
        return Estimate.exactly(0)
    linked = gpu is not None and gpu.link == "nvlink"
    if gpu is None or gpu.link is None:
        pcie, nvlink = estimate("nccl_mib_pcie"), estimate("nccl_mib_two_nvlink" if ranks == 2 else "nccl_mib_many_nvlink")
        one = Estimate(value=nvlink.value, low=pcie.low, high=nvlink.high)
    elif linked:
        one = estimate("nccl_mib_two_nvlink" if ranks == 2 else "nccl_mib_many_nvlink")
    else:
        one = estimate("nccl_mib_pcie")
    return one.scaled(communicators)


def _major(gpu: Gpu | None) -> int | None:
    if gpu is None or gpu.compute_capability is None:
        return None
    return int(gpu.compute_capability.split(".")[0])
