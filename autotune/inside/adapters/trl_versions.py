"""What differs between releases of TRL, in one place. Everything else of the adapter is written once for all of them.

The names that the adapter hooks (`_generate`, `_calculate_rewards`, `_get_per_token_logps_and_entropies`, `_tokenize_prompts`,
`_generate_and_score_completions`, `VLLMGeneration.sync_weights`) are private to TRL: they stand here, and `missing` says at
once which of them a release lacks, before anything is measured by a hook that is never called.
"""

from __future__ import annotations

from typing import Any

OLDEST = "1.0.0"
NEWEST = "1.16.0"

HOOKED_METHODS = (
    "_generate",
    "_generate_single_turn",
    "_tokenize_prompts",
    "_generate_and_score_completions",
    "_calculate_rewards",
    "_get_per_token_logps_and_entropies",
    "compute_loss",
)
"""Methods of GRPOTrainer by which phases, lengths and tokens are known."""


class UnsupportedFramework(ImportError):
    """The installed release lacks something that a probe hooks into."""


def without(trainer: str, module: str, newest: str) -> str:
    """What is said where the installed release has lost, or not yet, a trainer."""
    import trl

    return f"TRL {trl.__version__} has no {trainer} in {module}; releases {OLDEST} to {newest} have: pip install 'trl=={newest}'"


def supported() -> tuple[str, str]:
    """The oldest and the newest release that the tests run against."""
    return OLDEST, NEWEST


def check(trainer_class: Any, generation: Any, version: str, hooks: tuple[str, ...] = HOOKED_METHODS) -> None:
    """Raise UnsupportedFramework, naming what is missing."""
    missing = [name for name in hooks if not hasattr(trainer_class, name)]
    if not hasattr(getattr(generation, "VLLMGeneration", None), "sync_weights"):
        missing.append("VLLMGeneration.sync_weights")
    if missing:
        raise UnsupportedFramework(
            f"TRL {version} has no {', '.join(missing)}, which a probe measures by; releases {OLDEST} to {NEWEST} have."
        )
