"""Self-contained HTML page of an answer, rendered from its JSON document alone.

document -> report.document_types (typed) -> chart_*.py (one Drawing each) -> render.py with
page.html.jinja
"""
