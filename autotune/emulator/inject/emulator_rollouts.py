"""Shorter rollouts on emulated cards: a completion has its full length, and few of its tokens are
decoded.

Decoding is what takes longest on emulated cards, a token at a time, and each token has the same
memory but for the cache of keys and values. With transformers, one decoded token stands for STRIDE:
the cache grows by as many positions. vLLM reserves its cache when it starts, so that it decodes
STRIDE tokens, and the last one is repeated. A generation of another form (a cache that is not
plain, scores in the answer, an older transformers) is left as it is.
"""

from __future__ import annotations

import copy
import functools
import math
import os
from types import ModuleType
from typing import Any

ROLLOUT_STRIDE = int(os.environ.get("AUTOTUNE_EMULATOR_STRIDE") or 1)


def shorten_transformers(generation: ModuleType) -> None:
    """Decode one of STRIDE tokens in `GenerationMixin.generate`."""
    import inspect

    import torch

    mixin = generation.GenerationMixin
    parameters = inspect.signature(mixin.prepare_inputs_for_generation).parameters
    if "next_sequence_length" not in parameters:
        return  # its inputs are chosen by their position, which needs every id
    generate = mixin.generate
    update = mixin._update_model_kwargs_for_generation

    @functools.wraps(generate)
    def shortened(model: Any, *args: Any, **kwargs: Any) -> Any:
        config: Any = kwargs.get("generation_config")
        if not _can_be_shortened(config):
            return generate(model, *args, **kwargs)
        # 1. Fewer tokens.
        tokens = config.max_new_tokens
        short = copy.deepcopy(config)
        short.max_new_tokens = math.ceil(tokens / ROLLOUT_STRIDE)
        short.min_new_tokens = min(config.min_new_tokens or 0, short.max_new_tokens)
        model._emulated_stride = ROLLOUT_STRIDE
        try:
            ids = generate(model, *args, **{**kwargs, "generation_config": short})
        finally:
            del model._emulated_stride
        # 2. The full length.
        if ids.shape[1] < short.max_new_tokens:  # it ended by itself, at a special id
            return ids
        return torch.cat([ids, ids[:, -1:].expand(-1, tokens - short.max_new_tokens)], dim=1)

    @functools.wraps(update)
    def lengthened(model: Any, outputs: Any, model_kwargs: Any, *args: Any, **kwargs: Any) -> Any:
        stride = getattr(model, "_emulated_stride", 1)
        cache = getattr(outputs, "past_key_values", None)
        if stride > 1 and _lengthen(cache, stride - 1):
            kwargs["num_new_tokens"] = stride
        return update(model, outputs, model_kwargs, *args, **kwargs)

    mixin.generate = shortened
    mixin._update_model_kwargs_for_generation = lengthened


def _can_be_shortened(config: Any) -> bool:
    tokens = getattr(config, "max_new_tokens", None)
    if not tokens or tokens <= ROLLOUT_STRIDE:
        return False
    return not config.return_dict_in_generate and config.use_cache is not False


def _lengthen(cache: Any, positions: int) -> bool:
    """Append positions to every layer of a plain cache; False if it is of another kind."""
    layers = getattr(cache, "layers", None)
    if not layers or any(type(layer).__name__ != "DynamicLayer" for layer in layers):
        return False
    import torch

    def longer(values: Any) -> Any:
        shape = (*values.shape[:-2], positions, values.shape[-1])
        return torch.cat([values, values[..., -1:, :].expand(shape)], dim=-2)

    for layer in layers:
        layer.keys, layer.values = longer(layer.keys), longer(layer.values)
    return True


def shorten_vllm(entrypoints: ModuleType) -> None:
    """Decode STRIDE tokens in `LLM.generate`, and repeat the last one."""
    engine = entrypoints.LLM
    generate = engine.generate

    @functools.wraps(generate)
    def shortened(
        llm: Any, prompts: Any = None, sampling_params: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        tokens = getattr(sampling_params, "max_tokens", None)
        if not tokens or tokens <= ROLLOUT_STRIDE:
            return generate(llm, prompts, sampling_params, *args, **kwargs)
        short = sampling_params.clone()
        short.max_tokens = ROLLOUT_STRIDE
        short.min_tokens = min(short.min_tokens or 0, ROLLOUT_STRIDE)
        answers = generate(llm, prompts, short, *args, **kwargs)
        for answer in answers:
            for output in answer.outputs:
                if len(output.token_ids) == ROLLOUT_STRIDE:
                    _lengthen_output(output, tokens, llm, short)
        return answers

    engine.generate = shortened


def _lengthen_output(
    output: Any,
    tokens: int,
    llm: Any,
    sampling: Any,
) -> None:
    output.token_ids = _repeated(output.token_ids, tokens)
    if output.logprobs is not None:
        output.logprobs = _repeated(output.logprobs, tokens)
    if output.text:  # what a framework counts that encodes the text again
        output.text = llm.get_tokenizer().decode(
            output.token_ids, skip_special_tokens=sampling.skip_special_tokens
        )


def _repeated(values: Any, length: int) -> Any:
    """Return the values with the last one repeated up to this length."""
    items = list(values)
    return items + items[-1:] * (length - len(items))


ROLLOUTS = {
    "transformers.generation.utils": shorten_transformers,
    "vllm.entrypoints.llm": shorten_vllm,
}
"""Hooks by module, run after its import."""
