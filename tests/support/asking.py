"""Asks a running TensorBoard for the data of the profiler tab's views, as its page does."""

from helpers import traces


def ask(server, page, run, view="Overview", **query):
    """Ask for the data of a view, of a run's only worker and span."""
    (worker,) = server.get("workers", run=run, view=view)
    (span,) = server.get("spans", run=run, worker=worker)
    return server.get(page, run=run, worker=worker, span=span, **query)


def overview(server, run, worker=None):
    """Return the Overview's steps, of all spans: a list of (number, {category: µs}). A run may have several workers."""
    if worker is None:
        (worker,) = server.get("workers", run=run, view="Overview")
    spans = server.get("spans", run=run, worker=worker)
    tables = [server.get("overview", run=run, worker=worker, span=span)["steps"] for span in spans]
    return [
        (
            int(row[0]),
            {
                column["name"]: row[index]
                for index, column in enumerate(table["columns"])
                if column.get("name") in traces.CATEGORIES
            },
        )
        for table in tables
        for row in table["rows"]
    ]
