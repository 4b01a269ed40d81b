"""Losses over a large vocabulary, against memory measured on an A100.

The figures are those of liger-kernel's own benchmark table
(`benchmark/data/all_benchmark_data.csv`, kernel `fused_linear_grpo_loss_token`, version 0.6.1): a
GRPO loss with a reference, rows of 1,024 tokens, hidden size 4,096, a vocabulary of 128,256,
bfloat16; `torch.cuda.max_memory_allocated` in MiB by rows, over several iterations.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from tests.worker.tracing.traced_code import traced  # noqa: E402

ROW = 1024
HIDDEN = 4096
VOCABULARY = 128256
MIB = 2**20

MATERIALISED = {
    2: 9083.28125,
    4: 13138.3125,
    8: 21250.375,
    16: 37474.5,
}
CHUNKED = {
    2: 7344.77685546875,
    4: 7408.80029296875,
    8: 7536.84716796875,
    16: 7792.94091796875,
}

OVERLAYS = os.environ.get("AUTOTUNE_TRL_OVERLAYS")

MATRIX = VOCABULARY * HIDDEN * 2 / MIB
OUTSIDE = 2 * MATRIX + 2 * 8.125
"""Other bytes of the benchmark's process: two projections of the module it compares with, and
cuBLAS's workspaces."""


class Projections:
    """Tensors of the policy and the reference, and a batch."""

    def __init__(self, rows: int) -> None:
        def matrix(*shape: int, grad: bool = False) -> Any:
            return torch.empty(*shape, dtype=torch.bfloat16, requires_grad=grad)

        self.policy, self.reference = (
            matrix(VOCABULARY, HIDDEN, grad=True),
            matrix(VOCABULARY, HIDDEN),
        )
        self.hidden, self.reference_hidden = (
            matrix(rows, ROW, HIDDEN, grad=True),
            matrix(rows, ROW, HIDDEN),
        )
        self.chosen = torch.zeros(rows, ROW, dtype=torch.long)
        self.mask, self.advantages = torch.ones(rows, ROW), matrix(rows)


def log_probabilities(logits: Any, chosen: Any) -> Any:
    return torch.log_softmax(logits.float(), dim=-1).gather(-1, chosen.unsqueeze(-1)).squeeze(-1)


def materialised(batch: Projections) -> Any:
    """Logits in bfloat16 and float32 for the policy, whose log-probabilities are saved, then for
    the reference."""
    logits = batch.hidden @ batch.policy.t()
    policy = log_probabilities(logits, batch.chosen)
    with torch.no_grad():
        reference_logits = batch.reference_hidden @ batch.reference.t()
        reference = log_probabilities(reference_logits, batch.chosen)
    ratio = torch.exp(policy - policy.detach()) * batch.advantages.unsqueeze(1)
    drift = torch.exp(reference - policy) - (reference - policy) - 1
    return ((0.1 * drift - ratio) * batch.mask).sum() / batch.mask.sum()


def chunked(batch: Projections) -> Any:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    loss = LigerFusedLinearGRPOLoss(
        beta=0.1,
        compiled=True,
        use_ref_model=True,
        loss_type="bnpo",
        importance_sampling_level="token",
    )
    operands = (batch.hidden, batch.policy, batch.chosen, batch.mask, batch.advantages)
    return loss(*operands, ref_input=batch.reference_hidden, ref_weight=batch.reference)[0]


def peak(loss: Any, rows: int, **settings: Any) -> float:
    def code() -> Any:
        batch = Projections(rows)
        for _ in range(2):
            loss(batch).backward()
        return batch

    return traced(code, {"settings": settings, "method": "grpo"}).most / MIB


def test_a_loss_with_full_logits_grows_by_2028_mib_per_row() -> None:
    peaks = {rows: peak(materialised, rows) for rows in MATERIALISED}
    for fewer, many in ((2, 4), (4, 8), (8, 16)):
        slope = (peaks[many] - peaks[fewer]) / (many - fewer)
        assert slope == pytest.approx(2028, abs=0.1)
        assert slope == pytest.approx(
            (MATERIALISED[many] - MATERIALISED[fewer]) / (many - fewer), rel=0.0005
        )


def test_the_peak_with_full_logits_is_the_measured_one() -> None:
    for rows, measured in MATERIALISED.items():
        assert peak(materialised, rows) + OUTSIDE == pytest.approx(measured, rel=0.0005)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ligers_chunked_loss_grows_by_32_mib_per_row() -> None:
    """Peak of hidden states and their gradients, with the logits of one chunk. Run in a process of
    its own: only it may import liger-kernel."""
    overlay = Path(OVERLAYS or "").resolve() / "foresight-liger"
    if not OVERLAYS or not overlay.is_dir():
        pytest.skip(
            "`make test-all` lays liger-kernel over the environment; AUTOTUNE_TRL_OVERLAYS names"
            " the folder"
        )
    code = (
        "import json; from tests.worker.tracing.test_losses import chunked, peak; "
        "print(json.dumps([peak(chunked, rows, use_liger_kernel=True) for rows in (2, 4, 8)]))"
    )
    environment = {**os.environ, "PYTHONPATH": str(overlay)}
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=800,
        env=environment,
        cwd=Path(__file__).parents[3],
    )
    assert done.returncode == 0, done.stderr[-3000:]
    peaks = dict(zip((2, 4, 8), json.loads(done.stdout.splitlines()[-1]), strict=True))
    for fewer, many in ((2, 4), (4, 8)):
        slope = (peaks[many] - peaks[fewer]) / (many - fewer)
        assert slope == pytest.approx((CHUNKED[many] - CHUNKED[fewer]) / (many - fewer), rel=0.001)


def test_trls_chunked_loss_does_not_grow_with_the_vocabulary() -> None:
    kernels = pytest.importorskip("trl.kernels")
    function = getattr(kernels, "ChunkedLogProbFunction", None)
    if function is None:
        pytest.skip("this TRL has no chunked loss")

    def code(rows: int) -> Any:
        batch = Projections(rows)
        flat = batch.hidden.reshape(-1, HIDDEN)
        function.apply(
            flat,
            batch.policy,
            None,
            batch.chosen.reshape(-1),
            1.0,
            32768,
            None,
            1.0,
            ("log_probs",),
        )[0].sum().backward()
        return batch

    peaks = {rows: traced(lambda rows=rows: code(rows)).most / MIB for rows in (8, 16)}
    hidden = ROW * HIDDEN * 2 / MIB
    assert (peaks[16] - peaks[8]) / 8 == pytest.approx(
        2 * hidden + 2 * hidden + hidden, abs=0.2
    )  # both, and a gradient in float32 and bfloat16


def test_cross_entropy_of_bfloat16_logits_saves_both_widths() -> None:
    """Loss as in transformers since 4.48: bfloat16 logits, their float32 copy, and a gradient of
    each."""
    transformers = pytest.importorskip("transformers")

    def code(rows: int) -> Any:
        logits = torch.empty(rows, ROW, VOCABULARY, dtype=torch.bfloat16, requires_grad=True)
        labels = torch.zeros(rows, ROW, dtype=torch.long)
        transformers.loss.loss_utils.ForCausalLMLoss(logits, labels, VOCABULARY).backward()
        return logits

    narrow = ROW * VOCABULARY * 2 / MIB
    peaks = {rows: traced(lambda rows=rows: code(rows)).most / MIB for rows in (2, 4)}
    assert (peaks[4] - peaks[2]) / 2 == pytest.approx((1 + 2 + 2 + 2) * narrow, rel=0.01)
