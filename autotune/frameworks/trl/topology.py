"""Distribution of a TRL run over its GPUs: settings of accelerate's launcher and of the environment.

These settings are not keys of TRL. Their names are accelerate's (`offload_optimizer_device`,
`offload_param_device`, `fsdp_offload_params`), torch's (`PYTORCH_CUDA_ALLOC_CONF`), or autotune's
own (`sharding`, `server_gpus`, `server_tensor_parallel_size`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from autotune.core.space import KnobValue
from autotune.frameworks.base import count_of

DEEPSPEED: Mapping[str, int] = {"zero1": 1, "zero2": 2, "zero3": 3}  # value of `sharding` -> ZeRO stage
FSDP: Mapping[str, int] = {"fsdp1": 1, "fsdp2": 2}
SHARDINGS = ("none", "ddp", *DEEPSPEED, *FSDP)

OFFLOADS = ("offload_optimizer_device", "offload_param_device")
OFFLOAD_DEVICES = ("none", "cpu")
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
OTHER_ALLOCATOR = "PYTORCH_ALLOC_CONF"
"""Newer name of the same variable: torch from 2.10 on prefers it, vLLM reads the older one only."""

ENVIRONMENT = (ALLOCATOR,)  # knobs that are environment variables, set before CUDA initialises
NESTED = ("gradient_checkpointing_kwargs.use_reentrant",)  # keys inside a mapping of TRL's, in dotted form
SERVER = ("server_gpus", "server_tensor_parallel_size")
LAUNCH = ("sharding", *SERVER, *OFFLOADS, "fsdp_offload_params", *ENVIRONMENT)  # settings that are left out of TRL's own file
PLAIN: Mapping[str, KnobValue] = {"sharding": "ddp", **dict.fromkeys(OFFLOADS, "none"), "fsdp_offload_params": False}
"""Defaults of a launch."""

Settings = Mapping[str, object]


def sharding_of(settings: Settings, ranks: int) -> str:
    """Return the named sharding; the default is DDP on several ranks."""
    named = settings.get("sharding")
    if isinstance(named, str) and named not in ("none", "ddp"):
        return named
    return "ddp" if ranks > 1 else "none"


def with_server(settings: Settings) -> bool:
    return bool(settings.get("use_vllm")) and settings.get("vllm_mode") == "server"


def server_gpus(settings: Settings) -> int:
    """Return the number of GPUs of vLLM's server: default 1, and 0 without a server."""
    return count_of({"server_gpus": 1, **settings}, "server_gpus") if with_server(settings) else 0


def server_parallel(settings: Settings) -> int:
    """Return the GPUs that split each layer of the server; by default all of its GPUs."""
    return count_of(settings, "server_tensor_parallel_size") or server_gpus(settings)


def ranks_of(settings: Settings, gpus: int) -> int:
    """Return the number of training processes: one per GPU, without those of the server."""
    return gpus - server_gpus(settings)


_CONDITIONS: Mapping[str, Callable[[Settings], bool]] = {
    **dict.fromkeys(SERVER, with_server),
    "offload_optimizer_device": lambda settings: settings.get("sharding") in DEEPSPEED,
    "offload_param_device": lambda settings: settings.get("sharding") == "zero3",
    "fsdp_offload_params": lambda settings: settings.get("sharding") in FSDP,
    "ds3_gather_for_generation": lambda settings: settings.get("sharding") == "zero3",
    "vllm_tensor_parallel_size": lambda settings: not with_server(settings),
    "gradient_checkpointing_kwargs.use_reentrant": lambda settings: bool(settings.get("gradient_checkpointing")),
}
"""Setting -> condition under which it has an effect."""


def is_read(name: str, settings: Settings) -> bool:
    """Return False for a setting without effect: it would separate equal candidates."""
    return name not in _CONDITIONS or _CONDITIONS[name](settings)


def load_part(settings: Mapping[str, KnobValue]) -> dict[str, KnobValue]:
    """Return the settings whose change requires new processes."""
    named = {name: settings[name] for name in LAUNCH if settings.get(name) is not None}
    return {name: value for name, value in named.items() if value != PLAIN.get(name) and value != "none"}


def nested(settings: Settings, given: Settings) -> dict[str, object]:
    """Return TRL's mappings with the dotted settings merged into the given values."""
    made: dict[str, object] = {}
    for name in NESTED:
        if settings.get(name) is not None:
            outer, _, inner = name.partition(".")
            before = made.get(outer, given.get(outer))
            made[outer] = {**(before if isinstance(before, Mapping) else {}), inner: settings[name]}
    return made


def environment_of(settings: Settings) -> dict[str, str]:
    """Return the environment variables of a run."""
    return {name: str(settings[name]) for name in ENVIRONMENT if settings.get(name)}
