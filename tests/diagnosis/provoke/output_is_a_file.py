"""An output folder that is a file."""

from __future__ import annotations

from pathlib import Path

from parts import plain_trainer

Path("out").write_text("notes")
plain_trainer(save_strategy="steps", save_steps=1)
