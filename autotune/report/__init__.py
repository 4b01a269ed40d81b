"""Report of an answer: JSON document, terminal text and HTML page. All of them render; none
evaluates."""

from autotune.report.answer_document import document, prediction_document
from autotune.report.certificate import certificate_lines, certificate_row
from autotune.report.check_text import check_document, show_check
from autotune.report.file_section import FinalFiles, show_file
from autotune.report.folder_claim import claimed_folder
from autotune.report.forecast_text import show_forecast, show_prediction, show_ways
from autotune.report.html import PAGE, figures_of, markdown, read_document, render, write_page
from autotune.report.output_folder import DOCUMENT, best_so_far_listener, check_folder, head_lines, publish
from autotune.report.progress import Progress
from autotune.report.terminal import show_answer, show_job
from autotune.report.trackers import check_tracker, log_answer

__all__ = [
    "DOCUMENT",
    "PAGE",
    "FinalFiles",
    "Progress",
    "best_so_far_listener",
    "certificate_lines",
    "certificate_row",
    "check_document",
    "check_folder",
    "check_tracker",
    "claimed_folder",
    "document",
    "figures_of",
    "head_lines",
    "log_answer",
    "markdown",
    "prediction_document",
    "publish",
    "read_document",
    "render",
    "show_answer",
    "show_check",
    "show_file",
    "show_forecast",
    "show_job",
    "show_prediction",
    "show_ways",
    "write_page",
]
