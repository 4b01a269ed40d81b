"""The base model: loaded once, given to every candidate as fresh modules around the same tensors.

A trainer changes what it gets: it patches `forward`, wraps layers with adapters, leaves gradients behind. So a module cannot
be used twice; its tensors can, and they are what loading costs.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import made_up
from . import trl_quantised

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def folder_for(model: Mapping[str, Any], scratch: Path) -> Path:
    """A folder with config and tokenizer: the user's own if it has both, otherwise one in the scratch folder."""
    given = Path(model["folder"]) if model.get("folder") else None
    if given is not None and any((given / name).is_file() for name in TOKENIZER_FILES):
        return given
    if model["weights"] == "real":
        raise FileNotFoundError(f"real weights were asked for, but {given} holds no tokenizer to train them with.")
    config = model.get("config") or json.loads((given / "config.json").read_text() if given else "{}")
    return made_up.write_model_folder(scratch / "model", config)


def build(model: Mapping[str, Any], folder: Path, *, device: str, seed: int, trust_remote_code: bool) -> Any:
    """The model on its device, in training mode, under the name of its folder, from which trainer and engine read the rest."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, set_seed

    dtype = getattr(torch, model["dtype"])
    place = f"cuda:{torch.cuda.current_device()}" if device == "cuda" else "cpu"
    set_seed(seed)
    if model["weights"] == "real":
        quantised = {} if (bits := _quantisation(model, dtype)) is None else {"quantization_config": bits}
        made = AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=dtype, device_map=place, trust_remote_code=trust_remote_code, **quantised
        )
    elif (bits := _quantisation(model, dtype)) is not None:
        _refuse_to_quantise_nothing(model)
        made = trl_quantised.build(folder, bits, dtype=dtype, place=place, trust_remote_code=trust_remote_code)
        made.config._name_or_path = made.name_or_path = str(folder)
        _read_generation_config(made, folder)
    else:
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
        with torch.device(place):
            made = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
        made.config._name_or_path = made.name_or_path = str(folder)
        _read_generation_config(made, folder)
    return made.train()


def spread(model: Mapping[str, Any], folder: Path, *, device: str, seed: int, trust_remote_code: bool) -> Any:
    """A model for a trainer that will spread it over the ranks, as TRL itself would load it under this launch: its parts alone
    under ZeRO-3, the weights on one rank's host under FSDP. Made anew for every trainer, which takes it apart."""
    from transformers import set_seed

    set_seed(seed)
    if model["weights"] == "real":
        made = _as_trl_loads_it(model, folder, trust_remote_code=trust_remote_code)
    else:
        if _quantisation(model, None) is not None:
            raise ValueError("random weights in 4 bits are made whole on every rank: ask for real weights, or sharding=ddp.")
        made = _random_and_spread(model, folder, device=device, trust_remote_code=trust_remote_code)
        made.config._name_or_path = made.name_or_path = str(folder)
        _read_generation_config(made, folder)
    return made.train()


def _as_trl_loads_it(model: Mapping[str, Any], folder: Path, *, trust_remote_code: bool) -> Any:
    """Through TRL's own function, where it has one, with the arguments that its trainer gives."""
    import torch
    import transformers
    from accelerate import PartialState
    from trl.trainer import utils

    asked: dict[str, Any] = {"dtype": model["dtype"], "trust_remote_code": trust_remote_code}
    if model.get("attn_implementation"):
        asked["attn_implementation"] = model["attn_implementation"]
    if (bits := _quantisation(model, getattr(torch, model["dtype"]))) is not None:
        asked["quantization_config"] = bits
    if str(PartialState().distributed_type.value) in ("MULTI_GPU", "DEEPSPEED"):
        asked["device_map"] = None
    made = getattr(utils, "create_model_from_path", None) or transformers.AutoModelForCausalLM.from_pretrained
    return made(str(folder), **asked)


def _random_and_spread(model: Mapping[str, Any], folder: Path, *, device: str, trust_remote_code: bool) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_utils import is_fsdp_enabled

    config = AutoConfig.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
    dtype = getattr(torch, model["dtype"])

    def made() -> Any:
        return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)

    if not is_fsdp_enabled():  # under ZeRO-3 transformers gives each layer away as soon as it is made
        with torch.device(f"cuda:{torch.cuda.current_device()}" if device == "cuda" else "cpu"):
            return made()
    with _without_first_values():
        built = made()
    built.tie_weights()
    if torch.distributed.get_rank() == 0:  # the others' weights arrive from there, and are never touched before
        _fill(built, device)
    return built


def _without_first_values() -> Any:
    """transformers' own switch: parameters are asked for and not written to. It moved between releases."""
    import transformers.modeling_utils as older

    try:
        from transformers.initialization import no_init_weights
    except ImportError:
        no_init_weights = older.no_init_weights
    return no_init_weights()


def _fill(model: Any, device: str) -> None:
    """Random values for matrices, ones for scales, nothing for biases; drawn where that is fast, which a host is not."""
    import torch

    deviation = float(getattr(model.config, "initializer_range", 0.02))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                drawn = torch.empty(parameter.shape, dtype=parameter.dtype, device=device).normal_(std=deviation)
                parameter.copy_(drawn)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)


def _refuse_to_quantise_nothing(model: Mapping[str, Any]) -> None:
    if model.get("load_in_8bit"):
        raise ValueError("random weights are made in 4 bits or whole, not in 8 bits: ask for real weights, or load_in_4bit.")


def _quantisation(model: Mapping[str, Any], dtype: Any) -> Any:
    """As TRL makes it from its own settings; None for a model that is loaded as it is."""
    if not (model.get("load_in_4bit") or model.get("load_in_8bit")):
        return None
    from transformers import BitsAndBytesConfig

    if model.get("load_in_8bit"):
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=dtype, bnb_4bit_quant_type="nf4")


def _read_generation_config(model: Any, folder: Path) -> None:
    from transformers import GenerationConfig

    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(str(folder))


def tokenizer(folder: Path, *, trust_remote_code: bool) -> Any:
    """As the trainer itself would load it."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(
        str(folder), truncation_side="left", padding_side="left", trust_remote_code=trust_remote_code
    )


def fresh(model: Any, *, attention: str | None = None) -> Any:
    """New modules and new parameters around the same tensors: gradients, hooks and flags of a candidate die with its own."""
    import torch

    shared: dict[int, Any] = {id(buffer): buffer for buffer in model.buffers()}
    for parameter in model.parameters():
        plain = type(parameter) is torch.nn.Parameter
        trainable = parameter.is_floating_point()
        shared[id(parameter)] = torch.nn.Parameter(parameter.detach(), requires_grad=trainable) if plain else parameter
    made = copy.deepcopy(model, memo=shared)
    if attention is not None:
        made.set_attn_implementation(attention)
    return made


def twin(model: Any) -> Any:
    """A second model with tensors of its own: what a reference model costs."""
    return copy.deepcopy(model)


def is_whole(model: Any) -> bool:
    """Whether no candidate spoilt the shared weights: a gradient that is not a number does, even in a step of length nothing."""
    import torch

    with torch.no_grad():
        return all(bool(torch.isfinite(parameter.sum())) for parameter in model.parameters() if parameter.is_floating_point())


def layers_of(model: Any) -> list[Any]:
    """The decoder's layers, found as the longest list of modules; empty where there is no such list."""
    import torch

    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return max((list(found) for found in lists), key=len, default=[])
