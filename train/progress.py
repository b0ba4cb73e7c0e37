"""What a command shows while something long runs: one live line, or a line a minute where stderr is no terminal."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

import rich.console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from train import loop

LOG_SECONDS = 60


def _bar(*columns: str) -> Progress:
    console = rich.console.Console(stderr=True)
    texts = [TextColumn(column) for column in columns]
    layout = (texts[0], BarColumn(), *texts[1:], TimeRemainingColumn())
    return Progress(*layout, console=console, disable=not console.is_terminal)


def _log(bar: Progress, name: str) -> Callable[[str], None]:
    """Writes a line in place of a bar that is not shown, when a minute has passed since the last."""
    written = time.monotonic()

    def write(words: str) -> None:
        nonlocal written
        if bar.disable and time.monotonic() - written >= LOG_SECONDS:
            written = time.monotonic()
            print(f"{name}: {words}", file=sys.stderr, flush=True)

    return write


@contextlib.contextmanager
def training(name: str) -> Iterator[Callable[[loop.Progress], None]]:
    """A line with update, loss, tokens a second and time left, fed by `train.loop.train`'s `on_update`."""
    with _bar("{task.description}", "{task.completed}/{task.total}", "{task.fields[figures]}") as bar:
        task, log = bar.add_task(name, total=None, figures="compiling"), _log(bar, name)

        def show(now: loop.Progress) -> None:
            figures = f"loss {now.loss:.3f}  {now.tokens_per_second:,.0f} tokens/s"
            figures += "" if now.mfu is None else f"  {100 * now.mfu:.1f} % of peak"
            bar.update(task, completed=now.update, total=now.updates, figures=figures)
            log(f"{now.update}/{now.updates}  {figures}")

        yield show


@contextlib.contextmanager
def counting(name: str) -> Iterator[Callable[[int, int], None]]:
    """A line with how many of all are done."""
    with _bar("{task.description}", "{task.completed}/{task.total}") as bar:
        yield _counted(bar, name, lambda done, total: f"{done}/{total}")


@contextlib.contextmanager
def bytes_done(name: str) -> Iterator[Callable[[int, int], None]]:
    """A line with the share of the text that is done, fed by `train.data.prepare`'s `progress`."""
    with _bar("{task.description}", "{task.percentage:>3.0f} %") as bar:
        yield _counted(bar, name, lambda done, total: f"{100 * done / max(total, 1):.0f} %")


def _counted(bar: Progress, name: str, words: Callable[[int, int], str]) -> Callable[[int, int], None]:
    task, log = bar.add_task(name, total=None), _log(bar, name)

    def show(done: int, total: int) -> None:
        bar.update(task, completed=done, total=total)
        log(words(done, total))

    return show
