"""Table 1 (ours beside the paper's own figures) and the table of runs: one structure, two renderings."""

import dataclasses
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import rich.box
import rich.console
import rich.table
import rich.text

from analysis.records import RecordError, Run
from analysis.spikes import spikes
from analysis.trajectories import block_norms, centre, envelope

FINAL_WINDOW = 50
"""Updates that the final loss is the mean of."""

NOT_COMPARED = {"train.seed", "data.directory"}
"""Configuration fields in which two runs of one column may differ: ± is over seeds, and text may lie anywhere."""

NOT_RECORDED = "not recorded"

PAPER: Mapping[str, Mapping[str, str]] = {
    "mean loss, last 50 updates": {
        "pre": "4.509 ± 0.005 (4.503, 4.510, 4.513)",
        "post": "6.771 ± 1.551 (4.98; two near 7.67)",
    },
    "spike updates": {"pre": "9.0 ± 1.0", "post": "35.3 ± 11.7"},
    "largest pre-clip norm": {"pre": "35", "post": "112"},
    "median certificate / τ, last": {"pre": "0.99870", "post": "0.99999"},
    "normalised entropy, first → last": {"pre": "0.987 → 0.726", "post": "near uniform in the two plateaued runs"},
    "mean row maximum, first → last": {"pre": "0.010 → 0.174", "post": "plateaued: 0.0041 last (uniform: 0.0041)"},
    "certificate, 5th to 95th percentile, last": {"pre": "0.26 to 1.00", "post": "not reported"},
    "block gradient norms, last": {
        "pre": "first 0.15; then 0.02 to 0.06 (one seed)",
        "post": "plateaued: at most 7e-6 on layers 0 to 33, last 0.04",
    },
}
"""The paper's figures: 774 M parameters, 36 layers, 2000 updates, 131 M tokens of FineWeb, seeds 42, 123, 456."""


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of text: every row has one cell a column, the first of them its name."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"{len(self.columns)} columns want as many cells, got the row {row}")


def to_markdown(table: Table) -> str:
    r"""A GitHub-flavoured Markdown table under its title in bold.

    >>> print(to_markdown(Table("T", ("a", "b"), (("x|y", "1"),))))
    **T**
    <BLANKLINE>
    | a | b |
    | --- | --- |
    | x\|y | 1 |
    """

    def line(cells: Iterable[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    lines = [line(table.columns), line("---" for _ in table.columns), *map(line, table.rows)]
    return f"**{table.title}**\n\n" + "\n".join(lines)


def to_rich(table: Table) -> rich.table.Table:
    """The same table for the terminal."""
    drawn = rich.table.Table(title=table.title, box=rich.box.SIMPLE_HEAD, show_lines=False, title_justify="left")
    for i, column in enumerate(table.columns):
        drawn.add_column(rich.text.Text(column), style="bold" if i == 0 else "", overflow="fold")  # no digit is cut
    for row in table.rows:
        drawn.add_row(*map(rich.text.Text, row))  # Text: a cell is never read as markup
    return drawn


def show(tables: Iterable[Table]) -> None:
    """Print tables as wide as the terminal; a pipe has no width at which to wrap, unless COLUMNS gives one."""
    console = rich.console.Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = rich.console.Console(width=10_000)
    for table in tables:
        console.print(to_rich(table))


@dataclasses.dataclass(frozen=True)
class Summary:
    """The figures of one run that the tables show; None where nothing was recorded."""

    run: Run
    updates: int
    final_loss: float
    spikes: int
    largest_norm: float
    certificate: float | None  # median prefix certificate over tau, mean over sampled layers, last record
    entropy: tuple[float, float] | None  # normalised, mean over rows and sampled layers: first and last record
    p_max: tuple[float, float] | None
    envelope: tuple[float, float] | None  # of the prefix certificate at the last record
    block_norms: list[float]

    @property
    def planned(self) -> int:
        """Updates the run was configured for."""
        return self.run.config["train"]["updates"]


def summarise(run: Run) -> Summary:
    """One run's figures (`RecordError` if it has no update yet)."""
    updates = run.updates.drop_nulls("loss")  # without those that were skipped
    if updates.is_empty():
        raise RecordError(f"{run.path}: no update is recorded yet")
    certificate = centre(run, "prefix", "median")["value"]
    edges = envelope([run], "prefix", "prefix")
    return Summary(
        run=run,
        updates=run.updates.height,
        final_loss=statistics.fmean(updates["loss"].tail(FINAL_WINDOW)),
        spikes=spikes(run.updates).height,
        largest_norm=max(run.updates["grad_norm"].drop_nulls()),
        certificate=None if certificate.is_empty() else certificate[-1] / run.config["model"]["tau"],
        entropy=_first_last(run, "entropy"),
        p_max=_first_last(run, "p_max"),
        envelope=None if edges.is_empty() else (edges["low"][-1], edges["high"][-1]),
        block_norms=block_norms(run),
    )


def _first_last(run: Run, quantity: str) -> tuple[float, float] | None:
    values = centre(run, quantity, "mean")["value"]
    return None if values.is_empty() else (values[0], values[-1])


def table_1(runs: Sequence[Run]) -> Table:
    """The paper's Table 1 with what it tells in its text, a column a placement, the paper's own figures beside ours.

    ``mean ± sample standard deviation (n - 1)`` over seeds, then the seeds' own values; a single run has no ±.

    Raises:
      RecordError: if runs of one placement differ in more than the seed, repeat a seed, or have no update.
    """
    groups = {placement: [summarise(run) for run in group] for placement, group in by_placement(runs).items()}
    columns: list[str] = [""]
    cells: list[Mapping[str, str]] = []
    for placement, group in groups.items():
        columns += [f"{placement}-LN, ours", f"{placement}-LN, paper"]
        cells += [_cells(group), {name: figure.get(placement, "not reported") for name, figure in PAPER.items()}]
    rows = tuple((name, *(column[name] for column in cells)) for name in PAPER)
    return Table(f"Table 1: {len(runs)} runs, {_seeds(groups)}", tuple(columns), rows)


def by_placement(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs grouped by norm placement, in order; within a group only the seed may differ, as `±` is over seeds alone."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        group = groups.setdefault(run.placement, [])
        for other in group:
            if other.seed == run.seed:
                raise RecordError(f"{other.path} and {run.path}: both are {run.label}: want one of each")
            if differing := differences(other.config, run.config) - NOT_COMPARED:
                raise RecordError(f"{other.path} and {run.path}: more than the seed differs: {min(differing)}")
        group.append(run)
    return groups


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested configuration as dotted names.

    >>> flatten({"train": {"seed": 1}, "x": 2})
    {'train.seed': 1, 'x': 2}
    """
    flat = {}
    for name, value in config.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return flat


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> set[str]:
    """Dotted names of the configuration fields in which two runs differ."""
    a, b = flatten(first), flatten(second)
    return {name for name in a.keys() | b.keys() if (name in a, a.get(name)) != (name in b, b.get(name))}


def run_table(runs: Sequence[Run]) -> Table:
    """One line a run: how far it came, and its own figures."""
    measured = ("loss", "spikes", "largest norm", "certificate / τ", "entropy", "row maximum", "5th to 95th percentile")
    rows = []
    for run in runs:
        one = summarise(run)
        rows.append(
            (
                run.label,
                f"{one.updates} of {one.planned}",
                f"{run.timing['seconds'].sum() / 60:.1f} min",
                f"{one.final_loss:.3f}",
                str(one.spikes),
                f"{one.largest_norm:.3g}",
                _maybe(one.certificate, "{:.5f}"),
                _arrow([one.entropy]),
                _arrow([one.p_max]),
                _range([one.envelope]),
            )
        )
    return Table("Runs", ("run", "updates", "time", *measured), tuple(rows))


def spread(values: Sequence[float], form: str, each: str | None = None) -> str:
    """Mean and sample standard deviation, and the values themselves.

    >>> spread([4.503, 4.510, 4.514], "{:.3f}")
    '4.509 ± 0.006 (4.503, 4.510, 4.514)'
    >>> spread([2.0], "{:.1f}")
    '2.0 (n = 1)'
    """
    mean = form.format(statistics.fmean(values))
    if len(values) == 1:
        return f"{mean} (n = 1)"
    return f"{mean} ± {form.format(statistics.stdev(values))} ({', '.join(map((each or form).format, values))})"


def _cells(group: Sequence[Summary]) -> dict[str, str]:
    """The column of one placement, by the names in `PAPER`."""
    certificates = [one.certificate for one in group if one.certificate is not None]
    return dict(
        zip(
            PAPER,
            (
                spread([one.final_loss for one in group], "{:.3f}"),
                spread([one.spikes for one in group], "{:.1f}", each="{}"),
                f"{max(one.largest_norm for one in group):.3g}",
                _maybe(statistics.fmean(certificates) if certificates else None, "{:.5f}"),
                _arrow([one.entropy for one in group]),
                _arrow([one.p_max for one in group]),
                _range([one.envelope for one in group]),
                _profile([one.block_norms for one in group if one.block_norms]),
            ),
            strict=True,
        )
    )


def _maybe(value: float | None, form: str) -> str:
    return NOT_RECORDED if value is None else form.format(value)


def _arrow(pairs: Sequence[tuple[float, float] | None]) -> str:
    """First → last, each the mean over runs."""
    known = [pair for pair in pairs if pair is not None]
    if not known:
        return NOT_RECORDED
    return " → ".join(f"{statistics.fmean(side):.3f}" for side in zip(*known, strict=True))


def _range(pairs: Sequence[tuple[float, float] | None]) -> str:
    known = [pair for pair in pairs if pair is not None]
    if not known:
        return NOT_RECORDED
    return f"{min(low for low, _ in known):.2f} to {max(high for _, high in known):.2f}"


def _profile(profiles: Sequence[Sequence[float]]) -> str:
    """First block; blocks between; last block: each the range over runs (and blocks)."""
    if not profiles:
        return NOT_RECORDED
    depth = len(profiles[0])
    parts = {"first": (0, 1), "between": (1, depth - 1), "last": (depth - 1, depth)}
    texts = []
    for name, (start, stop) in parts.items():
        values = [value for profile in profiles for value in profile[start:stop]]
        if values and not (name == "last" and depth == 1):
            low, high = f"{min(values):.2g}", f"{max(values):.2g}"
            texts.append(f"{name} {low}" if low == high else f"{name} {low} to {high}")
    return "; ".join(texts)


def _seeds(groups: Mapping[str, Sequence[Summary]]) -> str:
    seeds = sorted({one.run.seed for group in groups.values() for one in group})
    updates = sorted({one.updates for group in groups.values() for one in group})
    return f"seeds {', '.join(map(str, seeds))}; {' or '.join(map(str, updates))} updates"
