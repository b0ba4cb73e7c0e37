"""The whole experiment in order; every step is left alone when it is already done."""

from collections.abc import Sequence
from pathlib import Path

import rich.console

from analysis import tables
from analysis.identity import verify
from analysis.probes import read_verification
from analysis.records import Run, read_runs
from analysis.report import write_report
from train import progress
from train.data import prepare
from train.presets import RunConfig
from train.probe import DEPTH, ROWS, probe
from train.sweep import sweep


def reproduce(out: Path, config: RunConfig, runs: dict[Path, RunConfig]) -> None:
    """Verify, tokenise, train the runs (`train.sweep.variants`), probe, write table, figures and report into `out`."""
    say = rich.console.Console(highlight=False).print
    out.mkdir(parents=True, exist_ok=True)
    verified = read_verification(out / "verify.json")
    if verified is None or not verified.passed:
        say("[bold]1. The identity[/bold] ||J||_{inf->1} = theta/tau, every sign vector against every subset")
        verify(out / "verify.json", show=say)
    with progress.bytes_done("tokenise") as done:
        prepare(config.train.source, config.train.tokenizer, out / "data", column=config.train.column, progress=done)

    def measure(run: Path) -> None:
        if not all((run / "probe" / name).is_file() for name in (ROWS, DEPTH)):
            say(f"[bold]3. Probe[/bold] {run}")
            probe(run)

    sweep(runs, out / "data", say=lambda words: say(f"[bold]2. Train[/bold] {words}"), after=measure)
    recorded = read_runs(list(runs))
    show_table(recorded)
    page = out / "report.html"
    made_from = [out / "verify.json", *(run / "probe" / DEPTH for run in runs)]  # the last file of every step
    if not page.is_file() or page.stat().st_mtime < max(path.stat().st_mtime for path in made_from):
        say("[bold]4. Figures and report[/bold]")
        write_report(out, recorded, unigram_entropy=recorded_unigram_entropy(recorded))
    say(f"Report: {page}   figures: {out / 'figures'}")


def show_table(runs: Sequence[Run]) -> None:
    """Table 1 in the terminal, the paper's figures beside ours."""
    tables.show([tables.table_1(runs)])


def recorded_unigram_entropy(runs: Sequence[Run]) -> float | None:
    """The entropy of the text's token frequencies, if all runs saw the same text."""
    values = {run.config["data"]["unigram_entropy"] for run in runs}
    return values.pop() if len(values) == 1 else None
