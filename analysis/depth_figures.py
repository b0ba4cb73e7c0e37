"""Figure 5b and its kin: the terms of a product of Jacobians over depth, over both depths, and over training; in words.

Names of terms are those of `sens.products`: `bare` (pre-LN the identity, post-LN the LayerNorm-only term), `first`
(through one branch) and `rest`.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.plotting import (
    REFERENCE,
    colour,
    line_styles,
    log_axis,
    name_axes,
    new_figure,
    nothing_here,
    run_legend,
    styled,
)
from analysis.records import TERMS, Run
from analysis.tables import Table

TERM_COLOURS = {"total": "#000000", "bare": "#009E73", "first": "#E69F00", "rest": "#CC79A7"}
TERM_NAMES = {
    "pre": {"total": "all", "bare": "identity", "first": "one branch", "rest": "two or more"},
    "post": {"total": "all", "bare": "LayerNorms only", "first": "one branch", "rest": "two or more"},
}
START = 2
"""Depth from which single numbers are quoted: above block 0, which takes the embedding's own magnitude."""


@styled
def profiles(runs: Sequence[Run], depths: Sequence[pl.DataFrame]) -> Figure:
    """Figure 5b: products from every depth to the output at a checkpoint, one curve a term, pre-LN beside post-LN.

    Above, the root mean square gain of a random cotangent; below, the gradient of the loss: its norm at every depth,
    and the share of it that the bare term carries.
    """
    figure, ((pre, post), (gradient, share)) = new_figure(2, 2, height=6.8)
    for panel, letter, placement in ((pre, "a", "pre"), (post, "b", "post")):
        found = [(run, depth) for run, depth in zip(runs, depths, strict=True) if run.placement == placement]
        name_axes(
            panel, f"({letter}) {placement}-LN: gain from here to the output", "sublayer", "root mean square gain"
        )
        if found:
            _gains(panel, placement, found)
        else:
            nothing_here(panel, f"no {placement}-LN run probed")
    for run, depth, style in zip(runs, depths, line_styles(runs), strict=True):
        drawn = {"color": colour(run), "linestyle": style}
        gradient.plot(depth["sublayer"], depth["gradient"], **drawn)
        share.plot(depth["sublayer"], depth["gradient_share_bare"], **drawn)
    name_axes(gradient, "(c) Gradient of the loss by depth", "sublayer", r"$\Vert\partial\,loss/\partial X_l\Vert$")
    name_axes(share, "(d) Share of the bare term in that gradient", "sublayer", "signed share of squared norm")
    _share_axis(share)
    log_axis(gradient)
    run_legend(figure, runs)
    return figure


def _gains(panel: Axes, placement: str, found: Sequence[tuple[Run, pl.DataFrame]]) -> None:
    styles = line_styles([run for run, _ in found])
    for number, ((_, depth), style) in enumerate(zip(found, styles, strict=True)):
        for term, shade in TERM_COLOURS.items():
            gain = depth["gain" if term == "total" else term]
            # One sublayer has no path through two branches: what is there is rounding.
            drawn = depth["sublayer"] < (len(depth) - 1 if term == "rest" else len(depth))
            name = None if number else TERM_NAMES[placement][term]
            panel.plot(depth["sublayer"].filter(drawn), gain.filter(drawn), color=shade, linestyle=style, label=name)
        if placement == "post":
            name = None if number else "Corollary A.3: bound of its norm"
            panel.plot(depth["sublayer"], depth["bound"], label=name, **REFERENCE)
    log_axis(panel)
    panel.legend(loc="best")


@styled
def depth_map(pairs: Mapping[str, pl.DataFrame]) -> Figure:
    """Heat map over (start, stop): log10 of the root mean square gain of the product, and of its bare term alone.

    Args:
      pairs: tables of `probes.PAIR_COLUMNS`, a column of panels each, by the name to show over it.
    """
    figure, axes = new_figure(2, len(pairs), height=6.8, sharex="col", sharey="col")
    for column, (name, table) in zip(axes.T, pairs.items(), strict=True):
        logs = table.select(pl.col("gain", "bare").clip(lower_bound=1e-300).log10())  # a gain of zero is drawn as that
        reach = max(float(np.abs(logs.to_numpy()).max()), 0.1)
        stops = sorted(set(table["stop"]))
        row = np.searchsorted(stops, table["stop"].to_numpy())
        edges = np.arange(max(stops) + 1) - 0.5, np.array([0, *stops])
        colours = {"cmap": "RdBu_r", "vmin": -reach, "vmax": reach}
        for panel, term, what in zip(column, ("gain", "bare"), ("whole product", "bare term alone"), strict=True):
            grid = np.full((len(stops), max(stops)), np.nan)
            grid[row, table["start"].to_numpy()] = logs[term].to_numpy()
            mesh = panel.pcolormesh(*edges, grid, rasterized=True, **colours)
            figure.colorbar(mesh, ax=panel)
            name_axes(panel, f"{name}: {what}", "from sublayer", "to sublayer (top edge)")
            panel.grid(visible=False)
    return figure


@styled
def over_training(runs: Sequence[Run]) -> Figure:
    """The product from above block 0 to the output, over training: its gain, and the bare term's share of it."""
    figure, ((gain, share),) = new_figure(1, 2, height=3.8)
    for run, style in zip(runs, line_styles(runs), strict=True):
        table = run.depth.filter(pl.col("sublayer") == START)
        drawn = {"color": colour(run), "linestyle": style, "marker": "o", "markersize": 3}
        gain.plot(table["update"], table["gain"], **drawn)
        share.plot(table["update"], table["share_bare"], **drawn)
    name_axes(gain, "(a) Gain from above block 0 to the output", "update", "root mean square gain")
    name_axes(share, "(b) Share of the bare term in it", "update", "signed share of squared norm")
    log_axis(gain)
    _share_axis(share)
    run_legend(figure, runs)
    return figure


def products_table(depths: Mapping[str, pl.DataFrame], when: str = "") -> Table:
    """What the product from above block 0 to the output does, by the name of a run or a model."""
    columns = (
        "",
        "root mean square gain",
        "tr(P)/n",
        *(f"share of {name}" for name in ("bare term", "one branch", "two or more")),
        "the gradient's share of bare term",
        "gradient norm there / at the top",
    )
    lines = []
    for name, table in depths.items():
        here, top = table.row(min(START, len(table) - 1), named=True), table.row(-1, named=True)
        shares = (here[f"share_{term}"] for term in TERMS)
        ratio = here["gradient"] / top["gradient"] if top["gradient"] else None
        lines.append(
            (
                name,
                f"{here['gain']:.3g}",
                f"{here['alignment']:.3g} ± {here['alignment_se']:.1g}",
                *map(_number, shares),
                _number(here["gradient_share_bare"]),
                _number(ratio),
            )
        )
    return Table(f"Products of Jacobians from above block 0 to the output{when}", columns, tuple(lines))


def verdict(table: pl.DataFrame) -> str:
    """Corollary A.3 in words, on a post-LN run's depth table: where ``max_i a <= 1 - eta`` holds, with which eta."""
    a = table["a_max"].to_numpy()
    holds = np.flatnonzero(a < 1)
    greatest = int(np.argmax(a))
    if holds.size == a.size:
        eta = 1 - a.max()
        return (
            f"The condition max a <= 1 - eta holds at all {a.size} sublayers with eta = {eta:.2g}: the LayerNorm-only "
            f"term contracts at least like {1 - eta:.3g} to the power of the sublayers it crosses."
        )
    where = f"at {holds.size} of {a.size} sublayers"
    if holds.size:
        etas = np.sort(1 - a[holds])
        where += f" ({_ranges(holds)}), with eta from {etas[0]:.2g} to {etas[-1]:.2g}"
    contracting = np.flatnonzero(table["bound"].to_numpy() < 1)
    above = int(np.flatnonzero(a >= 1)[-1]) + 1  # from here to the output it holds throughout
    words = f"The condition max a <= 1 - eta holds {where}; a is greatest, {a[greatest]:.3g}, at sublayer {greatest}."
    if above < a.size:
        words += f" From sublayer {above} to the output it holds throughout, with eta = {1 - a[above:].max():.2g}."
    else:
        words += (
            " It fails at the last sublayer, so the corollary promises no contraction of any product to the output."
        )
    if contracting.size:
        least = int(np.argmin(table["bound"].to_numpy()))
        words += (
            f" The product of a, followed token by token to the output, is below one from {_ranges(contracting)}: "
            f"least, {table['bound'][least]:.2g}, from sublayer {least}."
        )
    return words


def _share_axis(panel: Axes) -> None:
    """Linear for shares of ordinary size, else logarithmic beyond one; a line where the term is all there is."""
    low, high = panel.get_ylim()
    if max(-low, high) > 3:
        panel.set_yscale("symlog", linthresh=1.0)
    panel.axhline(1.0, **REFERENCE)


def _ranges(numbers: np.ndarray) -> str:
    """``0, 3-5, 9``."""
    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1)
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3g}"
