"""What the figures share: style, colours, the axis of D = sqrt(1 - theta), and saving the same bytes every time."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedFormatter, FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from analysis.records import Run

# Okabe and Ito's palette, told apart under every common colour blindness.
PLACEMENT_COLOURS = {"pre": "#0072B2", "post": "#D55E00"}
PREFIX_COLOUR, BRACKET_COLOUR = "#CC79A7", "#009E73"
LENGTH_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000")
REFERENCE = {"color": "#444444", "linewidth": 1.0, "linestyle": (0, (4, 2))}  # what a formula says, in every figure
SEED_STYLES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), "-.")

WIDTH = 9.0
"""Inches: with text at 9 points, readable at the width of a page."""

STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.formatter.useoffset": False,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.2,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "savefig.dpi": 160,
    "svg.hashsalt": "sens",  # element names in an SVG are otherwise drawn at random
}

styled = matplotlib.rc_context(STYLE)
"""Decorator: the function draws in the common style and leaves matplotlib's settings as they were."""


@styled
def save(figure: Figure, stem: Path) -> tuple[Path, Path]:
    """Write `stem`.png and `stem`.svg; the same figure gives the same bytes. Returns both paths."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    png, svg = stem.with_name(stem.name + ".png"), stem.with_name(stem.name + ".svg")
    figure.savefig(png, metadata={"Software": None})
    figure.savefig(svg, metadata={"Date": None, "Creator": None})
    return png, svg


def new_figure(rows: int, columns: int, *, height: float, **options: Any) -> tuple[Figure, np.ndarray]:
    """A page-wide figure and its (rows, columns) array of axes."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def colour(run: Run) -> str:
    return PLACEMENT_COLOURS[run.placement]


def line_styles(runs: Sequence[Run]) -> list[Any]:
    """A dash pattern for each run: the same for the same seed."""
    seeds = sorted({run.seed for run in runs})
    return [SEED_STYLES[seeds.index(run.seed) % len(SEED_STYLES)] for run in runs]


def run_legend(figure: Figure, runs: Sequence[Run]) -> None:
    """One legend over a figure: colours are placements (rows), dashes are seeds (columns)."""
    by_seed = sorted(zip(runs, line_styles(runs), strict=True), key=lambda pair: pair[0].seed)  # legends fill by column
    handles = [Line2D([], [], color=colour(run), linestyle=style, label=run.label) for run, style in by_seed]
    columns = len({run.seed for run in runs})
    figure.legend(handles=handles, loc="outside upper center", ncols=max(1, columns), handlelength=3)


def placements(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The runs of each placement, in order."""
    return {
        name: [run for run in runs if run.placement == name] for name in dict.fromkeys(run.placement for run in runs)
    }


def band(axes: Axes, table: pl.DataFrame, colour: str) -> None:
    """Fill between the columns `low` and `high` over `update`, with a thin edge: overlapping bands stay apart."""
    axes.fill_between(
        table["update"].to_numpy(), table["low"].to_numpy(), table["high"].to_numpy(),
        facecolor=(colour, 0.15), edgecolor=(colour, 0.7), linewidth=0.6,
    )  # fmt: skip


D_FLOOR = 1e-4
"""Least D that is drawn. Theta's float32 rounding is an error of about 2e-4 in D where theta is one."""


def to_d(theta: Iterable[float] | np.ndarray | pl.Series) -> np.ndarray:
    """D = sqrt(1 - theta), the number-partitioning discrepancy, no less than `D_FLOOR`."""
    return np.maximum(np.sqrt(np.maximum(1.0 - np.asarray(theta, dtype=np.float64), 0.0)), D_FLOOR)


def d_axis(axes: Axes) -> None:
    """A log axis of D that points down, so that theta still grows upwards; ticks say theta."""
    axes.set_yscale("log")
    axes.set_ylim(1.15, D_FLOOR * 0.7)
    labels = {1.0: "0", 0.5: ".75", 0.1: ".99", 1e-2: "1 - 10⁻⁴", 1e-3: "1 - 10⁻⁶", D_FLOOR: "1 - 10⁻⁸"}
    axes.yaxis.set_major_locator(FixedLocator(list(labels)))
    axes.yaxis.set_major_formatter(FixedFormatter(list(labels.values())))
    axes.yaxis.set_minor_locator(NullLocator())


D_LABEL = "θ, on a log axis of √(1 - θ)"


def log_axis(axes: Axes) -> None:
    """A log y axis, called after plotting; ticks at 1, 2, 5 in plain digits where it spans few decades."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    if high < 1e3 * low:
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_locator(NullLocator())


def name_axes(axes: Axes, title: str, x: str, y: str) -> None:
    """Title and axis names; an axis that counts gets whole-number ticks."""
    axes.set_title(title)
    axes.set_xlabel(x)
    if x in ("update", "block", "layer", "sublayer"):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel(y)


def nothing_here(axes: Axes, text: str) -> None:
    """Say in the middle of a panel why it is empty."""
    axes.grid(visible=False)
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color="#666666")
