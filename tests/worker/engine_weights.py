"""Loads a model and vLLM beside it, measures once, and reports the engine's arguments and weights.

    python tests/worker/engine_weights.py REQUEST.json
        {"load": {...}, "measure": {...}}  ->  JSON on stdout's last line

It needs a process of its own, because vLLM changes much of it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.worker.drive import adapter, events_stage


def weights_of(loaded: Any) -> Any:
    worker = loaded.engines._engine.llm_engine.model_executor.driver_worker
    return dict(worker.model_runner.model.named_parameters())["model.embed_tokens.weight"]


def alike(engines: Any, weights: Any) -> bool:
    """Compare in the engine's precision, which may be lower."""
    return bool((engines[: len(weights)] == weights.to(engines.dtype)).all())


def main() -> None:
    document = json.loads(Path(sys.argv[1]).read_text())
    trl = adapter()
    trl.warm(document["load"])
    loaded = trl.load(document["load"], events_stage(limit_bytes=4 * 2**30)[0])
    embeddings = dict(loaded.model.named_parameters())["model.embed_tokens.weight"]
    before = alike(weights_of(loaded), embeddings)
    result = trl.measure(loaded, document["measure"], events_stage(limit_bytes=4 * 2**30)[0])
    answer = {
        "load_format": loaded.engines.arguments.get("load_format"),
        "equal_before": before,
        "equal_after": alike(weights_of(loaded), embeddings),
        "files": sorted(file.name for file in loaded.folder.iterdir()),
        "lengths": [
            result["exercised"]["shortest_completion"],
            result["exercised"]["longest_completion"],
        ],
        "vocabulary": [loaded.tokenizer.vocab_size, loaded.model.config.vocab_size],
    }
    print("\n" + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
