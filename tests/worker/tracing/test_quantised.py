"""Quantised models and optimizers: exact storages, and temporaries of unpacking."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from autotune.worker import releases  # noqa: E402
from autotune.worker.tracing import bitsandbytes_optimizers, fake_models, quantised  # noqa: E402
from tests.worker.tracing.traced_code import traced  # noqa: E402

ROWS, COLUMNS, TOKENS = 384, 256, 640
COUNT = ROWS * COLUMNS


class Model(torch.nn.Module):  # type: ignore[misc,name-defined]
    """A linear layer to quantise and a head that stays, with the attributes of a transformers
    model."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.body = torch.nn.Linear(COLUMNS, ROWS, bias=bias, dtype=torch.bfloat16)
        self.head = torch.nn.Linear(ROWS, 64, bias=False, dtype=torch.bfloat16)
        self.config: Any = type("Config", (), {})()

    def get_output_embeddings(self) -> Any:
        return self.head

    def forward(self, x: Any) -> Any:
        return self.head(self.body(x))


def quantised_layer(settings: dict[str, Any], bias: bool = False) -> Any:
    with torch.device("meta"):
        model = Model(bias)
    quantised.quantise(model, {"model": {"dtype": "bfloat16", **settings}})
    fake_models.materialise(model)
    return model


def weights(settings: dict[str, Any]) -> int:
    return traced(lambda: quantised_layer(settings)).left - ROWS * 64 * 2


BLOCKS = math.ceil(COUNT / 64)


def test_a_weight_is_there_whole_while_it_is_packed_in_4_bits() -> None:
    packed = traced(lambda: quantised_layer({"load_in_4bit": True}))
    plain = traced(lambda: quantised_layer({}))
    assert packed.most >= packed.left - ROWS * 64 * 2 + COUNT * 2  # the head comes later
    assert plain.most == plain.left


@pytest.mark.parametrize(
    ("settings", "size"),
    [
        ({}, COUNT * 2),
        ({"load_in_4bit": True}, COUNT // 2 + BLOCKS * 4 + 16 * 4),
        (
            {"load_in_4bit": True, "bnb_4bit_use_double_quant": True},
            COUNT // 2 + BLOCKS + math.ceil(BLOCKS / 256) * 4 + (16 + 256 + 1) * 4,
        ),
        (
            {"load_in_4bit": True, "bnb_4bit_quant_storage": "bfloat16"},
            COUNT // 2 + BLOCKS * 4 + 16 * 4,
        ),
        ({"load_in_8bit": True}, COUNT + ROWS * 4),
        ({"gptq_bits": 4}, COUNT // 2 + 2 * ROWS // 2 + 2 * ROWS * 2 + COLUMNS * 4),
        ({"gptq_bits": 8, "group_size": 64}, COUNT + 4 * ROWS + 4 * ROWS * 2 + COLUMNS * 4),
        ({"gptq_bits": 4, "group_size": -1}, COUNT // 2 + ROWS // 2 + ROWS * 2 + COLUMNS * 4),
    ],
)
def test_storages(settings: dict[str, Any], size: int) -> None:
    assert weights(settings) == size


def forward(
    settings: dict[str, Any],
    dtype: Any = torch.bfloat16,
    bias: bool = False,
) -> Any:
    def code() -> Any:
        model = quantised_layer(settings, bias)
        x = torch.empty(TOKENS, COLUMNS, dtype=dtype, requires_grad=True)
        return model, x, model.body(x)

    return traced(code)


@pytest.mark.parametrize(
    "settings",
    [
        {"load_in_4bit": True},
        {"gptq_bits": 4},
    ],
)
def test_the_weight_is_unpacked_for_the_product_and_freed(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(releases, "version", lambda package: "2.0.0")
    peaks = forward(settings)
    saved_bytes = weights(settings) + ROWS * 64 * 2 + TOKENS * (COLUMNS + ROWS) * 2
    assert peaks.left == saved_bytes  # input and output; the input is not saved again
    assert peaks.most == saved_bytes + COUNT * 2
    assert peaks.flops == 2 * TOKENS * COUNT


@pytest.mark.parametrize("installed", ["2.1.0", "7.7.0", None])
def test_gptqmodel_keeps_the_unpacked_weight_of_a_training_layer(
    installed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if installed:
        monkeypatch.setattr(releases, "version", lambda package: installed)
    peaks = forward({"gptq_bits": 4})
    assert (
        peaks.left
        == weights({"gptq_bits": 4}) + ROWS * 64 * 2 + TOKENS * (COLUMNS + ROWS) * 2 + COUNT * 2
    )
    assert peaks.flops == 2 * TOKENS * COUNT


def test_nested_scales_are_unpacked_first() -> None:
    nested = forward({"load_in_4bit": True, "bnb_4bit_use_double_quant": True})
    assert nested.most - nested.left == COUNT * 2


def test_computing_in_another_type_makes_copies() -> None:
    peaks = forward({"load_in_4bit": True, "bnb_4bit_compute_dtype": "float32"})
    assert peaks.most - peaks.left >= COUNT * 4 + TOKENS * COLUMNS * 4


def test_8bit_packs_the_input_and_accumulates_in_int32() -> None:
    peaks = forward({"load_in_8bit": True, "llm_int8_threshold": 0.0})
    saved_bytes = weights({"load_in_8bit": True}) + ROWS * 64 * 2 + TOKENS * (COLUMNS + ROWS) * 2
    assert peaks.left == saved_bytes
    inside = TOKENS * COLUMNS + TOKENS * 4 + TOKENS * ROWS * (4 + 2)
    assert peaks.most == saved_bytes - TOKENS * ROWS * 2 + inside
    assert peaks.flops == 2 * TOKENS * COUNT


@pytest.mark.parametrize(
    "settings",
    [
        {"load_in_4bit": True},
        {"load_in_8bit": True},
        {"gptq_bits": 4},
    ],
)
def test_the_input_gets_a_gradient_and_the_weight_none(settings: dict[str, Any]) -> None:
    def code() -> None:
        model = quantised_layer(settings, bias=True)
        x = torch.empty(2, TOKENS, COLUMNS, dtype=torch.bfloat16, requires_grad=True)
        model(x).sum().backward()
        assert x.grad.shape == x.shape
        assert model.body.weight.grad is None
        assert model.body.bias.grad is None

    assert traced(code).flops == 2 * 2 * TOKENS * (2 * COUNT + 3 * ROWS * 64)


def test_the_head_and_skipped_modules_are_not_quantised() -> None:
    model = followed_model({"load_in_4bit": True})
    assert type(model.head) is torch.nn.Linear
    assert type(model.body) is not torch.nn.Linear
    followed = followed_model({"load_in_4bit": True, "llm_int8_skip_modules": ["body"]})
    assert type(followed.body) is torch.nn.Linear
    assert type(followed.head) is not torch.nn.Linear


def followed_model(settings: dict[str, Any]) -> Any:
    with torch.device("meta"):
        model = Model()
    quantised.quantise(model, {"model": {"dtype": "bfloat16", **settings}})
    return model


def causal(settings: dict[str, Any]) -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen2Config(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
    )
    model = fake_models.build(config, torch.bfloat16, "sdpa")
    quantised.quantise(model, {"model": {"dtype": "bfloat16", **settings}})
    return model


def test_pefts_preparation_casts_only_unpacked_parameters() -> None:
    peft = pytest.importorskip("peft")
    model = peft.prepare_model_for_kbit_training(causal({"load_in_4bit": True}))
    kinds = {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert kinds["model.layers.0.self_attn.q_proj.weight"] is torch.uint8
    assert (
        kinds["model.norm.weight"]
        is kinds["model.embed_tokens.weight"]
        is kinds["lm_head.weight"]
        is torch.float32
    )
    assert model.is_gradient_checkpointing


def test_packed_weights_stored_as_bfloat16_are_not_cast() -> None:
    peft = pytest.importorskip("peft")
    _ = pytest.importorskip("bitsandbytes")
    model = peft.prepare_model_for_kbit_training(
        causal({"load_in_4bit": True, "bnb_4bit_quant_storage": "bfloat16"})
    )
    assert model.model.layers[0].self_attn.q_proj.weight.dtype is torch.bfloat16


QUANTISED: tuple[dict[str, Any], ...] = (
    {"load_in_4bit": True},
    {"load_in_8bit": True},
    {"gptq_bits": 4},
)
ADAPTERS: tuple[dict[str, Any], ...] = ({}, {"lora_dropout": 0.1}, {"use_dora": True})
NOT_IN_PEFT = ({"gptq_bits": 4}, {"use_dora": True})


@pytest.mark.parametrize(
    ("settings", "lora_settings"),
    [case for case in itertools.product(QUANTISED, ADAPTERS) if case != NOT_IN_PEFT],
)
def test_adapters_train_on_quantised_models(
    settings: dict[str, Any], lora_settings: dict[str, Any]
) -> None:
    peft = pytest.importorskip("peft")

    def code() -> None:
        model = peft.prepare_model_for_kbit_training(
            causal(settings), use_gradient_checkpointing=False
        )
        with fake_models.adapters_on_meta():
            model = peft.get_peft_model(
                model,
                peft.LoraConfig(
                    target_modules="all-linear", task_type="CAUSAL_LM", **lora_settings
                ),
            )
        fake_models.materialise(model)
        ids = torch.zeros(2, 32, dtype=torch.long)
        with torch.autocast("cuda", dtype=torch.bfloat16), fake_models.real_tensor_paths():
            model(input_ids=ids, labels=ids).loss.backward()
        trained = {
            name for name, parameter in model.named_parameters() if parameter.grad is not None
        }
        assert trained
        assert all("lora_" in name for name in trained)

    traced(code)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "bits"),
    [
        ({"load_in_4bit": True}, 4),
        ({"load_in_8bit": True}, 8),
        ({"gptq_bits": 4}, 4),
    ],
)
def test_trls_own_trainer_trains_quantised_models(settings: dict[str, Any], bits: int) -> None:
    pytest.importorskip("trl")
    from autotune.worker.trl import step_trace

    shape = {
        "model_type": "qwen2",
        "num_hidden_layers": 2,
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1024,
        "tie_word_embeddings": False,
    }
    linear = 2 * (2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 1024)

    def weights(packed: dict[str, Any]) -> int:
        answer = step_trace.trace(
            {
                "method": "sft",
                "device": "cuda",
                "steps": 2,
                "micro_steps": None,
                "sharding": {"kind": "none", "ranks": 1},
                "model": {
                    "name": "x",
                    "folder": None,
                    "config": shape,
                    "dtype": "bfloat16",
                    **packed,
                },
                "adapter": {"lora_r": 8, "lora_target_modules": ["q_proj", "v_proj"]},
                "trust_remote_code": False,
                "settings": {
                    "per_device_train_batch_size": 2,
                    "bf16": True,
                    "gradient_checkpointing": False,
                },
                "lengths": {"prompt": 32, "completion": 32, "padded": False},
            }
        )
        part = answer["part_names"].index("weights")
        freed = {-entry - 1 for entry in answer["events"] if entry < 0}
        entries = (
            at for at, kind in enumerate(answer["parts"]) if kind == part and at not in freed
        )
        return sum(answer["sizes"][at] for at in entries)

    step_trace.warm({"model": {"config": shape}})
    plain = weights({})
    packed = weights(settings)
    assert plain - packed == pytest.approx(linear * (2 - bits / 8), rel=0.1)  # scales aside


# Optimizers.


def state(
    name: str,
    numbers: int = 100_352,
    steps: int = 2,
) -> tuple[int, Any]:
    optimizers: list[Any] = []

    def code() -> Any:
        parameter = torch.nn.Parameter(torch.empty(numbers, dtype=torch.bfloat16))
        optimizer = bitsandbytes_optimizers.optimizer_for(name, [parameter], lr=1e-3)
        parameter.grad = torch.empty(numbers, dtype=torch.bfloat16)
        for _ in range(steps):
            optimizer.step()
        optimizers.append(optimizer)
        return parameter, optimizer

    return traced(code).left - 2 * numbers * 2, optimizers[0]


SCALES = 100_352 // 256 * 4


@pytest.mark.parametrize(
    ("name", "allocated", "managed"),
    [
        ("adamw_8bit", 2 * (100_352 + SCALES), 0),
        ("adamw_bnb_8bit", 2 * (100_352 + SCALES), 0),
        ("paged_adamw_32bit", 0, 2 * 100_352 * 4),
        ("paged_adamw_8bit", 2 * SCALES, 2 * 100_352),
        ("lion_8bit", 100_352 + SCALES, 0),
        ("lion_32bit", 100_352 * 4, 0),
        ("rmsprop_bnb_8bit", 100_352 + SCALES, 0),
        ("ademamix_8bit", 3 * (100_352 + SCALES), 0),
    ],
)
def test_the_state_of_bitsandbytes_optimizers(
    name: str,
    allocated: int,
    managed: int,
) -> None:
    left_bytes, optimizer = state(name)
    assert (left_bytes, optimizer.managed_bytes) == (allocated, managed)


def test_small_parameters_have_float32_state_and_are_not_paged() -> None:
    assert state("adamw_8bit", 4095)[0] == 2 * 4095 * 4
    assert state("adamw_8bit", 4096)[0] == 2 * (4096 + 16 * 4)
    assert state("paged_adamw_32bit", 99_999)[0] == 2 * 99_999 * 4


@pytest.mark.parametrize(
    "name", ["adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adamw_torch_4bit", "adamw_hf"]
)
def test_other_optimizers_are_not_bitsandbytes(name: str) -> None:
    assert bitsandbytes_optimizers.optimizer_for(name, [torch.nn.Parameter(torch.empty(1))]) is None


def test_transformers_finds_them_by_name_with_float32_state_for_embeddings() -> None:
    transformers = pytest.importorskip("transformers")
    embedding = torch.nn.Embedding(64, 128)
    before = bitsandbytes_optimizers._Manager._only
    with bitsandbytes_optimizers.installed():
        arguments = transformers.TrainingArguments(
            output_dir="unused",
            optim="adamw_8bit",
            use_cpu=True,
            report_to=[],
        )
        kind, options = transformers.Trainer.get_optimizer_cls_and_kwargs(arguments)
        assert kind.__module__ == "bitsandbytes.optim"
        assert options["optim_bits"] == 8
        import bitsandbytes

        bitsandbytes.optim.GlobalOptimManager.get_instance().register_module_override(
            embedding, "weight", {"optim_bits": 32}
        )
        optimizer = kind(embedding.parameters(), **options)
        embedding.weight.grad = torch.zeros_like(embedding.weight)
        optimizer.step()
        assert optimizer.state[embedding.weight]["state1"].dtype is torch.float32
    assert bitsandbytes_optimizers._Manager._only is before
