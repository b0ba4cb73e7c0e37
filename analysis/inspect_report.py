"""What `analysis.inspect` found: tables for the terminal, `inspect.parquet`, and a self-contained `report.html`."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import polars as pl

from analysis import bounds_figures, depth_figures, figures, html_page, inspect_figures
from analysis.bounds_figures import PATHWAYS
from analysis.html_page import Html
from analysis.inspect import DOMINANT, Inspection, record
from analysis.records import write_text
from analysis.tables import Table
from analysis.tables import show as show_tables
from models import ModelConfig
from models.pretrained import ModelError

SHOWN = 8
"""Lines of a table in the terminal."""


def write(
    out: Path, found: Sequence[Inspection], *, command: str, head: tuple[int, int] | None = None, rows: bool = False
) -> Path:
    """Write `inspect.parquet` (with `rows` also `rows.parquet`) and `report.html` into a directory; returns its path.

    Of several inspections the tables' first column says which. `head` is the (layer, head) whose theta colours the
    text, by default the most dominated one.
    """
    for one in found:
        check_head(one.name, one.config, head)
    out.mkdir(parents=True, exist_ok=True)
    named = [
        pl.DataFrame(record(one), infer_schema_length=None).select(pl.lit(one.name).alias("model"), pl.all())
        for one in found
    ]
    _write_parquet(out / "inspect.parquet", pl.concat(named))
    if rows:
        frames = [rows_frame(one) for one in found]
        _write_parquet(out / "rows.parquet", pl.concat(frames))
    else:  # those of an inspection whose tables were just replaced
        (out / "rows.parquet").unlink(missing_ok=True)
    sections = [_intro(found)]
    if len(found) > 1:
        drawing = inspect_figures.layers(found)
        image = html_page.figure(out / "figures" / "side_by_side", drawing, "Means over the rows of each layer.")
        sections.append(html_page.section("Side by side", html_page.table(comparison(found)), image))
    sections += [*_bounds(found, out / "figures"), *_depth(found, out / "figures")]
    for number, one in enumerate(found):
        sections += _of_one(one, out / "figures" / f"model_{number}", head)
    sections.append(html_page.section("Made by", html_page.code(command)))
    title = "Attention sensitivity of " + " and ".join(one.name for one in found)
    write_text(out / "report.html", html_page.page(title, sections))
    return out


def check_head(name: str, config: ModelConfig, head: tuple[int, int] | None) -> None:
    """`ModelError` for a (layer, head) that a model does not have."""
    if head is not None and not (0 <= head[0] < config.n_layer and 0 <= head[1] < config.n_head):
        raise ModelError(
            f"{name} has no layer {head[0]} with a head {head[1]}; "
            f"it has layers 0 to {config.n_layer - 1} and heads 0 to {config.n_head - 1}"
        )


def _write_parquet(path: Path, frame: pl.DataFrame) -> None:
    temporary = path.with_name(path.name + ".tmp")
    frame.write_parquet(temporary)
    temporary.replace(path)


def rows_frame(one: Inspection) -> pl.DataFrame:
    """One line an attention row that was measured."""
    kept = ~np.isnan(one.rows["lower"])
    axes = dict(zip(("layer", "sequence", "head", "position"), np.nonzero(kept), strict=True))
    token = one.text.tokens[axes["sequence"], axes["position"]]
    columns = {**{name: axis.astype(np.int32) for name, axis in axes.items()}, "token": token}
    frame = pl.DataFrame({**columns, **{name: values[kept] for name, values in one.rows.items()}})
    return frame.select(pl.lit(one.name).alias("model"), pl.all())


def theta(lower: float, upper: float) -> str:
    """A theta known between two ends, in few digits; near one by its distance from it.

    >>> theta(0.5, 0.5), theta(0.9, 0.95), theta(0.99999, 0.99999)
    ('0.500', '0.900 to 0.950', '1 - 1e-05')
    """
    if not (math.isfinite(lower) and math.isfinite(upper)):
        return "no row"
    middle = (lower + upper) / 2
    if upper - lower > 1e-3:
        return f"{lower:.3f} to {upper:.3f}"
    return f"{middle:.3f}" if 1 - middle >= 1e-3 else f"1 - {max(1 - middle, 0):.0e}"


_COLUMNS = ("θ median", "θ 5 %", "p_max median", "p_max > 2/3", "entropy", "sink mass")


def _cells(rows: dict[str, np.ndarray]) -> tuple[str, ...]:
    """The `_COLUMNS` of some rows."""
    median, low = ({end: np.nanquantile(rows[end], q) for end in ("lower", "upper")} for q in (0.5, 0.05))
    return (
        theta(**median),
        theta(**low),
        f"{np.nanmedian(rows['p_max']):.3f}",
        f"{np.nanmean(rows['dominant']):.1%}",
        f"{np.nanmean(rows['entropy']):.3f}",
        f"{np.nanmean(rows['sink']):.3f}",
    )


def layer_table(one: Inspection, count: int | None = SHOWN) -> Table:
    """Layers, the most dominated first."""
    share = np.nanmean(one.rows["dominant"], axis=(1, 2, 3))
    chosen = np.argsort(-share, kind="stable")[:count]
    lines = [(str(n), *_cells({name: values[n] for name, values in one.rows.items()})) for n in chosen]
    return Table(
        _title(one, "layers, most dominated first", len(lines), len(share)), ("layer", *_COLUMNS), tuple(lines)
    )


def head_table(one: Inspection, quantity: str = "dominant", count: int | None = SHOWN) -> Table:
    """Heads with the largest mean of a quantity first: `dominant` for rows with one large atom, `sink` for sinks."""
    mean = np.nanmean(one.rows[quantity], axis=(1, 3))
    order = np.argsort(-mean, axis=None, kind="stable")[:count]
    lines = []
    for n, h in zip(*np.unravel_index(order, mean.shape), strict=True):
        cells = _cells({name: values[n, :, h] for name, values in one.rows.items()})
        lines.append((f"{n}.{h}", *cells, sink_token(one, int(n), int(h))))
    what = {"dominant": "heads, most dominated first", "sink": "heads, strongest sinks first"}[quantity]
    return Table(_title(one, what, len(lines), mean.size), ("head", *_COLUMNS, "sink"), tuple(lines))


def _title(one: Inspection, what: str, shown: int, of: int) -> str:
    return f"{one.name}: {what}" + (f" ({shown} of {of})" if shown < of else "")


def sink_token(one: Inspection, layer: int, head: int) -> str:
    """The token that is the sink most often over the sequences, and its position."""
    positions, counts = np.unique(one.sink[layer, :, head], return_counts=True)
    position = int(positions[np.argmax(counts)])
    sequence = int(np.argmax(one.sink[layer, :, head] == position))
    return f"{_visible(one.text.pieces[sequence][position])} at {position}"


def _visible(piece: str) -> str:
    return piece.replace("\n", "⏎") if piece.strip(" ") else "␣" * max(1, len(piece))


def comparison(found: Sequence[Inspection]) -> Table:
    """All rows of each model, side by side."""
    columns = [_cells(one.rows) for one in found]
    lines = tuple((name, *cells) for name, *cells in zip(_COLUMNS, *columns, strict=True))
    return Table("All layers and heads", ("", *(one.name for one in found)), lines)


SHORT = {"covariance": "covar.", "refined": "refined", "local": "Thm 4.1", "bounded": "Cor 4.2"}
"""The bounds that a table as wide as a terminal has room for; the report has all."""


def bounds_table(one: Inspection, names: Mapping[str, str] = SHORT) -> Table | None:
    """Lambda by layer and the ratio of each bound to it; None where it was not measured."""
    if one.bounds is None:
        return None
    table = bounds_figures.attention_table({"": one.bounds}, names)
    return dataclasses.replace(table, title=f"{one.name}: {table.title}")


def pathways_table(one: Inspection) -> Table | None:
    """What the bound on a layer's Lambda is the sum of, over heads; None where it was not measured."""
    if one.pathways is None:
        return None
    lines = []
    for (layer,), heads in one.pathways.group_by("layer", maintain_order=True):
        of_heads = heads.select(pl.sum_horizontal(PATHWAYS)).to_series().to_numpy()
        largest = int(of_heads.argmax())
        share = f"{of_heads[largest] / of_heads.sum():.0%} (head {largest})"
        sums = (f"{heads[part].sum():.3g}" for part in PATHWAYS)
        lines.append((f"layer {layer}", *sums, share, f"{heads['theta'].min():.6f}"))
    title = f"{one.name}: pathways in the row at which Λ is attained: their bounds, summed over heads"
    return Table(title, ("attention", *PATHWAYS, "largest head's share", "θ~, least head"), tuple(lines))


def depth_table(found: Sequence[Inspection]) -> Table | None:
    """The product of Jacobians from above block 0 to the output; None where it was not measured."""
    measured = {one.name: one.depth for one in found if one.depth is not None}
    if not measured:
        return None
    wide = depth_figures.products_table(measured)  # a line a model: turned, it fits a terminal
    _, *lines = zip(wide.columns, *wide.rows, strict=True)
    return Table(wide.title, ("", *measured), tuple(lines))


def tables(found: Sequence[Inspection]) -> list[Table]:
    """What the terminal shows."""
    of_one: list[Callable[[Inspection], Table]] = [layer_table, head_table, lambda one: head_table(one, "sink")]
    first = comparison(found) if len(found) > 1 else None
    rows = (make(one) for one in found for make in of_one)
    measured = (first, depth_table(found), *map(bounds_table, found))
    return [*(table for table in measured if table is not None), *rows]


def show(found: Sequence[Inspection]) -> None:
    """Print the tables."""
    show_tables(tables(found))


def _intro(found: Sequence[Inspection]) -> Html:
    lines = []
    for one in found:
        config, text = one.config, one.text
        shape = f"{text.tokens.shape[0]} of {text.tokens.shape[1]} tokens"
        rows = int((~np.isnan(one.rows["lower"])).sum())
        wide = float(np.nanmax(one.rows["upper"] - one.rows["lower"]))
        missed = float(np.nanmax(one.rows["lower"] - one.rows["prefix"]))
        lines.append(
            f"{one.name}: {config.n_layer} layers, {config.n_head} heads, τ = {config.tau:g}, sequences: {shape}"
            f"{f', {text.left_out} tokens of the text left out' if text.left_out else ''}; {rows:,} rows, θ known to "
            f"{wide:.0e} or better for each of them; the prefix certificate is low by up to {max(missed, 0):.3f}."
        )
    return html_page.section(
        "What was measured",
        "Move every logit of an attention row p = softmax(u / τ) by at most ε: its entries then move, summed in "
        "absolute value, by at most ε θ(p) / τ to first order, and some move reaches that. θ is at least 8/9 wherever "
        f"the largest entry p_max is at most 2/3, and 4 p_max (1 - p_max) above {DOMINANT:.3f}: there one atom "
        "dominates, and the row no longer answers. A head's sink is the token with the most mass over a sequence.",
        html_page.bullets(lines),
    )


def _bounds(found: Sequence[Inspection], drawings: Path) -> list[Html]:
    """The section on Lambda, if it was measured."""
    measured = [one for one in found if one.bounds is not None]
    if not measured:
        return []
    every = [t for one in measured for t in (bounds_table(one, bounds_figures.ATTENTION), pathways_table(one))]
    shown = [html_page.table(table) for table in every if table is not None]
    drawing = html_page.figure(
        drawings / "bounds",
        inspect_figures.bounds(measured),
        "Λ of the attention and the bounds on it, by layer.",
    )
    words = (
        "Λ(U) is the largest change of an output token for changes of all input tokens of size one, to first order: "
        "the norm of the Jacobian of attention at its input U, from the largest token RMS norm to the same. Some "
        "change attains its lower end and none exceeds the upper. Measured on one sequence from the text's start. A "
        "bound that does not hold for this model (with its biases or rotary positions) is left out."
    )
    return [html_page.section("Attention and its bounds", words, drawing, *shown)]


def _depth(found: Sequence[Inspection], drawings: Path) -> list[Html]:
    """The section on products through depth, if they were measured."""
    measured = [one for one in found if one.depth is not None]
    if not measured:
        return []
    drawing = html_page.figure(
        drawings / "depth",
        inspect_figures.depth(measured),
        "Above, the gain of a random cotangent from a sublayer to the output, by the branches that its paths enter; "
        "below, the gradient of the loss.",
    )
    verdicts = [
        f"{one.name}: {depth_figures.verdict(one.depth)}"
        for one in measured
        if one.depth is not None and one.config.placement == "post"
    ]
    parts = ["Corollary A.3, asked of each post-LN model:", html_page.bullets(verdicts)] if verdicts else []
    shown = depth_table(found)
    assert shown is not None
    words = (
        "P is the product of the Jacobians of all sublayers from one to the output. A path enters no branch (pre-LN "
        "the identity, post-LN the LayerNorms alone), one branch, or more; shares are of the squared length, signed."
    )
    return [html_page.section("Through depth", words, drawing, html_page.table(shown), *parts)]


def _of_one(one: Inspection, drawings: Path, head: tuple[int, int] | None) -> list[Html]:
    """The sections of one model."""
    if head is None:
        share = np.nanmean(one.rows["dominant"], axis=(1, 3))
        layer, number = (int(i) for i in np.unravel_index(int(np.argmax(share)), share.shape))
    else:
        layer, number = head
    heat = html_page.figure(
        drawings / "heads",
        inspect_figures.heads(one),
        "By layer and head: medians over rows of θ (lower end), D = √(1 - θ) (its greatest value that the bracket "
        "allows, on a log scale), largest entry and normalised entropy; mean mass on the sink.",
    )
    scatter = html_page.figure(
        drawings / "theta_p_max",
        figures.theta_against_p_max({one.name: rows_frame(one)}),
        "θ of attention rows against their largest entry; below, the same rows on a log axis of √(1 - θ).",
    )
    layers = html_page.figure(
        drawings / "layers",
        inspect_figures.layers([one]),
        "Means over the rows of each layer; below, the stream's root mean square and the norms' gains.",
    )
    shades = one.rows["lower"][layer, 0, number], one.rows["p_max"][layer, 0, number]
    pieces = [
        (piece, 0.0 if math.isnan(t) else math.sqrt(max(0.0, 1 - t)), f"θ {t:.4f}, p_max {p:.3f}")
        for piece, t, p in zip(one.text.pieces[0], *shades, strict=False)
    ]
    return [
        html_page.section(f"{one.name}: layers and heads", heat, layers, html_page.table(head_table(one)),
                          html_page.table(head_table(one, "sink")), html_page.table(layer_table(one, None))),
        html_page.section(f"{one.name}: θ and the largest entry", scatter),
        html_page.section(
            f"{one.name}: the text, as layer {layer}, head {number} reads it",
            "Each token is shaded by D = √(1 - θ) of its own row: plain where the row answers to its logits as "
            "strongly as a row can, dark where one atom holds it.",
            html_page.tinted(pieces),
        ),
    ]  # fmt: skip
