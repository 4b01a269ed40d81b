"""Limit of prompts: the longest one of the user's data, unless a limit is given.

TRL truncates no prompt, so a limit below the longest prompt leaves rows out, which changes what is learned.
"""

from __future__ import annotations

from dataclasses import replace

from autotune.core.errors import BadInput
from autotune.request.job_builder import ParsedRequest

PROMPT_KNOB = "max_prompt_length"
PERCENTILES = (99, 95, 90)  # percentiles of the dataset's prompt lengths to try as shorter limits


def with_longest_prompt(request: ParsedRequest) -> ParsedRequest:
    """Limit prompts to the longest one of the data. Unreadable data leave the space's limit, with a note."""
    job, workload = request.job, request.job.task.workload
    if PROMPT_KNOB not in job.space or PROMPT_KNOB in request.named or PROMPT_KNOB in workload.held:
        return request
    try:
        found = request.trainer.prompt_lengths(job.task)
    except BadInput as error:
        limit = job.space[PROMPT_KNOB].choices[0]
        note = f"{error.what} Prompts are limited to {limit} tokens, and rows with longer ones left out: --max-prompt-length N"
        return replace(request, notes=(*request.notes, f"{note} sets another limit"))
    if found is None:
        return request
    images = 0 if workload.images is None else workload.images.row_tokens
    longest = found.percentiles[100] + images
    shorter = sorted({found.percentiles[share] + images for share in PERCENTILES if share in found.percentiles} - {longest})
    workload = replace(workload, held={**workload.held, PROMPT_KNOB: longest})
    space = job.space.with_choices({PROMPT_KNOB: (longest,)})
    return replace(
        request,
        job=replace(job, task=replace(job.task, workload=workload), space=space),
        whole_space=request.whole_space.with_choices({PROMPT_KNOB: (longest, *reversed(shorter))}),
        assumed=(*request.assumed, f"prompts of up to {longest} tokens, the longest of the {found.rows:,} rows"),
    )
