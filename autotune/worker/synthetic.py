"""Synthetic models, tokenizers and prompts: offline, small, deterministic for a seed.

Three uses: a model folder from a config alone (weights are random, only shapes matter), the tiny
model of the demo and the tests, and prompts to train it on. The training interpreter runs it by
path:

    python autotune/worker/synthetic.py OUTDIR --hidden 256 --layers 4 --vocab 4096 [--prompts
    FOLDER]
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

BYTES = 256
START, END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content']"
    " }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Tokens around and in place of an image, by the tokenizer's attribute, and the config's fields with
# their ids.
IMAGE_TOKENS = {
    "image_token": "<|image_pad|>",
    "boi_token": "<|vision_start|>",
    "eoi_token": "<|vision_end|>",
    "video_token": "<|video_pad|>",
    "audio_token": "<|audio_pad|>",
    "boa_token": "<|audio_start|>",
    "eoa_token": "<|audio_end|>",
}
IMAGE_TOKEN_IDS = {
    "image_token": ("image_token_id", "image_token_index"),
    "video_token": ("video_token_id",),
    "boi_token": ("vision_start_token_id", "boi_token_id", "boi_token_index"),
    "eoi_token": ("vision_end_token_id", "eoi_token_id", "eoi_token_index"),
    "audio_token": ("audio_token_id",),
}
IMAGE_TEMPLATE = CHAT_TEMPLATE.replace(
    "{{ message['content'] }}",
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in"
    " message['content'] %}{% if part['type'] == 'image' %}IMAGE{% else %}{{ part['text'] }}{%"
    " endif %}{% endfor %}{% endif %}",
)


def tiny_config(
    *,
    hidden: int = 128,
    intermediate: int = 256,
    layers: int = 2,
    vocab: int = 1024,
    heads: int = 4,
    kv_heads: int = 2,
    positions: int = 4096,
) -> dict[str, Any]:
    """Config of a tiny Qwen2. vLLM's CPU attention requires heads of at least 32."""
    head = hidden // heads
    if hidden % heads or head < 32:
        raise ValueError(
            f"hidden size {hidden} over {heads} heads makes heads of {hidden / heads:g}; take 32 or"
            " more, whole."
        )
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "dtype": "float32",
    }


def write_model_folder(
    path: str | Path, config: Mapping[str, Any], weights: bool = False, seed: int = 0
) -> Path:
    """Write config, generation config, tokenizer and, on request, random weights."""
    folder = Path(path)
    write_tokenizer(folder, config)
    text = _text_config(config)
    ids = _special_ids(text)
    whole = (
        {**config}
        if text is not config
        else {**config, "eos_token_id": config.get("eos_token_id") or ids[END]}
    )
    (folder / "config.json").write_text(json.dumps(whole, indent=1))
    generation = {"eos_token_id": text.get("eos_token_id") or ids[END], "pad_token_id": ids[PAD]}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1))
    (folder / "model.safetensors").unlink(
        missing_ok=True
    )  # of another model, in the same folder before
    if weights:
        import torch
        import transformers
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(seed)
        made = AutoConfig.from_pretrained(str(folder))
        named = (
            getattr(transformers, (made.architectures or [""])[0], None)
            if hasattr(made, "vision_config")
            else None
        )
        make = AutoModelForCausalLM.from_config if named is None else named._from_config
        make(made, dtype=getattr(made, "dtype", None) or torch.float32).save_pretrained(str(folder))
    return folder


def write_tokenizer(path: str | Path, config: Mapping[str, Any]) -> None:
    """Write a tokenizer like `save_pretrained`, without its copy of the vocabulary."""
    folder, text = Path(path), _text_config(config)
    special = _special_ids(text)
    if "vision_config" in config:
        special |= _image_ids(config, int(text["vocab_size"]), set(special.values()))
    folder.mkdir(parents=True, exist_ok=True)
    _tokenizer(int(text["vocab_size"]), special).save(str(folder / "tokenizer.json"))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "padding_side": "left",
        "model_max_length": int(
            text.get("max_position_embeddings") or text.get("n_positions") or 2048
        ),
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
        **({"extra_special_tokens": IMAGE_TOKENS} if "vision_config" in config else {}),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(about, indent=1))


SAFETENSORS_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def write_zero_weights(folder: Path, model: Any) -> None:
    """Write a checkpoint of zeros for loaders that need a file, as those that quantise what they
    read do.

    The file has the model's size and, where the file system knows holes, takes no space.
    """
    header: dict[str, Any] = {}
    end, seen = 0, set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in seen:
            continue  # a checkpoint has tied weights once
        seen.add(id(tensor))
        begin, end = end, end + tensor.numel() * tensor.element_size()
        dtype = SAFETENSORS_TYPES[str(tensor.dtype).removeprefix("torch.")]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Part of the config with the vocabulary: `text_config` of a multimodal model."""
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) and "vocab_size" in inner else config


def _special_ids(config: Mapping[str, Any]) -> dict[str, int]:
    """Ids of the special tokens: those of the config, else the first free ones."""
    vocab = int(config["vocab_size"])
    if vocab < BYTES + 4:
        raise ValueError(
            f"a vocabulary of {vocab} cannot hold {BYTES} bytes and the special tokens: take"
            f" {BYTES + 4} or more."
        )
    ids: dict[str, int] = {}
    for token, name in ((END, "eos_token_id"), (PAD, "pad_token_id"), (START, "bos_token_id")):
        given = config.get(name)
        first = given[0] if isinstance(given, Sequence) and given else given
        if isinstance(first, int) and 0 <= first < vocab and first not in ids.values():
            ids[token] = first
    for token in (START, END, PAD):
        if token not in ids:
            ids[token] = next(number for number in range(vocab) if number not in ids.values())
    return ids


def _image_ids(config: Mapping[str, Any], vocab: int, taken: set[int]) -> dict[str, int]:
    """Ids of the tokens around and in place of images: those of the config, else the last free
    ones.
    """
    ids: dict[str, int] = {}
    for name, token in IMAGE_TOKENS.items():
        stated = next(
            (
                config[field]
                for field in IMAGE_TOKEN_IDS.get(name, ())
                if isinstance(config.get(field), int)
            ),
            vocab,
        )
        free = (
            number
            for number in reversed(range(vocab))
            if number not in taken and number not in ids.values()
        )
        ids[token] = (
            stated if 0 <= stated < vocab and stated not in {*taken, *ids.values()} else next(free)
        )
    return ids


def _tokenizer(vocab: int, special: Mapping[str, int]) -> Any:
    """Tokenizer of bytes, pairs of digits, and fillers, so that each id has a text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    merges = [(first, second) for first in "Ġ0123456789" for second in "0123456789"]
    words = sorted(pre_tokenizers.ByteLevel.alphabet()) + [
        first + second for first, second in merges
    ]
    taken = set(special.values())
    free = [number for number in range(vocab) if number not in taken]
    table = dict(special)
    table.update(zip(words, free))  # noqa: B905
    table.update((f"<unused{number}>", number) for number in free[len(words) :])
    merges = [pair for pair in merges if "".join(pair) in table]
    tokenizer = Tokenizer(models.BPE(vocab=table, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special]
    )
    return tokenizer


def write_prompts(
    path: str | Path, *, rows: int = 256, shortest: int = 8, longest: int = 64, seed: int = 0
) -> Path:
    """Write a dataset folder: sums of `shortest` to `longest` numbers, and their results."""
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(seed)
    lines = []
    for _ in range(rows):
        numbers = [draw.randrange(100) for _ in range(draw.randint(shortest, longest))]
        prompt = [{"role": "user", "content": "What is " + " + ".join(map(str, numbers)) + " ?"}]
        lines.append(json.dumps({"prompt": prompt, "answer": str(sum(numbers))}))
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Write a tiny synthetic model folder, and optionally prompts."
    )
    parser.add_argument("folder")
    sizes = {
        "hidden": 128,
        "intermediate": 256,
        "layers": 2,
        "vocab": 1024,
        "heads": 4,
        "kv-heads": 2,
        "positions": 4096,
    }
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-weights", action="store_true", help="write config and tokenizer only")
    parser.add_argument("--prompts", metavar="FOLDER", help="also write a dataset of prompts")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument(
        "--shortest", type=int, default=8, help="numbers in the sum of the shortest prompt"
    )
    parser.add_argument(
        "--longest", type=int, default=64, help="numbers in the sum of the longest prompt"
    )
    given = parser.parse_args(argv)
    config = tiny_config(
        **{name.replace("-", "_"): getattr(given, name.replace("-", "_")) for name in sizes}
    )
    print(write_model_folder(given.folder, config, weights=not given.no_weights, seed=given.seed))
    if given.prompts:
        print(
            write_prompts(
                given.prompts,
                rows=given.rows,
                shortest=given.shortest,
                longest=given.longest,
                seed=given.seed,
            )
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
