"""Loss of verl's actor: log-probabilities, and the entropy where it is trained or scored."""

from __future__ import annotations

from autotune.core.job import Task
from autotune.frameworks.base import Values
from autotune.frameworks.stand_in_step import SpecFields
from autotune.frameworks.verl_batches import ACTOR, MODEL, does
from autotune.frameworks.verl_copies import ALWAYS_ENTROPY


def losses_of(values: Values, task: Task) -> SpecFields:
    """Return the loss and its options. Every scoring pass computes the entropy."""
    if values.is_on(f"{MODEL}.use_fused_kernels"):
        backend = values.text(f"{MODEL}.fused_kernel_options.impl_backend")
        head = "kernel" if backend == "triton" else "tokens"
        return {"loss": "logprobs_fused", "loss_options": {"head": head}}

    packs = values.is_on(f"{MODEL}.use_remove_padding")
    entropy_options: dict[str, object] = {"entropy": "softmax", "entropy_widened": True}
    if packs and values.is_on(f"{ACTOR}.fsdp_config.use_torch_compile"):
        entropy_options = {"entropy": "compiled"}
    if packs and values.is_on(f"{ACTOR}.entropy_from_logits_with_chunking"):
        chunk = values.count(f"{ACTOR}.entropy_from_logits_chunk_size")
        entropy_options["entropy_chunk"] = chunk

    trains_entropy = (
        values.fraction(f"{ACTOR}.entropy_coeff") != 0
        or values.is_on(f"{ACTOR}.calculate_entropy")
        or does(task, ALWAYS_ENTROPY)
    )
    loss_options: dict[str, object] = {
        "in_place": not trains_entropy,
        "kernel_package": "flash_attn",
        "kernel_user": "verl",
    }
    if not packs:
        loss_options["copied"] = True
    if trains_entropy:
        loss_options |= entropy_options
    return {"loss_options": loss_options, "score_options": entropy_options}
