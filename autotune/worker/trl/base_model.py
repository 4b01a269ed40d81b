"""Base model: loaded once, given to each candidate as fresh modules around the same tensors.

A trainer changes its model: it patches `forward`, wraps layers with adapters, leaves gradients
behind. Modules therefore cannot be reused; tensors can, and they are the cost of loading.
"""

from __future__ import annotations

import copy
import importlib
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from .. import synthetic
from ..protocol import Arguments, Request

KEPT_FREE_BYTES = int(1.2 * (1 << 30))
"""Part of a card that transformers leaves free when it requests all weights at once."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def folder_for(model: Request, scratch: Path) -> Path:
    """Return a folder with config and tokenizer: the user's, or a synthetic one."""
    folder = Path(model["folder"]) if model.get("folder") else None
    if folder is not None and _has_tokenizer(folder):
        return folder
    if model["weights"] == "real":
        raise FileNotFoundError(
            f"real weights were requested, but {folder} holds no tokenizer to train them with."
        )
    config = model.get("config") or {}
    if not config and folder is not None:
        text = (folder / "config.json").read_text()
        config = json.loads(text)
    return synthetic.write_model_folder(scratch / "model", config)


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def tokenizer(folder: Path, *, trust_remote_code: bool) -> Any:
    """Load the tokenizer as the trainer does."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(
        str(folder),
        truncation_side="left",
        padding_side="left",
        trust_remote_code=trust_remote_code,
    )


# A model on each rank.


def build(
    model: Request,
    folder: Path,
    *,
    device: str,
    seed: int,
    trust_remote_code: bool,
) -> Any:
    """Build the model on its device in training mode, named after its folder."""
    import torch
    from transformers import set_seed

    dtype = getattr(torch, model["dtype"])
    place = _place(device)
    config = _config(model, folder, trust_remote_code)
    quantisation = _quantisation(model, dtype)
    set_seed(seed)
    # 1. Real weights.
    if model["weights"] == "real":
        arguments: Arguments = {"config": config, "dtype": dtype, "device_map": place}
        if quantisation is not None:
            arguments["quantization_config"] = quantisation
        loaded = auto_class(model, config).from_pretrained(
            str(folder), trust_remote_code=trust_remote_code, **arguments
        )
        return loaded.train()
    # 2. Random weights.
    random = partial(random_model, model, config, trust_remote_code)
    if quantisation is None:
        built = random() if place == "cpu" else build_as_loaded(random, place)
    elif model.get("load_in_8bit"):
        raise ValueError(
            "random weights are made in 4 bits or whole, not in 8 bits: ask for real weights,"
            " or load_in_4bit."
        )
    else:
        built = build_quantised(random, quantisation, dtype=dtype, place=place)
    return _named(built, folder).train()


def auto_class(model: Request, config: Any) -> Any:
    """Return transformers' class that builds the model.

    As TRL loads it: with its towers, or with one score at its end.
    """
    import transformers

    if model.get("scores"):
        return transformers.AutoModelForSequenceClassification
    architectures = getattr(config, "architectures", None) or [""]
    own_class = getattr(transformers, architectures[0], None)
    if own_class is not None and hasattr(config, "vision_config"):
        return own_class
    return transformers.AutoModelForCausalLM


def random_model(
    model: Request,
    config: Any,
    trust_remote_code: bool,
) -> Any:
    import torch

    model_class = auto_class(model, config)
    dtype = getattr(torch, model["dtype"])
    if hasattr(model_class, "from_config"):
        return model_class.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    return model_class._from_config(config, dtype=dtype)


def _config(
    model: Request,
    folder: Path,
    trust_remote_code: bool,
) -> Any:
    from transformers import AutoConfig

    labels = {"num_labels": 1} if model.get("scores") else {}
    return AutoConfig.from_pretrained(str(folder), trust_remote_code=trust_remote_code, **labels)


def _place(device: str) -> str:
    import torch

    return f"cuda:{torch.cuda.current_device()}" if device == "cuda" else "cpu"


def _named(model: Any, folder: Path) -> Any:
    """Give a model of random weights the name and the generation config of its folder."""
    from transformers import GenerationConfig

    model.config._name_or_path = model.name_or_path = str(folder)
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(str(folder))
    return model


def _quantisation(model: Request, dtype: Any) -> Any:
    """Return TRL's quantisation config for these settings; None for an unquantised model."""
    if not (model.get("load_in_4bit") or model.get("load_in_8bit")):
        return None
    from transformers import BitsAndBytesConfig

    if model.get("load_in_8bit"):
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_quant_type="nf4",
    )


# A model in shards.


def build_sharded(
    model: Request,
    folder: Path,
    *,
    device: str,
    seed: int,
    trust_remote_code: bool,
) -> Any:
    """Build a model that a trainer will shard over the ranks, as TRL loads it under this launch.

    Under ZeRO-3 a rank has its shards only; under FSDP one rank's host has the weights. Each
    trainer needs a new one.
    """
    import torch
    from transformers import set_seed
    from transformers.modeling_utils import is_fsdp_enabled

    set_seed(seed)
    if model["weights"] == "real":
        return _load_through_trl(model, folder, trust_remote_code=trust_remote_code).train()
    if _quantisation(model, None) is not None:
        raise ValueError(
            "random weights in 4 bits are made whole on every rank: ask for real weights, or"
            " sharding=ddp."
        )
    config = _config(model, folder, trust_remote_code)
    random = partial(random_model, model, config, trust_remote_code)
    if is_fsdp_enabled():
        with _no_init_weights():
            built = random()
        built.tie_weights()
        # The other ranks receive their weights from the first, and never touch them before.
        if torch.distributed.get_rank() == 0:
            _fill_on_host(built, device)
    else:  # under ZeRO-3 transformers partitions each layer right after its construction
        with torch.device(_place(device)):
            built = random()
    return _named(built, folder).train()


def _load_through_trl(
    model: Request,
    folder: Path,
    *,
    trust_remote_code: bool,
) -> Any:
    """Load with TRL's own function, if this release has it, and the arguments of its trainer."""
    import torch
    from accelerate import PartialState
    from trl.trainer import utils

    arguments: Arguments = {"dtype": model["dtype"], "trust_remote_code": trust_remote_code}
    if model.get("attn_implementation"):
        arguments["attn_implementation"] = model["attn_implementation"]
    dtype = getattr(torch, model["dtype"])
    quantisation = _quantisation(model, dtype)
    if quantisation is not None:
        arguments["quantization_config"] = quantisation
    distributed_type = str(PartialState().distributed_type.value)
    if distributed_type in ("MULTI_GPU", "DEEPSPEED"):
        arguments["device_map"] = None
    if model.get("scores"):
        arguments["num_labels"] = 1
    if not hasattr(utils, "create_model_from_path"):
        model_class = auto_class(model, _config(model, folder, trust_remote_code))
        return model_class.from_pretrained(str(folder), **arguments)
    if model.get("scores"):
        arguments["architecture"] = auto_class(model, None)
    return utils.create_model_from_path(str(folder), **arguments)


def _no_init_weights() -> Any:
    try:
        from transformers.initialization import no_init_weights
    except ImportError:  # older releases
        from transformers.modeling_utils import no_init_weights
    return no_init_weights()


def _fill_on_host(model: Any, device: str) -> None:
    """Fill matrices with random values (drawn on the device), scales with 1, biases with 0."""
    import torch

    deviation = float(getattr(model.config, "initializer_range", 0.02))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                values = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                parameter.copy_(values.normal_(std=deviation))
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)


# A loaded model, for one candidate after the other.


def fresh(model: Any, *, attention: str | None = None) -> Any:
    """Return new modules and parameters, without gradients or hooks, around the same tensors.

    bitsandbytes' modules are the same: merging an adapter gives them new weights, and the old ones
    have to go.
    """
    import torch

    shared: dict[int, Any] = {}  # what a copy has in common with the model, by id
    for buffer in model.buffers():
        shared[id(buffer)] = buffer
    for module in model.modules():
        if getattr(module, "quant_state", None) is not None:
            shared[id(module)] = module
    for parameter in model.parameters():
        if type(parameter) is torch.nn.Parameter:
            shared[id(parameter)] = torch.nn.Parameter(
                parameter.detach(), requires_grad=parameter.is_floating_point()
            )
        else:
            shared[id(parameter)] = parameter
    copied = copy.deepcopy(model, memo=shared)
    if attention is not None:
        copied.set_attn_implementation(attention)
    return copied


def is_finite(model: Any) -> bool:
    """Return False if a candidate spoilt the shared weights.

    A NaN gradient does so even at learning rate 0 (0 * NaN = NaN), and so does merging a NaN.
    """
    import torch

    tensors = list(model.parameters())
    for module in model.modules():
        state = getattr(module, "quant_state", None)
        for name in ("absmax", "offset"):
            scale = getattr(state, name, None)
            if scale is not None:
                tensors.append(scale)
    with torch.no_grad():
        for tensor in tensors:
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor.sum())):
                return False
    return True


# Random weights.


def build_as_loaded(random: Callable[[], Any], place: str) -> Any:
    """Build a random model with the allocations of a loaded checkpoint: each shared tensor once,
    and no other.
    """
    model = without_values(random)
    # TRL loads a rank of several into the host's memory and moves it from there
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1:
        model_bytes = sum(parameter.nbytes for parameter in model.parameters())
        request_at_once(model_bytes, place)
    deviation = float(model.config.initializer_range)
    filled: dict[int, Any] = {}
    for module in model.modules():
        _fill(module, filled, place, deviation)
    return model


def without_values(random: Callable[[], Any]) -> Any:
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        model = random()
    model.tie_weights()
    return model


def request_at_once(size: int, place: str) -> None:
    """Request and free one block, from which weights are cut without remainders.

    transformers does so before it loads them.
    """
    import torch
    import transformers.modeling_utils as loading

    if hasattr(loading, "caching_allocator_warmup") and place != "cpu":
        _, total_bytes = torch.cuda.mem_get_info(place)
        size = min(size, total_bytes - KEPT_FREE_BYTES)
        torch.empty(size, dtype=torch.uint8, device=place)


def build_quantised(
    random: Callable[[], Any],
    quantised: Any,
    *,
    dtype: Any,
    place: str,
) -> Any:
    """Build a random model in 4 bits, drawn and quantised layer by layer.

    `quantised` is transformers' BitsAndBytesConfig for a checkpoint. transformers quantises while
    it reads one. Without it, the same layers of bitsandbytes replace the same modules, so memory
    and speed are those of the real model. At most one layer is unquantised at a time.
    """
    import torch
    from transformers.quantizers import AutoHfQuantizer
    from transformers.utils.quantization_config import QuantizationMethod

    # 1. All linear layers except the head, which transformers leaves out, too.
    model = without_values(random)
    head = model.get_output_embeddings() or getattr(model, "score", None)
    linears = {}
    for name, module in model.named_modules():
        if type(module) is torch.nn.Linear and module is not head:
            linears[name] = module
    # 2. The weights: two values of 4 bits in a byte.
    size = sum(parameter.nbytes for parameter in model.parameters())
    for linear in linears.values():
        size += linear.weight.numel() // 2 - linear.weight.nbytes
    request_at_once(size, place)
    deviation = float(model.config.initializer_range)
    filled: dict[int, Any] = {}
    for name, module in list(model.named_modules()):
        if name in linears:
            model.set_submodule(name, _quantised(module, quantised, dtype, place, deviation))
        else:
            _fill(module, filled, place, deviation)
    # 3. The attributes by which transformers, PEFT and TRL recognise a model loaded in 4 bits.
    model.config.quantization_config = quantised
    model.hf_quantizer = AutoHfQuantizer.from_config(quantised, pre_quantized=False)
    model.is_quantized = model.is_loaded_in_4bit = True
    model.quantization_method = QuantizationMethod.BITS_AND_BYTES
    return model


def _quantised(
    linear: Any,
    quantised: Any,
    dtype: Any,
    place: str,
    deviation: float,
) -> Any:
    """Return a linear layer of bitsandbytes with random weights, in place of `linear`."""
    import torch

    nn: Any = importlib.import_module("bitsandbytes.nn")

    options = {
        "compress_statistics": quantised.bnb_4bit_use_double_quant,
        "quant_type": quantised.bnb_4bit_quant_type,
        "quant_storage": quantised.bnb_4bit_quant_storage,
    }
    with torch.device("meta"):
        layer = nn.Linear4bit(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            quantised.bnb_4bit_compute_dtype,
            **options,
        )
    values = torch.empty(linear.weight.shape, dtype=dtype, device=place)
    values.normal_(std=deviation)
    weight = nn.Params4bit(values, requires_grad=False, module=layer, **options)
    layer.weight = weight.to(place)
    if linear.bias is not None:
        zeros = torch.zeros(linear.bias.shape, dtype=dtype, device=place)
        layer.bias = torch.nn.Parameter(zeros, requires_grad=False)
    return layer


def _fill(
    module: Any,
    filled: dict[int, Any],
    place: str,
    deviation: float,
) -> None:
    """Fill a module's own parameters in their precision, and move its buffers.

    `filled` has the parameters of other modules, by the id of the empty one: those that are tied.
    """
    import torch

    for name, parameter in module._parameters.items():
        if parameter is None or not parameter.is_meta:
            continue
        if id(parameter) not in filled:
            values = torch.ones(parameter.shape, dtype=parameter.dtype, device=place)
            if parameter.dim() > 1:
                values.normal_(std=deviation)
            elif name == "bias":
                values.zero_()
            filled[id(parameter)] = torch.nn.Parameter(values)
        module._parameters[name] = filled[id(parameter)]
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = buffer.to(place)
