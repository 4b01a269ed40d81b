"""Settings of a training that takes its completions from a server which its script starts."""

from __future__ import annotations

from dataclasses import replace

from autotune.core.user_script import LaunchScript
from autotune.frameworks.engine_servers import SHARE
from autotune.frameworks.swift_launches import engine_place
from autotune.frameworks.trl.server_launch import ServerLaunch
from autotune.frameworks.trl.user_config import UserConfig
from autotune.request.origins import Origin, Source

_MODE = "vllm_mode"
_SWIFT_NAMES = {
    "server_tensor_parallel_size": "vllm_tensor_parallel_size",
    "vllm_max_model_length": "vllm_max_model_len",
}
"""Setting of TRL's server -> ms-swift's, where it is another one."""

_ADDRESSES = ("vllm_server_host", "vllm_server_base_url")
"""Settings of a training that takes its completions from a server."""

SERVER_ASSUMED = (
    f"a server of vLLM on one GPU with {SHARE} of its memory, as `trl vllm-serve` starts it:"
    " --hold server_gpus=N and --hold vllm_gpu_memory_utilization=SHARE give its own"
)
ENGINE_APART = "vLLM on one GPU that does not train, as vllm_device of TRL before 0.16 has it"
"""Sentence about a server that no command here starts."""


def with_server(
    path: str,
    config: UserConfig,
    origins: dict[str, Origin],
    server: ServerLaunch | None,
) -> tuple[UserConfig, dict[str, Origin]]:
    """Return the settings with those of the server, if completions come from one."""
    settings = dict(config.settings)
    if not settings.get("use_vllm"):
        return config, origins
    assumed = list(config.assumed)
    new_names: list[str] = []
    if server is not None and _MODE not in settings:
        settings[_MODE] = "server"
        new_names.append(_MODE)
        assumed.append(
            f"{_MODE}=server, the default of TRL before 1.0: line {server.line} starts its server"
        )
    if settings.get(_MODE) != "server":
        return config, origins
    if server is None:
        if "server_gpus" not in settings:
            assumed.append(SERVER_ASSUMED)
        return replace(config, assumed=tuple(assumed)), origins
    origin = Origin(source=Source.FILE, place=path, line=server.line)
    settings.update(server.settings)
    new_names += dict(server.settings)
    config = replace(config, settings=settings, assumed=(*server.assumed, *assumed))
    return config, {**origins, **dict.fromkeys(new_names, origin)}


def with_rollout_server(
    launch: LaunchScript,
    config: UserConfig,
    origins: dict[str, Origin],
    server: ServerLaunch | None,
) -> tuple[UserConfig, dict[str, Origin]]:
    """Return ms-swift's settings with those of `swift rollout`, if completions come from one."""
    settings = dict(config.settings)
    assumed = list(config.assumed)
    new_names: list[str] = []
    if settings.get("use_vllm") and settings.get(_MODE) is None:
        reason = _reason_for_server(launch, server)
        if reason:
            settings[_MODE] = "server"
            new_names.append(_MODE)
            assumed.append(f"{_MODE}=server: {reason}")
        else:
            place = engine_place(launch)
            settings[_MODE] = place.mode
            new_names.append(_MODE)
            assumed.append(place.sentence)
            if place.server_gpus:
                settings["server_gpus"] = place.server_gpus
                new_names.append("server_gpus")
    if not settings.get("use_vllm") or settings.get(_MODE) != "server":
        origin = Origin(source=Source.FILE, place=launch.path, line=launch.line)
        config = replace(config, settings=settings, assumed=tuple(assumed))
        return config, {**origins, **dict.fromkeys(new_names, origin)}

    line = launch.line
    if server is not None:
        line = server.line
        for name, value in server.settings:
            own_name = _SWIFT_NAMES.get(name, name)
            settings[own_name] = value
            new_names.append(own_name)
        assumed[:0] = server.assumed
    elif "server_gpus" not in settings:
        assumed.append(SERVER_ASSUMED.replace("trl vllm-serve", "swift rollout"))
    origin = Origin(
        source=Source.FILE,
        place=launch.path,
        line=line,
    )
    config = replace(
        config,
        settings=settings,
        assumed=tuple(assumed),
    )
    return config, {**origins, **dict.fromkeys(new_names, origin)}


def _reason_for_server(
    launch: LaunchScript,
    server: ServerLaunch | None,
) -> str:
    """Return why completions come from a server, though no setting says so; empty: none does."""
    if server is not None:
        return f"line {server.line} starts it"
    for name in _ADDRESSES:
        if name in launch.stated:
            return f"{name} (line {launch.stated[name].line}) is its address"
    return ""
