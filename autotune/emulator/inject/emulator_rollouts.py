"""Shorter rollouts: a completion has its full length, and few of its tokens are decoded.

Decoding is what takes longest on emulated cards, a token at a time, and each token has the same memory but for the
cache of keys and values. With transformers, one decoded token stands for STRIDE: the cache grows by as many positions.
vLLM reserves its cache when it starts, so that it decodes STRIDE tokens, and the last one is repeated.

A generation of another form (a cache that is not plain, scores in the answer, an older transformers) is left as it is.
"""

from __future__ import annotations

import copy
import functools
import inspect
import os
from types import ModuleType
from typing import Any

import torch

STRIDE = int(os.environ.get("AUTOTUNE_EMULATOR_STRIDE", "1"))


def shorten_transformers(generation: ModuleType) -> None:
    """Decode one of STRIDE tokens in `GenerationMixin.generate`."""
    mixin = generation.GenerationMixin
    if "next_sequence_length" not in inspect.signature(mixin.prepare_inputs_for_generation).parameters:
        return  # its inputs are chosen by their position, which needs every id
    generate, update = mixin.generate, mixin._update_model_kwargs_for_generation

    @functools.wraps(generate)
    def shortened(model: Any, *args: Any, **kwargs: Any) -> Any:
        config: Any = kwargs.get("generation_config")
        tokens = getattr(config, "max_new_tokens", None)
        if not tokens or tokens <= STRIDE or config.return_dict_in_generate or config.use_cache is False:
            return generate(model, *args, **kwargs)
        short = copy.deepcopy(config)
        short.max_new_tokens = -(-tokens // STRIDE)
        short.min_new_tokens = min(config.min_new_tokens or 0, short.max_new_tokens)
        model._emulated_stride = STRIDE
        try:
            ids = generate(model, *args, **{**kwargs, "generation_config": short})
        finally:
            del model._emulated_stride
        if ids.shape[1] < short.max_new_tokens:  # it ended by itself, at a special id
            return ids
        return torch.cat([ids, ids[:, -1:].expand(-1, tokens - short.max_new_tokens)], dim=1)

    @functools.wraps(update)
    def lengthened(model: Any, outputs: Any, model_kwargs: Any, *args: Any, **kwargs: Any) -> Any:
        stride = getattr(model, "_emulated_stride", 1)
        if stride == 1 or not _lengthen(getattr(outputs, "past_key_values", None), stride - 1):
            return update(model, outputs, model_kwargs, *args, **kwargs)
        return update(model, outputs, model_kwargs, *args, **{**kwargs, "num_new_tokens": stride})

    mixin.generate, mixin._update_model_kwargs_for_generation = shortened, lengthened


def _lengthen(cache: Any, positions: int) -> bool:
    """Append positions to every layer of a plain cache; False if it is of another kind."""
    layers = getattr(cache, "layers", None)
    if not layers or any(type(layer).__name__ != "DynamicLayer" for layer in layers):
        return False
    for layer in layers:
        layer.keys, layer.values = (
            torch.cat([held, held[..., -1:, :].expand(*held.shape[:-2], positions, held.shape[-1])], dim=-2)
            for held in (layer.keys, layer.values)
        )
    return True


def shorten_vllm(entrypoints: ModuleType) -> None:
    """Decode STRIDE tokens in `LLM.generate`, and repeat the last one."""
    engine = entrypoints.LLM
    generate = engine.generate

    @functools.wraps(generate)
    def shortened(llm: Any, prompts: Any = None, sampling_params: Any = None, *args: Any, **kwargs: Any) -> Any:
        tokens = getattr(sampling_params, "max_tokens", None)
        if not tokens or tokens <= STRIDE:
            return generate(llm, prompts, sampling_params, *args, **kwargs)
        short = sampling_params.clone()
        short.max_tokens, short.min_tokens = STRIDE, min(short.min_tokens or 0, STRIDE)
        answers = generate(llm, prompts, short, *args, **kwargs)
        for output in (output for answer in answers for output in answer.outputs):
            if len(output.token_ids) != STRIDE:
                continue
            output.token_ids = _repeated(output.token_ids, tokens)
            output.logprobs = None if output.logprobs is None else _repeated(output.logprobs, tokens)
            if output.text:  # what a framework counts that encodes the text again
                output.text = llm.get_tokenizer().decode(output.token_ids, skip_special_tokens=short.skip_special_tokens)
        return answers

    engine.generate = shortened


def _repeated(values: Any, length: int) -> Any:
    listed = list(values)
    return listed + listed[-1:] * (length - len(listed))


AFTER = {"transformers.generation.utils": shorten_transformers, "vllm.entrypoints.llm": shorten_vllm}
"""Hooks by module, run after its import."""
