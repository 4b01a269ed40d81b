"""What a person or a program reads: prose and JSON made from a Recommendation, and nothing judged anew."""

from autotune.report.document import document, failed_without_memory
from autotune.report.folder import check_folder, publish
from autotune.report.progress import Progress
from autotune.report.text import show_answer, show_question

__all__ = ["Progress", "check_folder", "document", "failed_without_memory", "publish", "show_answer", "show_question"]
