"""The figures of an inspection: heat maps over layers and heads, profiles over layers, Lambda and its bounds, depth."""

from collections.abc import Sequence

import numpy as np
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure

from analysis.bounds_figures import ATTENTION, bars
from analysis.depth_figures import TERM_COLOURS, TERM_NAMES
from analysis.inspect import Inspection
from analysis.plotting import (
    D_FLOOR,
    LENGTH_COLOURS,
    REFERENCE,
    WIDTH,
    log_axis,
    name_axes,
    new_figure,
    nothing_here,
    styled,
    to_d,
)


@styled
def heads(one: Inspection) -> Figure:
    """Five panels, layers down and heads across: theta, D, largest entry, entropy, sink mass."""
    median = {name: np.nanmedian(one.rows[name], axis=(1, 3)) for name in ("lower", "p_max", "entropy")}
    unit = Normalize(0, 1)
    panels = (
        ("θ", median["lower"], unit),
        ("D = √(1 - θ)", to_d(median["lower"]), LogNorm(D_FLOOR, 1)),
        ("largest entry", median["p_max"], unit),
        ("entropy", median["entropy"], unit),
        ("sink mass", np.nanmean(one.rows["sink"], axis=(1, 3)), unit),
    )
    layers = one.config.n_layer
    figure, axes = new_figure(1, len(panels), height=min(9.0, 1.6 + 0.16 * layers), sharey=True)
    for panel, (title, values, norm) in zip(axes[0], panels, strict=True):
        image = panel.imshow(values, norm=norm, aspect="auto", cmap="viridis", interpolation="nearest")
        panel.set_title(title)
        panel.set_xlabel("head")
        panel.grid(visible=False)
        figure.colorbar(image, ax=panel, location="bottom", aspect=12)
    axes[0, 0].set_ylabel("layer")
    return figure


@styled
def layers(found: Sequence[Inspection]) -> Figure:
    """Profiles over layers, a colour a model: theta, dominated rows, entropy, sink mass, stream, gains of the norms."""
    figure, axes = new_figure(2, 3, height=WIDTH * 0.55)
    for one, colour in zip(found, LENGTH_COLOURS, strict=False):
        depth = np.arange(one.config.n_layer)
        means = {name: np.nanmean(values, axis=(1, 2, 3)) for name, values in one.rows.items()}
        for panel, (title, values) in zip(axes.flat, (
            ("θ, mean", means["lower"]),
            ("share of rows with p_max > 2/3", means["dominant"]),
            ("normalised entropy, mean", means["entropy"]),
            ("mass on the sink, mean", means["sink"]),
            ("stream that enters, root mean square", one.layers["residual_rms"]),
            ("largest gain of a norm, max |γ| / σ", np.maximum(one.layers["a_attention"], one.layers["a_ffn"])),
        ), strict=True):  # fmt: skip
            panel.plot(depth, values, "o-", color=colour, markersize=3, label=one.name)
            panel.set_title(title)
            panel.set_xlabel("layer")
    for panel in axes.flat[:4]:
        panel.set_ylim(-0.03, 1.03)
    for panel in axes.flat[4:]:
        log_axis(panel)
    if len(found) > 1:
        axes[0, 0].legend()
    return figure


@styled
def bounds(found: Sequence[Inspection]) -> Figure:
    """Lambda and the bounds on it by layer, a panel a model in which they were measured."""
    figure, axes = new_figure(1, len(found), height=3.8, sharey=True)
    for panel, one in zip(axes[0], found, strict=True):
        assert one.bounds is not None
        bars(panel, one.bounds, "lambda", "Λ, proved", ATTENTION)
        name_axes(panel, one.name, "layer", "")
        panel.set_yscale("log")
    axes[0, 0].set_ylabel("(inf,rms) norm of the Jacobian")
    axes[0, -1].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


@styled
def depth(found: Sequence[Inspection]) -> Figure:
    """Products from every sublayer to the output, a column a model: gain of each term; the gradient of the loss."""
    figure, axes = new_figure(2, len(found), height=6.0, sharex="col")
    for (gains, gradient), one in zip(axes.T, found, strict=True):
        table, placement = one.depth, one.config.placement
        assert table is not None
        for term, shade in TERM_COLOURS.items():
            # One sublayer has no path through two branches: what is there is rounding.
            drawn = table.slice(0, len(table) - (term == "rest"))
            name = TERM_NAMES[placement][term]
            gains.plot(drawn["sublayer"], drawn["gain" if term == "total" else term], color=shade, label=name)
        if placement == "post":
            gains.plot(table["sublayer"], table["bound"], label="Corollary A.3", **REFERENCE)
        name_axes(gains, f"{one.name} ({placement}-LN)", "", "root mean square gain to the output")
        log_axis(gains)
        gains.legend(loc="best")
        name_axes(gradient, "gradient of the next token's loss", "sublayer", "norm")
        if table["gradient"].is_null().all():
            nothing_here(gradient, "no next-token loss")
        else:
            gradient.plot(table["sublayer"], table["gradient"], color=TERM_COLOURS["total"])
            log_axis(gradient)
    return figure
