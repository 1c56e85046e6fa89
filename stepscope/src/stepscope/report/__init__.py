"""Reports of diagnoses: text, HTML, Markdown, files of results for programs, comparisons, and a page."""

from stepscope.report.compare import Comparison, compare
from stepscope.report.documents import SCHEMA, ResultError, document, load, parse, read
from stepscope.report.markdown import markdown
from stepscope.report.page import page

__all__ = ["SCHEMA", "Comparison", "ResultError", "compare", "document", "load", "markdown", "page", "parse", "read"]
