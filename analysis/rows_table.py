"""Summaries of a file's rows for the terminal: one line an array and index of its leading axes but the last."""

from collections.abc import Sequence

import polars as pl

from analysis.tables import Table

_CELLS = (
    ("median", "lower", "median", ".4f"),
    ("p5", "lower", "p5", ".4f"),
    ("min", "lower", "min", ".4f"),
    ("prefix p5", "prefix", "p5", ".4f"),
    ("width", "width", "max", ".0e"),
    ("p_max", "p_max", "median", ".4f"),
    ("D", "discrepancy", "median", ".0e"),
)


def theta_table(summaries: Sequence[pl.DataFrame]) -> Table:
    """What `analysis.rows.summary` gives of each array, a line for each index; theta by its proved lower end."""
    rows = []
    for summary in summaries:
        for (array, index), part in summary.group_by(["array", "index"], maintain_order=True):
            value = {(row["quantity"], statistic): row[statistic] for row in part.to_dicts() for statistic in row}
            cells = (format(value[quantity, statistic], form) for _, quantity, statistic, form in _CELLS)
            place = "" if index == "[]" else index  # one axis of rows, or a lone row: there is nothing to tell apart
            rows.append((f"{array}{place}", str(value["lower", "count"]), *cells))
    return Table(
        "theta (lower ends; width: widest bracket; p_max and D: medians)",
        ("array", "rows", *(name for name, *_ in _CELLS)),
        tuple(rows),
    )
