"""Trace adapter whose first step takes longer than any budget."""

import time


def warm(load_hint):
    return {}


def load(request, stage):
    return {}


def measure(
    loaded,
    specification,
    stage,
):
    time.sleep(600)
