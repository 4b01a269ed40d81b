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
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

BYTES = 256
START = "<|im_start|>"
END = "<|im_end|>"
PAD = "<|endoftext|>"
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


# A model folder.


def write_model_folder(
    path: str | Path,
    config: Mapping[str, Any],
    weights: bool = False,
    seed: int = 0,
) -> Path:
    """Write config, generation config, tokenizer and, on request, random weights."""
    folder = Path(path)
    write_tokenizer(folder, config)
    text_config = _text_config(config)
    ids = _special_ids(text_config)
    end_id = text_config.get("eos_token_id") or ids[END]

    written_config = dict(config)
    if text_config is config:
        written_config["eos_token_id"] = end_id
    _write_json(folder / "config.json", written_config)
    generation_config = {"eos_token_id": end_id, "pad_token_id": ids[PAD]}
    _write_json(folder / "generation_config.json", generation_config)
    # Weights of another model, in the same folder before.
    (folder / "model.safetensors").unlink(missing_ok=True)
    if weights:
        _write_random_weights(folder, seed)
    return folder


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=1))


def _write_random_weights(folder: Path, seed: int) -> None:
    import torch
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.from_pretrained(str(folder))
    dtype = getattr(config, "dtype", None) or torch.float32
    build = AutoModelForCausalLM.from_config
    if hasattr(config, "vision_config"):
        architectures = config.architectures or [""]
        own_class = getattr(transformers, architectures[0], None)
        if own_class is not None:
            build = own_class._from_config
    model = build(config, dtype=dtype)
    model.save_pretrained(str(folder))


SAFETENSORS_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def write_zero_weights(folder: Path, model: Any) -> None:
    """Write a checkpoint of zeros for loaders that need a file.

    Those that quantise what they read do. The file has the model's size and, where the file system
    supports holes, takes no space.
    """
    header: dict[str, Any] = {}
    end = 0
    written: set[int] = set()  # ids of tensors
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in written:
            continue  # a checkpoint has tied weights once
        written.add(id(tensor))
        begin = end
        end += tensor.numel() * tensor.element_size()
        dtype = str(tensor.dtype).removeprefix("torch.")
        header[name] = {
            "dtype": SAFETENSORS_TYPES[dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        size = len(text).to_bytes(8, "little")
        file.write(size + text)
        file.truncate(8 + len(text) + end)


# A tokenizer.


def write_tokenizer(path: str | Path, config: Mapping[str, Any]) -> None:
    """Write a tokenizer like `save_pretrained`, without its copy of the vocabulary."""
    folder = Path(path)
    text_config = _text_config(config)
    vocab = int(text_config["vocab_size"])
    has_images = "vision_config" in config
    special_ids = _special_ids(text_config)
    if has_images:
        used_ids = set(special_ids.values())
        special_ids |= _image_ids(config, vocab, used_ids)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer(vocab, special_ids)
    tokenizer.save(str(folder / "tokenizer.json"))
    positions = text_config.get("max_position_embeddings") or text_config.get("n_positions")
    tokenizer_config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "padding_side": "left",
        "model_max_length": int(positions or 2048),
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    if has_images:
        tokenizer_config["extra_special_tokens"] = IMAGE_TOKENS
    _write_json(folder / "tokenizer_config.json", tokenizer_config)


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Part of the config with the vocabulary: `text_config` of a multimodal model."""
    text_config = config.get("text_config")
    if isinstance(text_config, Mapping) and "vocab_size" in text_config:
        return text_config
    return config


def _special_ids(config: Mapping[str, Any]) -> dict[str, int]:
    """Ids of the special tokens: those of the config, else the first free ones."""
    vocab = int(config["vocab_size"])
    if vocab < BYTES + 4:
        raise ValueError(
            f"a vocabulary of {vocab} cannot hold {BYTES} bytes and the special tokens: take"
            f" {BYTES + 4} or more."
        )
    ids: dict[str, int] = {}
    fields = {END: "eos_token_id", PAD: "pad_token_id", START: "bos_token_id"}
    for token, field in fields.items():
        value = config.get(field)
        if isinstance(value, Sequence) and value:
            value = value[0]
        if isinstance(value, int) and 0 <= value < vocab and value not in ids.values():
            ids[token] = value
    for token in (START, END, PAD):
        if token not in ids:
            ids[token] = _first_free(range(vocab), ids.values())
    return ids


def _image_ids(
    config: Mapping[str, Any],
    vocab: int,
    used: Collection[int],
) -> dict[str, int]:
    """Ids of the tokens around and in place of images: those of the config, else the last free
    ones.
    """
    ids: dict[str, int] = {}
    for name, token in IMAGE_TOKENS.items():
        used_now = {*used, *ids.values()}
        names = IMAGE_TOKEN_IDS.get(name, ())
        stated = _first_integer(config, names)
        if stated is not None and 0 <= stated < vocab and stated not in used_now:
            ids[token] = stated
        else:
            ids[token] = _first_free(reversed(range(vocab)), used_now)
    return ids


def _first_integer(config: Mapping[str, Any], fields: Iterable[str]) -> int | None:
    for field in fields:
        if isinstance(config.get(field), int):
            return int(config[field])
    return None


def _first_free(ids: Iterable[int], used: Collection[int]) -> int:
    return next(number for number in ids if number not in used)


def _tokenizer(vocab: int, special_ids: Mapping[str, int]) -> Any:
    """Tokenizer of bytes, pairs of digits, and fillers, so that each id has a text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    # 1. The texts: bytes first, then pairs, as far as the vocabulary reaches.
    merges = [(first, second) for first in "Ġ0123456789" for second in "0123456789"]
    texts = sorted(pre_tokenizers.ByteLevel.alphabet())
    texts += [first + second for first, second in merges]
    used = set(special_ids.values())
    free_ids = [number for number in range(vocab) if number not in used]
    table = dict(special_ids)
    table.update(zip(texts, free_ids))  # noqa: B905
    for number in free_ids[len(texts) :]:
        table[f"<unused{number}>"] = number
    # 2. The tokenizer.
    merges = [pair for pair in merges if "".join(pair) in table]
    tokenizer = Tokenizer(models.BPE(vocab=table, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special_ids]
    )
    return tokenizer


# Prompts.


def write_prompts(
    path: str | Path,
    *,
    rows: int = 256,
    shortest: int = 8,
    longest: int = 64,
    seed: int = 0,
) -> Path:
    """Write a dataset folder: sums of `shortest` to `longest` numbers, and their results."""
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(seed)
    lines = []
    for _ in range(rows):
        count = draw.randint(shortest, longest)
        numbers = [draw.randrange(100) for _ in range(count)]
        terms = " + ".join(map(str, numbers))
        prompt = [{"role": "user", "content": f"What is {terms} ?"}]
        total = str(sum(numbers))
        row = {"prompt": prompt, "answer": total}
        lines.append(json.dumps(row))
    text = "\n".join(lines)
    (folder / "train.jsonl").write_text(text + "\n")
    return folder


# The program.

SIZES = {
    "hidden": 128,
    "intermediate": 256,
    "layers": 2,
    "vocab": 1024,
    "heads": 4,
    "kv_heads": 2,
    "positions": 4096,
}
"""Arguments of `tiny_config` that are flags, with their defaults."""


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    sizes = {name: getattr(options, name) for name in SIZES}
    config = tiny_config(**sizes)
    folder = write_model_folder(
        options.folder, config, weights=not options.no_weights, seed=options.seed
    )
    print(folder)
    if options.prompts:
        dataset = write_prompts(
            options.prompts,
            rows=options.rows,
            shortest=options.shortest,
            longest=options.longest,
            seed=options.seed,
        )
        print(dataset)
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Write a tiny synthetic model folder, and optionally prompts."
    )
    parser.add_argument("folder")
    for name, default in SIZES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-weights", action="store_true", help="write config and tokenizer only")
    parser.add_argument("--prompts", metavar="FOLDER", help="also write a dataset of prompts")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument(
        "--shortest",
        type=int,
        default=8,
        help="numbers in the sum of the shortest prompt",
    )
    parser.add_argument(
        "--longest",
        type=int,
        default=64,
        help="numbers in the sum of the longest prompt",
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
