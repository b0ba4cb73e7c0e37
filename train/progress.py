"""One live line while something long runs; silent when the output is not a terminal."""

import contextlib
from collections.abc import Callable, Iterator

import rich.console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from train import loop


def _bar(*columns: str) -> Progress:
    console = rich.console.Console(stderr=True)
    texts = [TextColumn(column) for column in columns]
    layout = (texts[0], BarColumn(), *texts[1:], TimeRemainingColumn())
    return Progress(*layout, console=console, disable=not console.is_terminal)


@contextlib.contextmanager
def training(name: str) -> Iterator[Callable[[loop.Progress], None]]:
    """A line with update, loss, tokens a second and time left, fed by `train.loop.train`'s `on_update`."""
    with _bar("{task.description}", "{task.completed}/{task.total}", "{task.fields[figures]}") as bar:
        task = bar.add_task(name, total=None, figures="compiling")

        def show(now: loop.Progress) -> None:
            figures = f"loss {now.loss:.3f}  {now.tokens_per_second:,.0f} tokens/s"
            figures += "" if now.mfu is None else f"  {100 * now.mfu:.1f} % of peak"
            bar.update(task, completed=now.update, total=now.updates, figures=figures)

        yield show


@contextlib.contextmanager
def counting(name: str) -> Iterator[Callable[[int, int], None]]:
    """A line with how many of all are done."""
    with _bar("{task.description}", "{task.completed}/{task.total}") as bar:
        task = bar.add_task(name, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextlib.contextmanager
def bytes_done(name: str) -> Iterator[Callable[[int, int], None]]:
    """A line with the megabytes of text done, fed by `train.data.prepare`'s `progress`."""
    with _bar("{task.description}", "{task.percentage:>3.0f} %") as bar:
        task = bar.add_task(name, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
