"""Results as a file for programs: written, read again, compared, and shown as a page."""

from stepscope.results.compare import Comparison, compare
from stepscope.results.documents import SCHEMA, ResultError, document, read
from stepscope.results.page import page

__all__ = ["SCHEMA", "Comparison", "ResultError", "compare", "document", "page", "read"]
