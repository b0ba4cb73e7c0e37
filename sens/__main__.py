"""The `sens` command: parses, delegates, and turns a user's mistake into one line and exit status 2."""

import contextlib
import importlib.util
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from sens.commands import UsageError

USAGE = """\
usage: sens COMMAND [options]

commands:
  reproduce   the whole experiment on real text: identity, six runs, probes, table, figures, report.html
  verify      check ||J_tau||_{inf->1} = theta/tau exhaustively at small lengths
  theta       quantiles of theta over the rows of a file of attention matrices, from both sides
  train       train one run, or continue it
  probe       measure attention rows and depth on a run's checkpoint
  inspect     theta, entropy and sinks of a published model's attention on a text
  report      table, figures and report.html from recorded runs

`sens COMMAND --help` lists a command's options.
"""

COMMANDS = {  # each a function of that name in that module of `sens.commands`
    "reproduce": "runs",
    "verify": "rows",
    "train": "runs",
    "theta": "rows",
    "probe": "runs",
    "inspect": "rows",
    "report": "runs",
}

CONTINUING = ("reproduce", "train")  # these keep what they did when they are stopped; the others write at their end

EXIT_USAGE, EXIT_FAILED, EXIT_STOPPED, EXIT_CONTINUE = 2, 1, 130, 75  # 75 is EX_TEMPFAIL: saved, run it again


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    name, rest = given[0], given[1:]
    if name not in COMMANDS:
        return _complain(f"no command {name!r} (want one of {', '.join(COMMANDS)})")
    shadow = _shadowed()
    if shadow:
        return _complain(shadow)
    module = importlib.import_module(f"sens.commands.{COMMANDS[name]}")
    return _run(getattr(module, name), rest)


def _run(command: Callable[[Sequence[str]], None], arguments: Sequence[str]) -> int:
    with _undisturbed():
        from analysis.records import RecordError
        from analysis.rows import RowsError
        from models.pretrained import ModelError
        from train.checkpoint import CheckpointError
        from train.files import DataError, RunWarning
        from train.loop import Interrupted, TrainingError
        from train.processes import ProcessError
        from train.sharding import MeshError

    # Orbax logs what it then raises, with pages of traceback.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", RunWarning)
            warnings.showwarning = _show_warning
            command(arguments)
    except (
        UsageError, RecordError, DataError, CheckpointError, ModelError, RowsError, MeshError, ProcessError
    ) as error:  # fmt: skip
        return _complain(str(error))
    except OSError as error:  # a full disk, a read-only directory: the system's own words and the place
        return _complain(f"{error.filename or 'input or output'}: {error.strerror or error}")
    except TrainingError as error:
        print(f"sens: {error}", file=sys.stderr)
        return EXIT_FAILED
    except Interrupted as stop:
        print(f"sens: {stop}", file=sys.stderr)
        return EXIT_STOPPED if stop.signum == signal.SIGINT else EXIT_CONTINUE
    return 0


def _show_warning(message: Warning | str, *_place: object) -> None:
    print(f"sens: warning: {message}", file=sys.stderr)


def _complain(message: str) -> int:
    print(f"sens: error: {message}", file=sys.stderr)
    return EXIT_USAGE


def _shadowed() -> str | None:
    """The packages beside this one have common names: say so if Python would import somebody else's."""
    ours = Path(__file__).resolve().parent.parent
    for name in ("models", "analysis", "train"):
        spec = importlib.util.find_spec(name)
        places = [] if spec is None else list(spec.submodule_search_locations or [spec.origin or ""])
        if not places or Path(places[0]).resolve().parent != ours:
            found = f"{places[0]} stands in its way" if places else "it is missing"
            return (
                f"the package {name!r} of sens cannot be imported: {found}; "
                "run `sens` from another folder, or rename that one"
            )
    return None


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Signals wait until the end: an extension module whose import is broken off can crash the interpreter."""
    came: list[int] = []
    main_thread = threading.current_thread() is threading.main_thread()
    if not main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    ours = (signal.SIGINT, signal.SIGTERM)
    held = {int(number): handler for number in ours if callable(handler := signal.getsignal(number))}
    for number in held:
        signal.signal(number, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for number, handler in held.items():
            signal.signal(number, handler)
    if came:
        held[came[0]](came[0], None)


def _raise_lost_interrupt(lost: "sys.UnraisableHookArgs") -> None:
    """Ctrl-C that came inside a callback of the garbage collector is dropped by Python: it comes again, a bit later."""
    if issubclass(lost.exc_type, KeyboardInterrupt):
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.02)
    else:
        sys.__unraisablehook__(lost)


def _leave_stopped(continuing: bool, status: int) -> NoReturn:
    """End at once: a thread of XLA that still compiles a program would crash as the interpreter is taken down."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    then = "continues" if continuing else "starts from the beginning"
    print(f"sens: stopped; the same command {then}", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, AttributeError):  # closed, or not there
            stream.flush()
    os._exit(status)


def run_and_exit() -> NoReturn:
    """Entry point of the console command."""
    sys.unraisablehook = _raise_lost_interrupt
    continuing = len(sys.argv) > 1 and sys.argv[1] in CONTINUING
    terminated = []

    def terminate(signum: int, _frame: object) -> None:
        terminated.append(signum)
        raise KeyboardInterrupt

    if continuing:
        signal.signal(signal.SIGTERM, terminate)
    try:
        status = main()
    except KeyboardInterrupt:
        _leave_stopped(continuing, EXIT_CONTINUE if terminated else EXIT_STOPPED)
    processes = sys.modules.get("train.processes")  # there if a command that trains was run
    if processes is not None and processes.several() and status not in (0, EXIT_CONTINUE):
        processes.leave(status)
    sys.exit(status)


if __name__ == "__main__":
    run_and_exit()
