"""Self-contained HTML page of an answer, rendered from its JSON document alone.

document -> report.document_types (typed) -> speed_chart.py, prediction_chart.py,
phase_charts.py (one Drawing each, of the parts in charts.py) -> render.py with page.html.jinja
"""
