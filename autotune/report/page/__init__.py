"""One self-contained HTML page per study, made from the answer's JSON document and from nothing else.

document -> evidence.py (what the page needs, checked) -> drawings (speeds, memories, times, foresights) -> render.py, page.*
"""

from autotune.report.page.evidence import Evidence, read_evidence
from autotune.report.page.files import read_document, write_page
from autotune.report.page.note import figures_of, markdown
from autotune.report.page.render import PAGE, render

__all__ = ["PAGE", "Evidence", "figures_of", "markdown", "read_document", "read_evidence", "render", "write_page"]
