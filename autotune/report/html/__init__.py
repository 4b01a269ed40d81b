"""Self-contained HTML page of an answer, rendered from its JSON document alone.

document -> report.document_types (typed) -> chart_*.py (one Drawing each) -> render.py with
page.html.jinja
"""

from autotune.report.document_types import AnswerDocument, read_answer
from autotune.report.html.render import PAGE, figures_of, markdown, read_document, render, write_page

__all__ = ["PAGE", "AnswerDocument", "figures_of", "markdown", "read_answer", "read_document", "render", "write_page"]
