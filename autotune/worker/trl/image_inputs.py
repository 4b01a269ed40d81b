"""Images of synthetic rows: the model's own processor without its files, and texts of exact length around the images."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import synthetic

FILL = "a"  # one token of a synthetic tokenizer


class TooManyImageTokens(ValueError):
    """A row is too short for its images."""


def processor_of(tokenizer: Any, config: Any, images: Mapping[str, Any]) -> Any:
    """Return transformers' processor of this architecture, for texts and images; videos and sound are left out."""
    kind = str(config.model_type)
    options = dict(images["processor"])
    image_processor = _class_named(kind, "image_processing", _image_processor_name(kind))(**options)
    whole: Any = _class_named(kind, "processing", _auto("processing_auto").PROCESSOR_MAPPING_NAMES[kind])

    class Processor(whole):  # type: ignore[misc]
        """The processor with tensors that a trace sees, and without parts that no image needs."""

        def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
            return None if argument is None else super().check_argument_for_proper_class(name, argument)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            import torch
            from torch._subclasses.fake_tensor import FakeTensor

            made = super().__call__(*args, **kwargs)
            for name, value in made.items():
                if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
                    made[name] = value.clone()  # arrays become tensors without an operation
            return made

        def save_pretrained(self, folder: Any, **_: Any) -> list[str]:
            """Save the tokenizer alone, as with a checkpoint: a part that is left out can't be saved."""
            return list(self.tokenizer.save_pretrained(folder))

        def batch_decode(self, rows: Any, **_: Any) -> list[str]:
            """Return empty texts: decoding takes time, and its result is not used."""
            return [""] * len(rows)

    Processor.__name__ = whole.__name__
    parts = dict.fromkeys(whole.get_attributes())
    length = {"image_seq_length": images["tokens"]} if "image_seq_length" in whole.__init__.__code__.co_varnames else {}
    parts |= {"image_processor": image_processor, "tokenizer": tokenizer}
    made = Processor(**parts, **length)
    image, around = made.image_token, (tokenizer.boi_token, tokenizer.eoi_token)
    # Images side by side need tokens between them: their positions follow from runs of image tokens.
    made.chat_template = synthetic.IMAGE_TEMPLATE.replace("IMAGE", image if image in around else image.join(around))
    return made


def processor_for(loaded: Any, images: Mapping[str, Any]) -> Any:
    """Return the processor of a loaded model: that of its folder, or a synthetic one."""
    from transformers import AutoConfig, AutoProcessor

    if (loaded.folder / "preprocessor_config.json").is_file():
        return AutoProcessor.from_pretrained(str(loaded.folder))
    config = AutoConfig.from_pretrained(str(loaded.folder))
    return processor_of(loaded.tokenizer, config, images)


def _auto(name: str) -> Any:
    return importlib.import_module(f"transformers.models.auto.{name}")


def _image_processor_name(kind: str) -> str:
    """Return the class of images in PIL, whose shapes are those of every other one; it needs no torchvision."""
    named = _auto("image_processing_auto").IMAGE_PROCESSOR_MAPPING_NAMES[kind]
    return str(named["pil"] if isinstance(named, Mapping) else named[0])


def _class_named(kind: str, module: str, name: str) -> Any:
    import transformers

    found = getattr(transformers, name, None)
    if found is not None and found.__module__.startswith("transformers.models."):
        return found
    raise ImportError(
        f"transformers {transformers.__version__} has no {name} for {kind}: install pillow, or a newer transformers"
    )


def pictures(images: Mapping[str, Any]) -> list[Any]:
    """Return the images of one row."""
    from PIL import Image

    return [Image.new("RGB", (images["width"], images["height"]))] * int(images["count"])


def messages(processor: Any, images: Mapping[str, Any], tokens: int, *, generates: bool) -> list[dict[str, Any]]:
    """Return a user's message that has this length as the trainer renders it, with its images."""
    blank = [{"type": "image", "image": one} for one in pictures(images)] + [{"type": "text", "text": ""}]
    rendered = processor.apply_chat_template(
        [[{"role": "user", "content": blank}]], add_generation_prompt=generates, tokenize=True, return_dict=True
    )
    return [{"role": "user", "content": FILL * _rest(tokens, len(rendered["input_ids"][0]))}]


def _rest(tokens: int, taken: int) -> int:
    if tokens < taken:
        raise TooManyImageTokens(f"a row of {tokens} tokens can't hold its images, which take {taken} tokens")
    return tokens - taken


def tokenizer(scratch: Path, vocabulary: int) -> Any:
    """Return a synthetic tokenizer with tokens of images."""
    from . import base_model

    folder = scratch / "tokenizer"
    synthetic.write_model_folder(folder, {"vocab_size": vocabulary, "model_type": "qwen2", "vision_config": {}})
    return base_model.tokenizer(folder, trust_remote_code=False)


def with_ids(model: Any, tokenizer: Any) -> Any:
    """Return the model, which takes the tokenizer's ids for tokens of images."""
    for name, fields in synthetic.IMAGE_TOKEN_IDS.items():
        for field in fields:
            if hasattr(model.config, field):
                setattr(model.config, field, tokenizer.convert_tokens_to_ids(synthetic.IMAGE_TOKENS[name]))
    return model
