"""How a TRL run is spread over its GPUs: the part of it that TRL leaves to accelerate's launcher and to the environment.

Settings that are no key of TRL's stand here, each under the name of its owner: accelerate's (`offload_optimizer_device`,
`offload_param_device`, `fsdp_offload_params`), torch's (`PYTORCH_CUDA_ALLOC_CONF`), and two of autotune's own, `sharding` and
`server_gpus`, for which the launcher has no single word.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from autotune.candidate import KnobValue

DEEPSPEED: Mapping[str, int] = {"zero1": 1, "zero2": 2, "zero3": 3}
"""ZeRO's stages by the name that `sharding` takes."""

FSDP: Mapping[str, int] = {"fsdp1": 1, "fsdp2": 2}
SHARDINGS = ("none", "ddp", *DEEPSPEED, *FSDP)
PARTS_OF_WEIGHTS = frozenset({"zero3", *FSDP})
"""Under these no rank holds the whole model."""

OFFLOADS = ("offload_optimizer_device", "offload_param_device")
OFFLOAD_DEVICES = ("none", "cpu")
ENVIRONMENT = ("PYTORCH_CUDA_ALLOC_CONF",)
"""Variables that must stand before CUDA starts; a knob's name is the variable's."""

NESTED = ("gradient_checkpointing_kwargs.use_reentrant",)
"""Keys inside a setting of TRL's that is a mapping, written with a dot."""

LAUNCH = ("sharding", "server_gpus", *OFFLOADS, "fsdp_offload_params", *ENVIRONMENT)
"""All of them: nothing of it is written into TRL's own file."""

PLAIN: Mapping[str, KnobValue] = {"sharding": "ddp", **dict.fromkeys(OFFLOADS, "none"), "fsdp_offload_params": False}
"""What a launch without a word about it does."""

Settings = Mapping[str, object]


def sharding_of(settings: Settings, ranks: int) -> str:
    """The named one; a copy on every rank unless another is named."""
    named = settings.get("sharding")
    if isinstance(named, str) and named not in ("none", "ddp"):
        return named
    return "ddp" if ranks > 1 else "none"


def with_server(settings: Settings) -> bool:
    return bool(settings.get("use_vllm")) and settings.get("vllm_mode") == "server"


def server_gpus(settings: Settings) -> int:
    """GPUs that vLLM's own server has to itself: one unless told otherwise, none where there is no server."""
    named = settings.get("server_gpus", 1)
    return named if with_server(settings) and isinstance(named, int) else 0


def ranks_of(settings: Settings, gpus: int) -> int:
    """Processes that train: one for each GPU that the server leaves."""
    return gpus - server_gpus(settings)


_READERS: Mapping[str, Callable[[Settings], bool]] = {
    "server_gpus": with_server,
    "offload_optimizer_device": lambda settings: settings.get("sharding") in DEEPSPEED,
    "offload_param_device": lambda settings: settings.get("sharding") == "zero3",
    "fsdp_offload_params": lambda settings: settings.get("sharding") in FSDP,
    "ds3_gather_for_generation": lambda settings: settings.get("sharding") == "zero3",
    "vllm_tensor_parallel_size": lambda settings: not with_server(settings),
    "gradient_checkpointing_kwargs.use_reentrant": lambda settings: bool(settings.get("gradient_checkpointing")),
    **dict.fromkeys(ENVIRONMENT, lambda _: True),
}
"""When anything reads a setting that is not always read."""


def matters(name: str, settings: Settings) -> bool:
    """What nothing reads would tell equal candidates apart."""
    reader = _READERS.get(name)
    return reader is None or reader(settings)


def load_part(settings: Mapping[str, KnobValue]) -> dict[str, KnobValue]:
    """What processes must be started anew for."""
    named = {name: settings[name] for name in LAUNCH if settings.get(name) is not None}
    return {name: value for name, value in named.items() if value != PLAIN.get(name) and value != "none"}


def nested(settings: Settings, given: Settings) -> dict[str, object]:
    """TRL's own mappings with the dotted keys among the settings in them, over what was given of them."""
    made: dict[str, object] = {}
    for name in NESTED:
        if settings.get(name) is not None:
            outer, _, inner = name.partition(".")
            before = made.get(outer, given.get(outer))
            made[outer] = {**(before if isinstance(before, Mapping) else {}), inner: settings[name]}
    return made


def environment_of(settings: Settings) -> dict[str, str]:
    """Variables that a run of these settings starts with."""
    return {name: str(settings[name]) for name in ENVIRONMENT if settings.get(name)}
