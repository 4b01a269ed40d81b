"""The same in a notebook's cell."""

from __future__ import annotations

import sys

from IPython.core.ultratb import FormattedTB
from parts import fail_at, gpu_memory, out_of_memory, sft

shown = FormattedTB(
    mode="Context",
    theme_name="nocolor",
    tb_offset=0,
)
sys.excepthook = lambda *error: print(shown.text(*error))
message = gpu_memory(
    "1.16 GiB",
    total="79.19 GiB",
    free="512.00 MiB",
    process="78.60 GiB",
    live="76.02 GiB",
    idle="1.40 GiB",
    torch="2.6",
)
fail_at("transformers.models.qwen2.modeling_qwen2:Qwen2MLP.forward", out_of_memory(message), call=7)
sft()
