"""Attention statistics over training, reduced from layers and runs as the paper reduces them.

All of these read the rows pooled over heads. A *centre* is the mean over sampled layers of a per-layer statistic; an
*envelope* runs from the least per-layer 5th percentile to the greatest per-layer 95th, over sampled layers and runs.
"""

from collections.abc import Sequence

import polars as pl

from analysis.records import Run


def pooled(run: Run, quantity: str) -> pl.DataFrame:
    """One row an (update, sampled layer): the statistics of `quantity` over all heads' rows."""
    return run.attention.filter(pl.col("head").is_null() & (pl.col("quantity") == quantity)).sort("update", "layer")


def centre(run: Run, quantity: str, statistic: str) -> pl.DataFrame:
    """Columns `update`, `value`: mean over sampled layers of `statistic` of `quantity`."""
    table = pooled(run, quantity)
    return table.group_by("update", maintain_order=True).agg(pl.col(statistic).mean().alias("value"))


def envelope(
    runs: Sequence[Run], low: str, high: str, *, low_statistic: str = "p5", high_statistic: str = "p95"
) -> pl.DataFrame:
    """Columns `update`, `low`, `high`: over sampled layers and runs, least of quantity `low`, greatest of `high`."""

    def extreme(quantity: str, value: pl.Expr, name: str) -> pl.DataFrame:
        rows = pl.concat([pooled(run, quantity) for run in runs])
        return rows.group_by("update").agg(value.alias(name))

    least = extreme(low, pl.col(low_statistic).min(), "low")
    greatest = extreme(high, pl.col(high_statistic).max(), "high")
    return least.join(greatest, on="update").sort("update")


def block_norms(run: Run) -> list[float]:
    """Gradient norm of each block before clipping, layer 0 first, at the last recorded update (empty if none yet)."""
    last = run.layers.drop_nulls("grad_norm")  # without skipped updates
    last = last.filter(pl.col("update") == pl.col("update").max())
    return last.sort("layer")["grad_norm"].to_list()
