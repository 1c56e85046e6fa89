"""Reports of diagnoses: text, HTML, files of results for programs, comparisons, and a page."""

from stepscope.report.compare import Comparison, compare
from stepscope.report.documents import SCHEMA, ResultError, document, read
from stepscope.report.page import page

__all__ = ["SCHEMA", "Comparison", "ResultError", "compare", "document", "page", "read"]
