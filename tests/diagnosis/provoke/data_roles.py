"""A conversation that the model's template refuses."""

from __future__ import annotations

from parts import MODEL, rows, sft
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(MODEL)
tokenizer.chat_template = (
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{"
    " raise_exception('After the optional system message, conversation roles must alternate"
    " user/assistant/...') }}{% endif %}{{ message['content'] }}{% endfor %}"
)
turns = [{"role": "assistant", "content": "4"}, {"role": "user", "content": "2 + 2?"}]
sft(data=rows(messages=turns), trainer={"processing_class": tokenizer})
