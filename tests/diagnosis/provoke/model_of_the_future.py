"""A model type that this transformers does not have."""

from __future__ import annotations

import json
from pathlib import Path

from parts import MODEL, grpo

config = Path(MODEL) / "config.json"
config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": "qwen9"}))
grpo()
