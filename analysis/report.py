"""`report.html`: one self-contained page that tells the experiment in order, from whatever has been recorded so far.

The page needs no network and runs no script; figures are data in it. What is missing is said, not guessed, and what is
claimed is computed (`findings`). The same records give the same bytes.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from analysis import bounds_figures, depth_figures, figures, findings, html_page, tables
from analysis.html_page import Html
from analysis.probes import Verification, read_bounds, read_depth, read_pairs, read_rows, read_verification
from analysis.records import RecordError, Run, write_text


def write_report(
    out_dir: Path,
    runs: Sequence[Run],
    *,
    verification: Path | None = None,
    unigram_entropy: float | None = None,
    command: str = "sens reproduce",
) -> Path:
    """Write `out_dir`/report.html, and each figure as PNG and SVG into `out_dir`/figures; returns the page's path.

    Args:
      runs: in the order to show them (`records.read_runs`); any number, finished or not.
      verification: `verify.json`; by default the one in `out_dir`.
      unigram_entropy: of the training text, nats a token; drawn beside the loss and used to tell a plateau.
      command: what made the runs, for the reader who wants to make them again.

    Raises:
      RecordError: if runs of one placement are not seeds of one configuration, or a record is damaged.
    """
    begun = [run for run in runs if not run.updates.is_empty()]
    tables.by_placement(begun)  # refuses a mixture before anything is written
    check = read_verification(verification or out_dir / "verify.json")
    rows = {run.label: table for run in begun if (table := read_rows(run)) is not None and not table.is_empty()}
    depths = {run.label: table for run in begun if (table := read_depth(run)) is not None and not table.is_empty()}
    out_dir.mkdir(parents=True, exist_ok=True)
    drawings = out_dir / "figures"
    body = [
        _asked(),
        _missing(runs, check, rows, depths),
        _identity(check, drawings),
        _training(begun, drawings, unigram_entropy),
        _sharpening(begun, rows, drawings),
        _depth(begun, depths, drawings),
        _bounds(begun, drawings),
        _differences(begun, unigram_entropy),
        _configuration(runs),
        _again(runs, command),
    ]
    page = out_dir / "report.html"
    write_text(page, html_page.page("Exact attention sensitivity: the experiment", body))
    return page


def _asked() -> Html:
    return html_page.section(
        "What was asked",
        "Move every logit of a softmax row p = softmax(u / τ) by at most ε. To first order the entries then move, "
        "summed in absolute value, by at most ε θ(p) / τ, and some move reaches that: the norm of the Jacobian J from "
        "the infinity norm to the 1-norm is θ(p) / τ. Here θ(p) = 4 max p(S) (1 - p(S)), over subsets S, says how "
        "evenly the row can be cut in two (S. M. Emadi, arXiv 2602.18849).",
        "Three questions follow. Does the identity hold to rounding? When a transformer trains and its attention "
        "sharpens, does θ fall with it? And what does the place of the LayerNorm, before or after the residual sum, "
        "do to training? The paper trained 774 M parameters over three seeds; below is the same experiment on the "
        "runs recorded here, with the paper's own figures beside ours.",
    )


def _missing(
    runs: Sequence[Run],
    check: Verification | None,
    rows: Mapping[str, pl.DataFrame],
    depths: Mapping[str, pl.DataFrame],
) -> Html:
    """What a reader should know is not there (yet); nothing if all is."""
    lacks = [] if check else ["The identity check has not been run (`sens verify`)."]
    if not runs:
        lacks.append("No run has been recorded.")
    for run in runs:
        done, planned = run.updates.height, run.config["train"]["updates"]
        if done == 0:
            lacks.append(f"{run.label}: no update is recorded yet.")
            continue
        if done < planned:
            lacks.append(f"{run.label}: unfinished, {done} of {planned} updates; its figures are of what there is.")
        if run.attention.is_empty():
            lacks.append(f"{run.label}: no attention statistics are recorded.")
        if run.label not in rows or run.label not in depths:
            lacks.append(f"{run.label}: its last checkpoint has not been probed (`sens probe {run.path}`).")
        probed = {
            "attention rows": rows.get(run.label),
            "sublayers": depths.get(run.label),
            "pairs of depths": read_pairs(run),
            "bounds": read_bounds(run),
        }
        for what, table in probed.items():
            if table is not None and not table.is_empty() and (at := table["update"].max()) != done:
                lacks.append(f"{run.label}: its {what} are those of update {at}, though it has reached {done}.")
    for placement in ("pre", "post"):
        seeds = sum(run.placement == placement for run in runs)
        if runs and seeds < 2:
            few = "a single seed: no ± over seeds" if seeds else "no run"
            lacks.append(f"{placement}-LN: {few}.")
    if not lacks:
        return Html("")
    return html_page.notice("What is missing", lacks)


def _identity(check: Verification | None, drawings: Path) -> Html:
    if check is None:
        return html_page.section("The identity", "Not checked yet.")
    lengths = ", ".join(f"{one.worst:.1e} at L = {one.length} ({len(one.norm)} rows)" for one in check.checks)
    verdict = "holds" if check.passed else "DOES NOT HOLD"
    return html_page.section(
        "The identity",
        "The norm of J by all sign vectors against θ(p) / τ by all subsets, on random logits in float64. "
        f"Worst relative error: {lengths}. The identity {verdict} within {check.tolerance:g}.",
        html_page.figure(
            drawings / "figure_2_identity",
            figures.identity_check(check),
            "Figure 2. Left: both sides of the identity. Right: share of rows with at most a given relative error.",
        ),
    )


def _training(runs: Sequence[Run], drawings: Path, unigram_entropy: float | None) -> Html:
    if not runs:
        return html_page.section("Training", "No run has an update yet.")
    return html_page.section(
        "Training",
        "All runs see the same text in the same order; only initialisation and dropout differ between seeds. A spike "
        "is an update whose gradient norm before clipping is above twice the median of the (at most 50) updates before "
        "it; the first 10 are left out. Attention is measured with dropout off, on all rows of the sampled layers.",
        html_page.figure(
            drawings / "figure_1_trajectories",
            figures.trajectories(runs, unigram_entropy=unigram_entropy),
            "Figure 1. Loss, gradient norm with spikes ringed, the prefix certificate (medians averaged over sampled "
            "layers; band: least 5th to greatest 95th percentile over layers and seeds), gradient norm of each block.",
        ),
        html_page.table(tables.table_1(runs)),
        "± is the sample standard deviation over seeds; certificate, entropy and row maximum are means over sampled "
        "layers and seeds; the percentile range is the least and greatest over them.",
        html_page.table(tables.run_table(runs)),
    )


def _sharpening(runs: Sequence[Run], rows: Mapping[str, pl.DataFrame], drawings: Path) -> Html:
    if not runs or all(run.attention.is_empty() for run in runs):
        return html_page.section("Sharpening against bisectability", "No attention statistics are recorded yet.")
    blocks: list[Html | str] = [
        "A row may concentrate and still be cut nearly in two: a largest entry of at most 2/3 already gives θ ≥ 8/9, "
        "and only a larger one makes θ = 4p(1 - p) fall below it. So a median near one says little, and the axis that "
        "shows something is that of √(1 - θ), logarithmic. The prefix certificate bounds θ from below; the bracket "
        "bounds it from both sides.",
        html_page.figure(
            drawings / "figure_3_sharpening",
            figures.sharpening(runs),
            "Figure 3. Attention's entropy and largest entries over training (bands: over sampled layers and seeds), "
            "and θ on the axis of √(1 - θ): prefix certificate and bracket. Values above 1 - 1e-8 lie on that line.",
        ),
    ]
    if not rows:
        return html_page.section(
            "Sharpening against bisectability", *blocks, "Figure 4 needs the rows that `sens probe` keeps."
        )
    first = {run.placement: run.label for run in reversed(runs) if run.label in rows}
    shown = {run.label: rows[run.label] for run in runs if first.get(run.placement) == run.label}
    return html_page.section(
        "Sharpening against bisectability",
        *blocks,
        html_page.figure(
            drawings / "figure_4_theta_p_max",
            figures.theta_against_p_max(shown),
            "Figure 4. θ of single attention rows at the last checkpoint against their largest entry. Where purple "
            "lies under green, the prefix certificate misses what the bracket proves; vertical lines: open brackets.",
        ),
        html_page.table(findings.row_table(rows)),
    )


def _depth(runs: Sequence[Run], depths: Mapping[str, pl.DataFrame], drawings: Path) -> Html:
    if not depths:
        return html_page.section("Through depth", "No checkpoint has been probed yet.")
    probed = [run for run in runs if run.label in depths]
    found = [depths[run.label] for run in probed]
    return html_page.section(
        "Through depth",
        "A pre-LN sublayer's Jacobian is I + J: the identity term is there by construction. A post-LN sublayer's is "
        "J_LN (I + J): no bare identity. The identity share is the squared cosine between a sublayer's Jacobian and "
        "the identity: one for the identity itself, near zero for a random map.",
        "Let a be a LayerNorm's greatest gain over the standard deviation it divides by. Corollary A.3: if a stays "
        "below one at every token and sublayer of a post-LN model, the term of LayerNorms alone contracts "
        "geometrically, at most like the product of the greatest a. This is a sufficient condition about that one "
        "term, not about the whole gradient.",
        html_page.figure(
            drawings / "figure_5_depth",
            figures.through_depth(probed, found),
            "Depth, first look. Left: identity share by sublayer. Right: a of post-LN, the line is at one.",
        ),
        html_page.table(findings.depth_table(probed, found)),
        *_products(probed, found, drawings),
    )


def _products(runs: Sequence[Run], depths: Sequence[pl.DataFrame], drawings: Path) -> Iterator[Html | str]:
    """Products of Jacobians: to the output at the last checkpoints, over both depths, and over training."""
    yield (
        "The product of all Jacobians from a sublayer to the output is a sum over paths: through no branch (pre-LN the "
        "identity, post-LN the LayerNorms alone), through exactly one, through two or more. Each term was measured on "
        "the same random cotangents, and on the gradient of the loss. A share is the term's inner product with the "
        "whole, over the squared length of the whole: the shares sum to one, and a term that the others cancel has a "
        "share above it."
    )
    yield html_page.figure(
        drawings / "figure_5b_products",
        depth_figures.profiles(runs, depths),
        "Figure 5b. Gain of each term from a sublayer to the output; the gradient by depth; its bare term's share.",
    )
    named = {run.label: depth for run, depth in zip(runs, depths, strict=True)}
    yield html_page.table(depth_figures.products_table(named, ", last checkpoints"))
    post = [(run, depth) for run, depth in zip(runs, depths, strict=True) if run.placement == "post"]
    if post:
        yield "Corollary A.3, asked of each post-LN run:"
        yield html_page.bullets(f"{run.label}: {depth_figures.verdict(depth)}" for run, depth in post)
    measured = {run.placement: (run.label, table) for run in reversed(runs) if (table := read_pairs(run)) is not None}
    if measured:
        yield html_page.figure(
            drawings / "figure_5b_map",
            depth_figures.depth_map(dict(measured[placement] for placement in sorted(measured, reverse=True))),
            "Gain of the product between any two depths: above, the whole; below, its bare term alone.",
        )
    followed = [run for run in runs if not run.depth.is_empty()]
    if followed:
        yield html_page.figure(
            drawings / "figure_5b_training",
            depth_figures.over_training(followed),
            "The product from above block 0 to the output, over training.",
        )


def _bounds(runs: Sequence[Run], drawings: Path) -> Html:
    """Lambda against its bounds; nothing where no checkpoint was asked."""
    first = {run.placement: run for run in reversed(runs) if read_bounds(run) is not None}
    shown = [run for run in runs if first.get(run.placement) == run]
    found = {run.label: table for run in shown if (table := read_bounds(run)) is not None and not table.is_empty()}
    if not found:
        return Html("")
    return html_page.section(
        "Attention and its bounds",
        "Λ(U) is the largest change of an output token for changes of the input tokens of size one, to first order: "
        "the norm of the Jacobian of attention at its input U, from the largest token RMS norm to the same. It is "
        "known on both sides: some change attains the lower end, and none exceeds the upper. All was measured on one "
        "sequence, with dropout off. Corollary 4.2 and Newhouse et al. bound Λ over all inputs that the LayerNorms let "
        "through. Yudin et al. and Castin et al. bound another norm, the spectral one of a single head, and are "
        "compared with that.",
        html_page.figure(
            drawings / "figure_5a_bounds",
            bounds_figures.against_bounds(found),
            "Figure 5a. Above: Λ of the attention and its bounds, by layer. Below: the same of the whole layer.",
        ),
        *(html_page.table(table) for table in bounds_figures.checkpoint_tables(shown)),
        html_page.figure(
            drawings / "figure_5a_factors",
            bounds_figures.factors(runs),
            "What the bounds are made of, over training.",
        ),
    )


def _differences(runs: Sequence[Run], unigram_entropy: float | None) -> Html:
    if not runs:
        return html_page.section("Where ours differs from the paper", "Nothing to compare yet.")
    found = findings.findings(runs, unigram_entropy=unigram_entropy)
    same = sum(one.agrees is True for one in found)
    judged = sum(one.agrees is not None for one in found)
    unfinished = any(run.updates.height < run.config["train"]["updates"] for run in runs)
    return html_page.section(
        "Where ours differs from the paper",
        f"Of {len(found)} statements of the paper {judged} can be judged on these runs; {same} of those come out as in "
        f"the paper.{' Some runs are unfinished: this may change.' if unfinished else ''}",
        html_page.table(findings.findings_table(found)),
        html_page.table(findings.setting_table(runs)),
        "Losses of different texts, vocabularies and sizes do not compare in nats; directions and shapes do.",
    )


def _configuration(runs: Sequence[Run]) -> Html:
    if not runs:
        return Html("")
    versions = [_versions(run) for run in runs]
    blocks: list[Html | str] = [html_page.table(_values("Configuration", [run.config for run in runs]))]
    if any(versions):
        blocks.append(html_page.table(_values("Versions", versions)))
    else:
        blocks.append("No run says what it ran on (versions.json).")
    return html_page.section("Configuration and versions", *blocks)


def _again(runs: Sequence[Run], command: str) -> Html:
    first = runs[0].path if runs else "RUN"
    reading = f'import polars as pl\n\npl.read_ndjson("{first}/updates.jsonl")'
    return html_page.section(
        "How to reproduce",
        "The runs of this page were made, and are continued where they stand, by",
        html_page.code(command),
        "Every table of a run reads in one line:",
        html_page.code(reading),
        html_page.bullets(f"{run.label}: {run.path}" for run in runs),
    )


def _versions(run: Run) -> dict[str, Any]:
    path = run.path / "versions.json"
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RecordError(f"{path}: not JSON ({error})") from error
    return value if isinstance(value, dict) else {"versions": value}


def _values(title: str, configs: Iterable[Mapping[str, Any]]) -> tables.Table:
    """Every field with the distinct values it takes over runs."""
    flat = [tables.flatten(config) for config in configs]
    names = dict.fromkeys(name for config in flat for name in config)
    rows = [(name, " / ".join(dict.fromkeys(str(config[name]) for config in flat if name in config))) for name in names]
    return tables.Table(title, ("field", "value"), tuple(rows))
