"""A script without a flag that it needs."""

from __future__ import annotations

import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True)
parser.add_argument("--dataset", required=True)
parser.parse_args(["--model", "Qwen2-tiny"])
