"""The figures of protocol.md, each a function of runs that returns a matplotlib `Figure`; `plotting.save` writes them.

No figure claims what a linear axis of theta cannot show: where theta is near one the axis is of D = sqrt(1 - theta),
logarithmic (theory.md, 2.1: theta of at least 8/9 says no more than a largest entry of at most 2/3).
"""

from collections.abc import Sequence

import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.plotting import (
    BRACKET_COLOUR,
    D_FLOOR,
    D_LABEL,
    LENGTH_COLOURS,
    PLACEMENT_COLOURS,
    PREFIX_COLOUR,
    REFERENCE,
    band,
    colour,
    d_axis,
    line_styles,
    log_axis,
    name_axes,
    new_figure,
    nothing_here,
    placements,
    run_legend,
    styled,
    to_d,
)
from analysis.probes import CLOSED, Verification
from analysis.records import Run
from analysis.spikes import spikes
from analysis.trajectories import block_norms, centre, envelope

DRAWN_ROWS = 6000
"""Most attention rows that figure 4 draws of one placement: a fixed random choice (rows lie in order of position)."""


@styled
def trajectories(runs: Sequence[Run], *, unigram_entropy: float | None = None) -> Figure:
    """Figure 1: (a) loss, (b) gradient norm and spikes, (c) certificate and envelope, (d) gradient norm by block.

    `unigram_entropy` (nats a token): what a model that ignores its context can reach, drawn in (a).
    """
    figure, ((loss, norm), (certificate, profile)) = new_figure(2, 2, height=6.4)
    for run, style in zip(runs, line_styles(runs), strict=True):
        drawn = {"color": colour(run), "linestyle": style}
        update = run.updates["update"]
        loss.plot(update, run.updates["loss"], **drawn)
        norm.plot(update, run.updates["grad_norm"], **drawn | {"linewidth": 0.7, "alpha": 0.6})
        marked = spikes(run.updates)
        norm.plot(marked["update"], marked["grad_norm"], "o", color=colour(run), markersize=3.5, markerfacecolor="none")
        median = centre(run, "prefix", "median")
        certificate.plot(median["update"], median["value"], **drawn)
        blocks = block_norms(run)
        profile.plot(range(len(blocks)), blocks, **drawn, marker=".", markersize=4)
    for placement, group in placements(runs).items():
        band(certificate, envelope(group, "prefix", "prefix"), PLACEMENT_COLOURS[placement])
    if unigram_entropy is not None:
        loss.axhline(unigram_entropy, **REFERENCE, label=f"unigram entropy, {unigram_entropy:.2f}")
        loss.legend(loc="upper right")
    name_axes(loss, "(a) Loss", "update", "nats per token")
    name_axes(norm, "(b) Gradient norm before clipping, spikes ringed", "update", "global norm")
    name_axes(certificate, "(c) Prefix certificate: medians, 5th to 95th percentile", "update", "certificate of θ")
    name_axes(profile, "(d) Gradient norm of each block, last record", "block", "norm")
    log_axis(norm)
    log_axis(profile)
    certificate.set_ylim(-0.03, 1.03)
    run_legend(figure, runs)
    return figure


@styled
def identity_check(verification: Verification) -> Figure:
    """Figure 2: both sides of ||J||_{inf->1} = theta / tau against each other, and how far apart, per length."""
    figure, ((sides, errors),) = new_figure(1, 2, height=3.6)
    floor = 1e-17  # below one unit in the last place of numbers near one: stands for "equal"
    everything = [x for check in verification.checks for x in (*check.norm, *check.theta_over_tau)]
    ends = [min(everything), max(everything)] if everything else [0.0, 1.0]
    sides.plot(ends, ends, **REFERENCE, label="equal")
    for i, check in enumerate(verification.checks):
        shade = LENGTH_COLOURS[i % len(LENGTH_COLOURS)]
        name = f"L = {check.length}, {len(check.norm)} rows"
        dots = {"marker": "os^Dv"[i % 5], "markersize": 4, "markeredgewidth": 0, "linestyle": "", "alpha": 0.5}
        sides.plot(check.theta_over_tau, check.norm, color=shade, label=name, **dots)
        ordered = np.maximum(np.sort(check.relative_error), floor)
        share = np.arange(1, len(ordered) + 1) / len(ordered)
        errors.step(ordered, share, where="post", color=shade, label=f"L = {check.length}, worst {check.worst:.1e}")
    errors.axvline(verification.tolerance, **REFERENCE, label=f"tolerance {verification.tolerance:.0e}")
    errors.set_xscale("log")
    errors.set_xlim(floor * 0.7, 3 * max([verification.tolerance, *(check.worst for check in verification.checks)]))
    name_axes(sides, "(a) Both sides, float64", "θ / τ by all subsets", "‖J‖ by all sign vectors")
    name_axes(errors, "(b) Relative error (equal: at the left edge)", "relative error", "share of rows at or below")
    sides.legend(loc="upper left")
    errors.legend(loc="lower center" if verification.passed else "best")
    return figure


@styled
def sharpening(runs: Sequence[Run]) -> Figure:
    """Figure 3: sharpening against bisectability: entropy, largest entry, certificate and bracket over training."""
    groups = placements(runs)
    figure, axes = new_figure(2, 2, height=6.4)
    for panel, quantity in ((axes[0, 0], "entropy"), (axes[0, 1], "p_max")):
        for run, style in zip(runs, line_styles(runs), strict=True):
            mean = centre(run, quantity, "mean")
            panel.plot(mean["update"], mean["value"], color=colour(run), linestyle=style)
        for placement, group in groups.items():
            layers = envelope(group, quantity, quantity, low_statistic="mean", high_statistic="mean")
            band(panel, layers, PLACEMENT_COLOURS[placement])
    name_axes(axes[0, 0], "(a) Normalised entropy, mean; band: all layers", "update", "H / log support")
    name_axes(axes[0, 1], "(b) Largest entry of a row, mean; band: all layers", "update", "mean row maximum")
    for panel, letter, placement in zip(axes[1], "cd", ("pre", "post"), strict=True):
        name_axes(panel, f"({letter}) {placement}-LN: θ, median and 5th to 95th percentile", "update", D_LABEL)
        d_axis(panel)
        if placement in groups:
            _sensitivity(panel, groups[placement])
        else:
            nothing_here(panel, f"no {placement}-LN run")
    run_legend(figure, runs)
    return figure


def _sensitivity(panel: Axes, group: Sequence[Run]) -> None:
    """Medians and envelopes of the prefix certificate and of the bracket, on an axis of D."""
    for low, high, shade, name in (
        ("prefix", "prefix", PREFIX_COLOUR, "prefix certificate (lower bound)"),
        ("lower", "upper", BRACKET_COLOUR, "bracket, both ends"),
    ):
        edges = envelope(group, low, high).with_columns(
            low=pl.col("low").map_batches(to_d), high=pl.col("high").map_batches(to_d)
        )
        band(panel, edges, shade)
        for side in dict.fromkeys((low, high)):
            for run, style in zip(group, line_styles(group), strict=True):
                median = centre(run, side, "median")
                first = run is group[0] and side == low
                panel.plot(
                    median["update"], to_d(median["value"]),
                    color=shade, linestyle=style, label=name if first else None,
                )  # fmt: skip
    panel.legend(loc="lower right")


@styled
def theta_against_p_max(rows: dict[str, pl.DataFrame]) -> Figure:
    """Figure 4: theta of attention rows against their largest entry; what the prefix certificate misses.

    Args:
      rows: tables of `probes.ROW_COLUMNS`, a column of panels each, by the name to show over it.

    Above, theta; below, the same rows on the log axis of D, where the limits are ``D = 2p - 1`` (p >= 1/2, where every
    row lies) and ``D = p`` (the most that D can be).
    """
    figure, axes = new_figure(2, len(rows), height=6.8, sharex=True)
    p = np.geomspace(1e-3, 1.0, 400)
    dominant = (1 + np.geomspace(D_FLOOR, 1.0, 400)) / 2
    for (theta, d), (name, table) in zip(axes.T, rows.items(), strict=True):
        chosen = np.random.default_rng(0).permutation(table.height)[:DRAWN_ROWS]
        drawn = table[np.sort(chosen)]
        for panel, scale in ((theta, np.asarray), (d, to_d)):
            panel.plot(p, scale(1 - p**2), **REFERENCE, label="$1 - p^2$: lower limit")
            panel.plot(
                dominant, scale(4 * dominant * (1 - dominant)), color="black", lw=1, label="$4p(1 - p)$, $p ≥ 1/2$"
            )
            for column, shade, label, order in (
                ("prefix", PREFIX_COLOUR, "prefix certificate", 1),
                ("lower", BRACKET_COLOUR, "bracket, lower end", 2),
            ):
                panel.plot(
                    drawn["p_max"], scale(drawn[column].to_numpy()), "o", color=shade, alpha=0.45, markersize=2.5,
                    markeredgewidth=0, zorder=order, rasterized=True, label=label,
                )  # fmt: skip
            open_rows = drawn.filter(pl.col("upper") - pl.col("lower") > CLOSED)
            panel.vlines(
                open_rows["p_max"], scale(open_rows["lower"].to_numpy()), scale(open_rows["upper"].to_numpy()),
                color=BRACKET_COLOUR, alpha=0.45, lw=0.8, zorder=2, rasterized=True,
            )  # fmt: skip
        name_axes(theta, f"{name}: {drawn.height} of {table.height} rows", "", "θ")
        theta.set_ylim(-0.03, 1.03)
        name_axes(d, "the same rows", "largest entry of the row", D_LABEL)
        d_axis(d)
        d.set_xlim(-0.02, 1.02)
    legend = axes[0, 0].legend(loc="lower left", markerscale=2.5)
    for handle in legend.legend_handles:
        handle.set_alpha(1.0)
    return figure


@styled
def through_depth(runs: Sequence[Run], depths: Sequence[pl.DataFrame]) -> Figure:
    """A first look through depth at the last checkpoints: the identity's share, and post-LN's a_{k,i}.

    Corollary A.3: the LayerNorm-only term contracts geometrically if `a` stays below one in every sublayer.
    """
    figure, ((share, contraction),) = new_figure(1, 2, height=3.8)
    for run, depth, style in zip(runs, depths, line_styles(runs), strict=True):
        drawn = {"color": colour(run), "linestyle": style, "linewidth": 0.9}
        share.plot(depth["sublayer"], depth["identity_share"], **drawn)
        if run.placement == "post":
            contraction.plot(depth["sublayer"], depth["a_max"], **drawn)
            contraction.plot(depth["sublayer"], depth["a_mean"], **drawn | {"alpha": 0.45})
        for kind, marker in (("attention", "o"), ("ffn", "s")):
            part = depth.filter(pl.col("kind") == kind)
            dots = {"linestyle": "", "marker": marker, "color": colour(run), "markersize": 3, "markeredgewidth": 0}
            share.plot(part["sublayer"], part["identity_share"], **dots)
            if run.placement == "post":
                contraction.plot(part["sublayer"], part["a_max"], **dots)
    name_axes(
        share,
        "(a) Identity share of each sublayer (○ attention, □ FFN)",
        "sublayer",
        "squared cosine with the identity",
    )
    name_axes(
        contraction,
        "(b) post-LN: $a_k$, greatest and (pale) mean over tokens",
        "sublayer",
        r"$a_k = \Vert\gamma_k\Vert_\infty\, /\, \sigma_k$",
    )
    if any(run.placement == "post" for run in runs):
        contraction.axhline(1.0, **REFERENCE)
        log_axis(contraction)
    else:
        nothing_here(contraction, "no post-LN run probed")
    run_legend(figure, runs)
    return figure
