"""TRL: its trainers, from the user's file or script to the written files.

    field_list, former_keys          keys of TRL's files, their defaults, and former keys
    user_config, config_values       the user's YAML
    config_launch_files              launch configurations that it names or holds, read by
        user_launch_files            the files of accelerate and DeepSpeed
    script_inspection, script_calls  the user's own script, which
        look_worker                  follows up to its trainer
        |
        v
    settings, load_settings          knobs to settings, with precision and adapter_settings
        |
        v
    legality                         rules, with grpo_config_rules and combinations
        |
        v
    requests, resident_models        requests to the worker; the models of a run
        |
        v
    output_files                     recommended.yaml, with output_data; written_settings compares
    launch_files                     accelerate.yaml and launch.sh
    script_files, script_patch       changes of the user's own script

`trainers` (and `async_grpo` with its rules and packed_rows) have one class for each method,
`script_trainer` one for the user's own script.
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
