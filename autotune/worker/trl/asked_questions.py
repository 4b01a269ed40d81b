"""Answers to what an inspected script asks its user: nobody is asked, and stdin is the worker's."""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Callable
from typing import Any

USUAL_ANSWERS = ("1", "y", "yes", "0")
CHOICES = re.compile(r"[(\[]([^()\[\]]*/[^()\[\]]*)[)\]]")
"""Answers in a question: `Which one (1/2/3)?`."""

RANGE = re.compile(r"\b(?P<first>[0-9]+)\s*(?:-|\u2013|to)\s*[0-9]+\b")
"""Numbers in a question: `Choose a model (1-9)`."""

CONFIRMATION = re.compile(r"^y(?:es)?$", re.IGNORECASE)
"""Answer with which a script goes on."""

OF_A_NUMBER = re.compile(r"\b(?:int|float)\(\s*input\(")


def answers_of_a_user(report: Callable[[str, str], None]) -> Callable[..., str]:
    """Return a function that takes a question and returns what somebody would type. A question that
    comes again gets the next answer, until there is none. `report` takes the kind of what was
    replaced, and its text.
    """
    questions: dict[str, int] = {}

    def typed(question: Any = "", *_: Any, **__: Any) -> str:
        text = str(question)
        report("secret", "what the script asks for")
        place = questions.get(text, 0)
        questions[text] = place + 1

        asker = sys._getframe(1)
        file = asker.f_code.co_filename
        statement = linecache.getline(file, asker.f_lineno)
        likely = _likely_answers(text, statement)
        answers = (*likely, "absent", *_choices_of(text), *USUAL_ANSWERS)
        if place >= len(answers):
            raise EOFError(f"the script asks {text!r} until it likes the answer")
        answer = answers[place]
        if place > 0 or likely:
            report("argument", f"{answer or 'nothing'} to {text.strip()}")
        return answer

    return typed


def _likely_answers(question: str, statement: str) -> list[str]:
    """Return what a question is usually answered with: yes, its own default, or a number."""
    confirmations = [answer for answer in _choices_of(question) if CONFIRMATION.match(answer)]
    if confirmations:
        return [confirmations[0].lower()]
    if "default" in question.lower():
        return [""]
    numbers = RANGE.search(question)
    if numbers is not None:
        return [numbers["first"]]
    return ["1"] if OF_A_NUMBER.search(statement) else []


def _choices_of(question: str) -> list[str]:
    choices = CHOICES.search(question)
    if choices is None:
        return []
    answers = []
    for choice in choices[1].split("/"):
        answer = choice.strip()
        answers.append(answer)
    return answers
