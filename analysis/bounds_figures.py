"""Lambda against its bounds: figure 5a, the factors over training, and the tables of a measured checkpoint.

A bound is shown as its ratio to the lower end of the norm that it bounds: it is at most that many times too large.
Tables are `records.BOUND_COLUMNS` and `probes.HEAD_COLUMNS`, by the name of the run that they were measured on.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from analysis.plotting import colour, line_styles, log_axis, new_figure, nothing_here, run_legend, styled
from analysis.probes import read_bounds, read_heads
from analysis.records import Run
from analysis.tables import Table

ATTENTION = {
    "covariance": "covariance (ours)",
    "refined": "refined (ours)",
    "local": "Theorem 4.1",
    "bounded": "Corollary 4.2",
    "newhouse": "Newhouse et al.",
}
LAYER = {
    "layer_composed": "measured parts (ours)",
    "layer_actual": "actual ‖γ‖/σ (ours)",
    "layer_theorem": "Theorem 4.3 or 4.4",
}
PATHWAYS = ("value", "query", "key")
SHADES = ("#009E73", "#56B4E9", "#D55E00", "#E69F00", "#CC79A7")


@styled
def against_bounds(tables: Mapping[str, pl.DataFrame]) -> Figure:
    """Figure 5a: by layer, Lambda and the bounds on it; below, the same of the whole layer. One column a run."""
    figure, axes = new_figure(2, len(tables), height=6.8, sharex="col", sharey="row")
    for (attention, layer), (name, table) in zip(axes.T, tables.items(), strict=True):
        bars(attention, table, "lambda", "Λ, proved", ATTENTION)
        bars(layer, table, "layer", "norm, proved", LAYER)
        attention.set_title(f"{name}: attention at update {table['update'][0]}")
        layer.set_title("the whole layer")
        layer.set_xlabel("layer")
        layer.xaxis.set_major_locator(MaxNLocator(integer=True))
    for first, last in axes[:, [0, -1]]:
        first.set_ylabel("(inf,rms) norm of the Jacobian")
        first.set_yscale("log")
        last.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def bars(panel: Axes, table: pl.DataFrame, norm: str, label: str, names: Mapping[str, str]) -> None:
    """The true norm between its ends, and each bound that applies."""
    layers = table["layer"].to_numpy()
    lower, upper = (table[f"{norm}_{end}"].cast(pl.Float64).to_numpy() for end in ("lower", "upper"))
    panel.fill_between(layers, lower, upper, color="black", alpha=0.3, linewidth=0)
    panel.plot(layers, lower, color="black", marker="o", markersize=4, linewidth=1.6, label=label)
    for (column, name), shade in zip(names.items(), SHADES, strict=False):
        if table[column].is_not_null().any():
            panel.plot(layers, table[column].to_numpy(), color=shade, marker=".", markersize=5, label=name)


@styled
def factors(runs: Sequence[Run]) -> Figure:
    """What the bound is made of, over training: the product of the four projections' norms, B_U, and Lambda itself."""
    figure, ((product, magnitude, true),) = new_figure(1, 3, height=3.6)
    for run, style in zip(runs, line_styles(runs), strict=True):
        drawn: dict[str, Any] = {"color": colour(run), "linestyle": style}
        for panel, table, column in (
            (product, run.layers, "norm_product"),
            (magnitude, run.layers, "magnitude"),
            (true, run.bounds, "lambda_lower"),
        ):
            known = table.drop_nulls(column)
            over = (
                known.group_by("update").agg(high=pl.col(column).max(), middle=pl.col(column).median()).sort("update")
            )
            panel.plot(over["update"], over["high"], **drawn)
            panel.plot(over["update"], over["middle"], **drawn | {"alpha": 0.4})
    for panel, title in (
        (product, r"(a) $\Vert W^Q\Vert\,\Vert W^K\Vert\,\Vert W^V\Vert\,\Vert W^O\Vert$"),
        (magnitude, "(b) Input of the attention, $B_U$"),
        (true, "(c) Λ, lower end, sampled layers"),
    ):
        panel.set_title(title)
        panel.set_xlabel("update")
        if any(line.get_xdata().size for line in panel.lines):
            log_axis(panel)
        else:
            nothing_here(panel, "not recorded")
    product.set_ylabel("largest and (pale) median over layers")
    run_legend(figure, runs)
    return figure


def checkpoint_tables(runs: Sequence[Run]) -> list[Table]:
    """All tables of the runs on whose checkpoints bounds were measured; a single run is not named in them."""
    names = {run.path: f"{run.label}, " if len(runs) > 1 else "" for run in runs}
    layers = {names[run.path]: table for run in runs if (table := read_bounds(run)) is not None}
    heads = {names[run.path]: table for run in runs if (table := read_heads(run)) is not None}
    return [attention_table(layers), layer_table(layers), heads_table(heads)]


def attention_table(tables: Mapping[str, pl.DataFrame], names: Mapping[str, str] = ATTENTION) -> Table:
    """Lambda of each layer's attention, and each bound's ratio to it; `names` of the bounds head the columns."""
    columns = ("attention", "Λ", "B_U", *names.values())
    rows = []
    for name, line in _lines(tables):
        ratios = (_ratio(line[bound], line["lambda_lower"]) for bound in names)
        rows.append((name, _between(line, "lambda"), _number(line["magnitude"]), *ratios))
    return Table("Λ(U) in (inf,rms), and how many times larger each bound on it is", columns, tuple(rows))


def layer_table(tables: Mapping[str, pl.DataFrame]) -> Table:
    """The norm of each whole layer, each bound's ratio to it, and its parts."""
    columns = ("layer", "norm", *LAYER.values(), "a, attention", "a, FFN", "FFN", "its constant")
    rows = []
    for name, line in _lines(tables):
        ratios = (_ratio(line[bound], line["layer_lower"]) for bound in LAYER)
        gains = (_number(line[norm]) for norm in ("a_attention", "a_ffn", "ffn_norm"))
        rows.append((name, _between(line, "layer"), *ratios, *gains, _ratio(line["ffn_bound"], line["ffn_norm"])))
    return Table("The whole layer in (inf,rms), and how many times larger each bound on it is", columns, tuple(rows))


def heads_table(tables: Mapping[str, pl.DataFrame]) -> Table:
    """Of each head: what it adds to its row's bound by values, query and keys; the spectral norm and its bounds."""
    columns = ("head", "θ~", "value", "query", "key", "share of the row's bound", "spectral norm", "Yudin", "Castin")
    rows = []
    for name, table in tables.items():
        for (layer,), heads in table.group_by("layer", maintain_order=True):
            sums = heads.select(pl.col(PATHWAYS).sum()).row(0, named=True)
            whole = sum(sums.values())
            of_all = {"head": "all", **dict.fromkeys(("theta", "spectral_lower", "spectral_upper", "yudin", "castin"))}
            for line in (*heads.iter_rows(named=True), {**of_all, **sums}):
                parts = [line[part] or 0.0 for part in PATHWAYS]
                share = f"{sum(parts) / whole:.0%}" if whole else ""
                theta = "" if line["theta"] is None else f"{line['theta']:.6f}"
                ratios = (_ratio(line[bound], line["spectral_lower"]) for bound in ("yudin", "castin"))
                named = f"{name}layer {layer}, head {line['head']}".replace("head all", "all heads")
                rows.append((named, theta, *map(_number, parts), share, _between(line, "spectral"), *ratios))
    return Table(
        "Pathways of each head in the row at which Λ is attained (bounds; their sum bounds Λ), and Frobenius geometry",
        columns,
        tuple(rows),
    )


def _lines(tables: Mapping[str, pl.DataFrame]) -> list[tuple[str, dict[str, Any]]]:
    return [
        (f"{name}layer {line['layer']}", line) for name, table in tables.items() for line in table.iter_rows(named=True)
    ]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _between(line: Mapping[str, Any], norm: str) -> str:
    """One number where both ends read the same, otherwise both."""
    lower, upper = (_number(line[f"{norm}_{end}"]) for end in ("lower", "upper"))
    return lower if lower == upper else f"{lower} to {upper or 'unknown'}"


def _ratio(bound: float | None, lower: float | None) -> str:
    return "" if bound is None or not lower else f"{bound / lower:.3g} ×"
