"""Report of an answer: JSON document, terminal text and HTML page. All of them render; none
evaluates.
"""
