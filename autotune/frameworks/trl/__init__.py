"""TRL: its trainers, their settings, legality, requests and files, and the users' own files and
scripts.
"""

from autotune.frameworks.trl.async_grpo import TrlAsyncGrpo
from autotune.frameworks.trl.trainers import TrlGrpo, TrlOffline, TrlOnlineDpo, TrlRloo

TRAINERS = (
    TrlGrpo(),
    TrlRloo(),
    TrlOffline("sft"),
    TrlOffline("dpo"),
    TrlOffline("kto", {"trl": "trl>=1.8,<1.17"}),
    TrlOffline("reward"),
    TrlOnlineDpo(),
    TrlAsyncGrpo(),
)
