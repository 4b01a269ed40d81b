"""`predict --explain`: each setting with its origin."""

from __future__ import annotations

from pathlib import Path

from autotune.request.explanation import explained, origins
from autotune.request.job_builder import candidate_of_job
from tests.request.test_unset_variables import MICRO_BATCH, PARALLEL, VERL, request_of


def test_each_setting_names_what_states_it(tmp_path: Path) -> None:
    text = f"PROMPT=256\n{VERL} \\\n  {MICRO_BATCH}=2 \\\n  data.max_prompt_length=$PROMPT\n"
    request = request_of(tmp_path, text, hold=(f"{PARALLEL}=4",))
    candidate = candidate_of_job(request)
    rows = origins(request, candidate)
    assert rows.keys() == candidate.settings.keys()

    script = str(tmp_path / "run.sh")
    assert rows[MICRO_BATCH] == {"source": "file", "place": script, "line": 3}
    assert rows["data.max_prompt_length"] == {"source": "file", "place": script, "line": 4}
    assert rows[PARALLEL] == {"source": "flag", "place": "--hold", "line": None}
    gpu_share = rows["actor_rollout_ref.rollout.gpu_memory_utilization"]
    assert gpu_share == {"source": "default", "place": "verl 0.9.1", "line": None}
    assert rows["trainer.n_gpus_per_node"]["source"] == "derived"


def test_the_lines_have_value_and_origin(tmp_path: Path) -> None:
    request = request_of(tmp_path, f"{VERL} {MICRO_BATCH}=2\n")
    candidate = candidate_of_job(request)
    document = {"settings": candidate.settings, "origins": origins(request, candidate)}
    lines = {line.split()[0]: line.split(maxsplit=2)[1:] for line in explained(document)}
    assert lines[MICRO_BATCH] == ["2", f"{tmp_path / 'run.sh'}, line 1"]
    assert lines["data.train_batch_size"] == ["1024", "default: verl 0.9.1"]
