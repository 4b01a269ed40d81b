"""Shortened rollouts of vLLM: few tokens are decoded, and ids and text have their full length."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

DECODED, ASKED = 4, 32


@dataclass
class Sampling:
    max_tokens: int
    min_tokens: int = 0
    skip_special_tokens: bool = False

    def clone(self) -> Sampling:
        return replace(self)


class Engine:
    """One completion for each prompt; older releases take ids by name."""

    def generate(
        self,
        prompts: Any,
        sampling_params: Any,
        prompt_token_ids: Any = None,
        use_tqdm: bool = True,
    ) -> list[Any]:
        count = len(prompts if prompt_token_ids is None else prompt_token_ids)
        ids = list(range(sampling_params.max_tokens))
        text = "" if prompt_token_ids is None else self.get_tokenizer().decode(ids)
        output = SimpleNamespace(
            token_ids=ids,
            logprobs=None,
            text=text,
        )
        return [SimpleNamespace(outputs=[output])] * count

    def get_tokenizer(self) -> Any:
        return SimpleNamespace(
            decode=lambda ids, **options: "".join(chr(ord("a") + number) for number in ids)
        )


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    pytest.importorskip("torch")
    from autotune.emulator.inject import emulator_rollouts

    class Shortened(Engine):
        """The patched method stays in this class."""

    monkeypatch.setattr(emulator_rollouts, "ROLLOUT_STRIDE", DECODED)
    emulator_rollouts.shorten_vllm(SimpleNamespace(LLM=Shortened))  # type: ignore[arg-type]
    return Shortened()


def test_ids_by_name_have_a_text_of_the_full_length(engine: Engine) -> None:
    completions = engine.generate(
        prompt_token_ids=[[1, 2], [3]],
        sampling_params=Sampling(ASKED),
        use_tqdm=False,
    )  # type: ignore[call-arg]
    assert len(completions) == 2
    output = completions[0].outputs[0]
    assert output.token_ids == [0, 1, 2, *[3] * (ASKED - 3)]
    assert output.text == "abc" + "d" * (ASKED - 3)


def test_ids_alone_stay_without_a_text(engine: Engine) -> None:
    output = engine.generate(["a prompt"], Sampling(ASKED))[0].outputs[0]
    assert (len(output.token_ids), output.text) == (ASKED, "")


def test_a_short_completion_is_left_as_it_is(engine: Engine) -> None:
    output = engine.generate(None, Sampling(DECODED), prompt_token_ids=[[1]])[0].outputs[0]
    assert (output.token_ids, output.text) == ([0, 1, 2, 3], "abcd")
