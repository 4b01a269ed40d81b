"""A kernel that requires more on-chip memory than the GPU has."""

from __future__ import annotations

from parts import fail_at, plain_trainer

message = (
    "out of resource: shared memory, Required: 147456, Hardware limit: 101376. Reducing block sizes"
    " or `num_stages` may help."
)


class OutOfResources(Exception):
    __module__ = "triton.runtime.errors"


fail_at(
    "transformers.models.qwen2.modeling_qwen2:Qwen2Attention.forward",
    OutOfResources(message),
    call=5,
)
plain_trainer()
