"""What a person or a program reads: prose and JSON made from a Recommendation or a Forecast, and nothing judged anew."""

from autotune.report.best import head_lines, keeping_the_best
from autotune.report.certificate import certificate_lines, certificate_row
from autotune.report.document import document
from autotune.report.folder import DOCUMENT, annotate, check_folder, publish
from autotune.report.forecast_document import forecast_document, prediction_document
from autotune.report.forecast_text import show_forecast, show_prediction, show_ways
from autotune.report.page import PAGE, figures_of, markdown, read_document, render, write_page
from autotune.report.progress import Progress
from autotune.report.text import show_answer, show_question

__all__ = [
    "DOCUMENT",
    "PAGE",
    "Progress",
    "annotate",
    "certificate_lines",
    "certificate_row",
    "check_folder",
    "document",
    "figures_of",
    "forecast_document",
    "head_lines",
    "keeping_the_best",
    "markdown",
    "prediction_document",
    "publish",
    "read_document",
    "render",
    "show_answer",
    "show_forecast",
    "show_prediction",
    "show_question",
    "show_ways",
    "write_page",
]
