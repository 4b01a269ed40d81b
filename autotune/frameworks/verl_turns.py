"""Search-R1's settings in verl's terms: rows of several turns, of which answers and search results
are the completion.

Search-R1 and its many copies are verl of early 2025 with a loop of turns (`generation.py` there):

    row   max_start_length, then turns of max_response_length + max_obs_length and a last answer,
          cut at max_prompt_length
    rows  rollout.n x rollout.n_agent for each prompt

With a start of 2,048, answers and results of 500, two turns and a cut at 4,096 tokens a row has
2,048 + min(4,096, 2 x (500 + 500) + 500) = 4,548 tokens.

RL-Factory (`envs/utils/tool_utils.py` there) generates up to `rollout.max_turns` answers of
max_response_length, with a tool's answer between two of them, and cuts no row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autotune.core.user_script import LaunchScript, StatedSetting, stated_number

PROMPT_COMPLETIONS = "actor_rollout_ref.rollout.n"
AGENTS = "actor_rollout_ref.rollout.n_agent"
STARTING = "data.max_start_length"
RESULT = "data.max_obs_length"
PROMPT = "data.max_prompt_length"
ANSWER = "data.max_response_length"
TURNS = "max_turns"


ANSWER_TURNS = "actor_rollout_ref.rollout.max_turns"
TOOL_ANSWER = "actor_rollout_ref.rollout.tool_response_length"

OF_ENGINE = {
    "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size": (
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size"
    ),
    "critic.fsdp.ulysses_sequence_parallel_size": "critic.ulysses_sequence_parallel_size",
}
"""Setting of an engine -> the older one, which counts above it if it is more than one
(`workers/config/actor.py`).
"""


def in_verl_terms(launch: LaunchScript) -> LaunchScript:
    """Return the launch with the row and the completions of verl's own settings."""
    stated = dict(launch.stated)
    for name, older_name in OF_ENGINE.items():
        if name in stated and stated_number(stated.get(older_name)) <= 1:
            stated[older_name] = stated.pop(name)
    assumed = list(launch.assumed)
    agents = stated.pop(AGENTS, None)
    if agents is not None and stated_number(agents):
        completions = stated_number(stated.get(PROMPT_COMPLETIONS)) or 1
        completions *= stated_number(agents)
        stated[PROMPT_COMPLETIONS] = _computed(agents, completions)
        assumed.append(f"{completions} completions of each prompt ({AGENTS}, line {agents.line})")
    start = stated.get(STARTING)
    numbers = [
        stated_number(stated.get(name)) for name in (STARTING, RESULT, PROMPT, ANSWER, TURNS)
    ]
    if start is not None and all(numbers):
        start_length, result, limit, answer, turns = numbers
        completion = min(limit, turns * (answer + result) + answer)
        stated[PROMPT] = _computed(start, start_length)
        stated[ANSWER] = _computed(start, completion)
        assumed.append(
            f"rows of {TURNS}={turns} turns: {STARTING}={start_length}, then {completion} tokens of"
            " answers and results"
        )
        del stated[STARTING], stated[RESULT], stated[TURNS]
    assumed.extend(_with_answers(stated))
    return replace(launch, stated=stated, assumed=tuple(assumed))


def _with_answers(stated: dict[str, StatedSetting]) -> Iterator[str]:
    """Make the completion that of all answers of a row, and yield what it counts."""
    answers = stated_number(stated.get(ANSWER_TURNS))
    answer = stated_number(stated.get(ANSWER))
    if answers < 2 or not answer:
        return
    tool_answer = stated_number(stated.get(TOOL_ANSWER))
    completion = answers * answer + (answers - 1) * tool_answer
    stated[ANSWER] = _computed(stated[ANSWER], completion)
    del stated[ANSWER_TURNS]
    counted = f"{answers} answers of {answer} tokens"
    if tool_answer:
        counted += f" and tools' answers of {tool_answer}"
    yield f"rows of {ANSWER_TURNS}={answers} turns: a completion is {counted}"
    if not tool_answer:
        yield (
            f"no tools' answers in these rows, which make them longer, and need more memory: --set"
            f" {ANSWER}=N gives the tokens of all turns"
        )


def _computed(stated: StatedSetting, value: int) -> StatedSetting:
    return StatedSetting(
        text=str(value),
        line=stated.line,
        span=None,
    )
