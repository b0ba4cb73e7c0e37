"""Gradient spikes, found offline from the recorded norms (protocol.md, "What is recorded").

An update is a spike if its gradient norm before clipping is above twice the median of the updates before it, as many
of them as there are, at most 50; the first 10 updates are never spikes, though they do count as updates before. A
skipped update has no norm: it is no spike, and the median passes over it.
"""

from collections.abc import Sequence

import polars as pl

from analysis.records import RecordError, Run

WINDOW = 50
FACTOR = 2.0
LEFT_OUT = 10


def spikes(updates: pl.DataFrame) -> pl.DataFrame:
    """The rows of an `updates` table that are spikes.

    Spike at ``u > 10``:  ``g_u > 2 median(g_{max(1, u - 50)}, ..., g_{u - 1})``,  ``g`` the norm before clipping.

    Raises:
      RecordError: if the updates are not 1, 2, 3, ... or a gradient norm is NaN.

    >>> norms = [1.0] * 12 + [2.0, 2.1]
    >>> table = pl.DataFrame({"update": range(1, 15), "grad_norm": norms})
    >>> spikes(table)["update"].to_list()
    [14]
    """
    if updates["update"].to_list() != list(range(1, updates.height + 1)):
        raise RecordError(f"updates must count 1, 2, 3, ...; got {updates['update'].to_list()[:5]} ...")
    missing = updates.filter(pl.col("grad_norm").is_nan())
    if missing.height:
        raise RecordError(f"update {missing['update'][0]} has a gradient norm that is no number")
    before = pl.col("grad_norm").rolling_median(WINDOW, min_samples=1).shift(1)
    return updates.filter((pl.col("update") > LEFT_OUT) & (pl.col("grad_norm") > FACTOR * before))


def shared_spikes(runs: Sequence[Run]) -> list[int]:
    """Updates that are spikes in every run: they see the same data in the same order, so it may be the data."""
    found = [set(spikes(run.updates)["update"].to_list()) for run in runs]
    return sorted(set.intersection(*found)) if found else []
