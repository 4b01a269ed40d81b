"""Rows of several turns in SkyRL's terms: a prompt, and what follows until no turn may begin.

SkyRL begins another turn as long as the row has no more than `generator.max_input_length` tokens
(`agent_loop` of its `SkyRLGymGenerator`), and a turn adds up to
`generator.sampling_params.max_generate_length`:

    row  at most max_input_length + max_generate_length

With prompts of 2,048, an input of 4,096 and answers of 500 tokens a row has up to 4,596, of which
2,548 follow the prompt. Without a `max_input_length` it is `trainer.max_prompt_length`, and the
row is a prompt with one answer.
"""

from __future__ import annotations

from dataclasses import replace

from autotune.core.user_script import LaunchScript, stated_number

MOST_TURNS = "generator.max_turns"
INPUT = "generator.max_input_length"
LONGEST_ANSWER = "generator.sampling_params.max_generate_length"
LONGEST_PROMPT = "trainer.max_prompt_length"


def with_rows_of_turns(launch: LaunchScript) -> LaunchScript:
    """Return the launch with completions as long as all turns of a row."""
    turns = launch.stated.get(MOST_TURNS)
    if turns is None or stated_number(turns) <= 1:
        return launch
    longest_input = stated_number(launch.stated.get(INPUT))
    prompt = stated_number(launch.stated.get(LONGEST_PROMPT))
    answer = stated_number(launch.stated.get(LONGEST_ANSWER))
    is_stated = longest_input and prompt and answer
    if INPUT in launch.stated and not is_stated:
        return launch  # its numbers are known to a run alone
    stated = dict(launch.stated)
    del stated[MOST_TURNS]
    sentence = (
        f"rows of {MOST_TURNS}={turns.text} turns are no longer than a prompt and an answer,"
        f" because {INPUT} is not stated"
    )
    if is_stated:
        completion = max(answer, longest_input + answer - prompt)
        stated[LONGEST_ANSWER] = replace(stated[LONGEST_ANSWER], text=str(completion))
        sentence = (
            f"rows of {MOST_TURNS}={turns.text} turns: a prompt of {prompt}, then up to"
            f" {completion} tokens, until {INPUT}={longest_input} and an answer of"
            f" {answer} are reached"
        )
    return replace(launch, stated=stated, assumed=(*launch.assumed, sentence))
