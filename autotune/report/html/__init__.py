"""Self-contained HTML page of an answer, rendered from its JSON document alone.

document -> report.document_types (typed) -> charts.py, phase_charts.py (one Drawing each) ->
render.py with page.html.jinja
"""
