"""What the paper found, asked of our own runs: every sentence and every verdict here is computed from the record."""

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import polars as pl

from analysis.probes import CLOSED
from analysis.records import Run
from analysis.spikes import shared_spikes
from analysis.tables import NOT_RECORDED, Summary, Table, by_placement, flatten, summarise
from analysis.trajectories import pooled

PAPER_SETTING: Mapping[str, Any] = {
    "model.n_layer": 36,
    "model.d_model": 1280,
    "model.n_head": 20,
    "model.d_ff": 5120,
    "model.context": 1024,
    "model.vocab_size": 50257,
    "model.dropout": 0.1,
    "model.tau": 1.0,
    "model.init_std": 0.02,
    "train.source": "FineWeb",
    "train.tokenizer": "GPT-2 byte-level BPE",
    "train.updates": 2000,
    "train.micro_batch": 4,
    "train.accumulation": 16,
    "train.lr": 3e-4,
    "train.warmup": 500,
    "train.beta1": 0.9,
    "train.beta2": 0.95,
    "train.eps": 1e-8,
    "train.weight_decay": 0.1,
    "train.clip": 1.0,
    "train.compute_dtype": "bfloat16",
}
"""What the paper states of its setting, by our names; where it is silent nothing is compared."""

PLATEAU = 0.98
"""A run whose final loss is at least this share of the text's unigram entropy has learnt little beyond frequencies."""

DICHOTOMY = 8 / 9
"""Theta is at least this if the largest entry is at most 2/3, and below it otherwise (theory.md, 2.1)."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One statement of the paper, its figures, ours, and whether ours say the same (None: not measured)."""

    statement: str
    paper: str
    ours: str
    agrees: bool | None


class _NotMeasuredError(Exception):
    """Why a finding cannot be judged from these runs."""


def findings(runs: Sequence[Run], *, unigram_entropy: float | None = None) -> list[Finding]:
    """The paper's statements about training, each judged on `runs` (of which every one has updates)."""
    groups = {name: [summarise(run) for run in group] for name, group in by_placement(runs).items()}
    judged: list[tuple[str, str, Callable[[], tuple[str, bool]]]] = [
        ("pre-LN ends below post-LN for every matched seed", "3 of 3 seeds", lambda: _matched(groups)),
        ("the final loss varies more over seeds in post-LN", "± 0.005 and ± 1.551", lambda: _variation(groups)),
        (
            "some post-LN seeds stay on a plateau from early on",
            "2 of 3 post-LN seeds, near 7.67; no pre-LN seed",
            lambda: _plateau(groups, unigram_entropy),
        ),
        ("post-LN has more spike updates", "9.0 and 35.3", lambda: _larger(groups, lambda one: one.spikes, "{:.1f}")),
        (
            "post-LN reaches the larger gradient norm before clipping",
            "35 and 112",
            lambda: _larger(groups, lambda one: one.largest_norm, "{:.3g}", max),
        ),
        ("some updates are spikes in every run", "e.g. 1057 to 1059, 1459 to 1460", lambda: _shared(runs)),
        ("pre-LN's attention sharpens", "entropy 0.987 → 0.726, row maximum 0.010 → 0.174", lambda: _sharpens(groups)),
        (
            "pre-LN's median certificate stays at 0.995 or more at every sampled layer and checkpoint",
            "least 0.995",
            lambda: _median_stays(groups),
        ),
        (
            "under that median lies a tail of rows with a dominant entry (5th percentile below 8/9 at the end)",
            "0.26",
            lambda: _tail(groups),
        ),
        (
            "post-LN's gradient fades towards the input, pre-LN's does not",
            "first / last block: 2e-4 or less on the plateau; pre-LN (one seed) 0.15 first, then 0.02 to 0.06",
            lambda: _fades(groups),
        ),
    ]
    return [_judge(*case) for case in judged]


def findings_table(found: Sequence[Finding]) -> Table:
    """The findings as a table: statement, the paper's figures, ours, verdict."""
    verdicts = {True: "as in the paper", False: "differs", None: "not measured"}
    rows = tuple((one.statement, one.paper, one.ours, verdicts[one.agrees]) for one in found)
    return Table("The paper's statements on our runs", ("statement", "paper", "ours", "verdict"), rows)


def setting_table(runs: Sequence[Run]) -> Table:
    """The fields in which our setting is not the paper's."""
    flat = [flatten(run.config) for run in runs]
    rows = []
    for name, paper in PAPER_SETTING.items():
        ours = list(dict.fromkeys(str(config[name]) for config in flat if name in config))
        if ours and ours != [str(paper)]:
            rows.append((name, str(paper), " / ".join(ours)))
    return Table("Where our setting differs", ("field", "paper", "ours"), tuple(rows))


def row_table(rows: Mapping[str, pl.DataFrame]) -> Table:
    """Theta of all probed attention rows, by run: how far the bracket closes and what the prefix certificate misses."""
    columns = (
        "run",
        "update",
        "rows",
        f"bracket within {CLOSED:g}",
        "widest bracket",
        "certificate at most low by",
        "low by over 0.01",
        "largest entry over 2/3",
        "5th percentile of θ",
    )
    lines = []
    for name, table in rows.items():
        width, missed = table["upper"] - table["lower"], table["lower"] - table["prefix"]
        shares = [(width <= CLOSED).mean(), (missed > 0.01).mean(), (table["p_max"] > 2 / 3).mean()]
        closed, low, dominant = (f"{share:.2%}" for share in shares)
        tail = table["lower"].quantile(0.05, interpolation="linear")
        lines.append(
            (
                name,
                str(table["update"].max()),
                str(table.height),
                closed,
                f"{width.max():.1e}",
                f"{missed.max():.3f}",
                low,
                dominant,
                f"{tail:.4f}",
            )
        )
    return Table("θ of attention rows at the last checkpoints", columns, tuple(lines))


def depth_table(runs: Sequence[Run], depths: Sequence[pl.DataFrame]) -> Table:
    """The first look through depth, by run; the product bounds post-LN's LayerNorm-only term (Corollary A.3)."""
    columns = ("run", "sublayers", "identity share, least to greatest", "a below 1 at", "product of greatest a")
    lines = []
    for run, table in zip(runs, depths, strict=True):
        share, a = table["identity_share"].drop_nulls(), table["a_max"].drop_nulls()
        shares = f"{share.min():.3g} to {share.max():.3g}" if len(share) else NOT_RECORDED
        condition = ("about post-LN only",) * 2
        if run.placement == "post":
            condition = (
                (f"{(a < 1).sum()} of {len(a)} sublayers", f"{a.product():.2e}") if len(a) else (NOT_RECORDED,) * 2
            )
        lines.append((run.label, str(table.height), shares, *condition))
    return Table("Through depth at the last checkpoints", columns, tuple(lines))


Groups = Mapping[str, Sequence[Summary]]


def _judge(statement: str, paper: str, measure: Callable[[], tuple[str, bool]]) -> Finding:
    try:
        ours, agrees = measure()
    except _NotMeasuredError as reason:
        return Finding(statement, paper, str(reason), None)
    return Finding(statement, paper, ours, agrees)


def _group(groups: Groups, placement: str) -> Sequence[Summary]:
    if placement not in groups:
        raise _NotMeasuredError(f"no {placement}-LN run")
    return groups[placement]


def _known(values: Sequence[Any], what: str) -> list[Any]:
    if not values or any(value is None or value == [] for value in values):
        raise _NotMeasuredError(f"{what} not recorded")
    return list(values)


def _matched(groups: Groups) -> tuple[str, bool]:
    pre = {one.run.seed: one.final_loss for one in _group(groups, "pre")}
    post = {one.run.seed: one.final_loss for one in _group(groups, "post")}
    gaps = [post[seed] - pre[seed] for seed in pre if seed in post]
    if not gaps:
        raise _NotMeasuredError("no seed with both placements")
    below = sum(gap > 0 for gap in gaps)
    return f"{below} of {len(gaps)} seeds; post minus pre {min(gaps):.3f} to {max(gaps):.3f} nats", below == len(gaps)


def _variation(groups: Groups) -> tuple[str, bool]:
    losses = [[one.final_loss for one in _group(groups, placement)] for placement in ("pre", "post")]
    if min(map(len, losses)) < 2:
        raise _NotMeasuredError("fewer than two seeds of a placement")
    pre, post = map(statistics.stdev, losses)
    return f"± {pre:.3f} and ± {post:.3f}", post > pre


def _plateau(groups: Groups, unigram_entropy: float | None) -> tuple[str, bool]:
    if unigram_entropy is None:
        raise _NotMeasuredError("the unigram entropy of the text is not given")
    stuck = {}
    for placement in ("pre", "post"):
        group = _group(groups, placement)
        stuck[placement] = sum(one.final_loss >= PLATEAU * unigram_entropy for one in group), len(group)
    text = ", ".join(f"{count} of {of} {name}-LN seeds" for name, (count, of) in stuck.items())
    verdict = stuck["post"][0] > 0 and stuck["pre"][0] == 0
    return f"{text} end at or above {PLATEAU:.0%} of the unigram entropy ({unigram_entropy:.3f})", verdict


def _larger(
    groups: Groups, value: Callable[[Summary], float], form: str, reduce: Callable = statistics.fmean
) -> tuple[str, bool]:
    pre, post = (reduce([value(one) for one in _group(groups, placement)]) for placement in ("pre", "post"))
    return f"{form.format(pre)} and {form.format(post)}", post > pre


def _shared(runs: Sequence[Run]) -> tuple[str, bool]:
    if len(runs) < 2:
        raise _NotMeasuredError("a single run")
    shared = shared_spikes(runs)
    listed = ", ".join(map(str, shared[:8])) + (", ..." if len(shared) > 8 else "")
    return f"{len(shared)} updates{': ' + listed if shared else ''}", bool(shared)


def _sharpens(groups: Groups) -> tuple[str, bool]:
    pre = _group(groups, "pre")
    entropies = _known([one.entropy for one in pre], "attention")
    maxima = _known([one.p_max for one in pre], "attention")
    (e0, e1), (m0, m1) = (
        [statistics.fmean(side) for side in zip(*pairs, strict=True)] for pairs in (entropies, maxima)
    )
    sharper = all(last < first for first, last in entropies) and all(last > first for first, last in maxima)
    return f"entropy {e0:.3f} → {e1:.3f}, row maximum {m0:.3f} → {m1:.3f}", sharper


def _median_stays(groups: Groups) -> tuple[str, bool]:
    least = _known([pooled(one.run, "prefix")["median"].min() for one in _group(groups, "pre")], "attention")
    return f"least {min(least):.4f}", min(least) >= 0.995


def _tail(groups: Groups) -> tuple[str, bool]:
    low = min(low for low, _ in _known([one.envelope for one in _group(groups, "pre")], "attention"))
    return f"{low:.3f}", low < DICHOTOMY - 1e-4  # (1/3, 1/3, 1/3) stands on the edge, rounding aside


def _fades(groups: Groups) -> tuple[str, bool]:
    ratios = {}
    for placement in ("pre", "post"):
        profiles = _known([one.block_norms for one in _group(groups, placement)], "block gradient norms")
        ratios[placement] = [profile[0] / profile[-1] if profile[-1] else float("inf") for profile in profiles]
    text = "; ".join(f"{name}-LN {min(r):.2g} to {max(r):.2g}" for name, r in ratios.items())
    return f"first / last block: {text}", max(ratios["post"]) < min(1.0, *ratios["pre"])
