"""The commands behind `sens`, one function each: what they share. Everything heavy is imported when a command runs."""

import contextlib
import io
from collections.abc import Sequence
from typing import Any


class UsageError(ValueError):
    """Arguments that do not fit; the message is shown as it is."""


def parse(kind: type, command: str, arguments: Sequence[str], default: Any = None) -> Any:
    """Options of a command from its dataclass; what is refused is a `UsageError` of one line."""
    import tyro

    keywords = {} if default is None else {"default": default}
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(
                kind, prog=f"sens {command}", args=list(arguments), config=(tyro.conf.OmitArgPrefixes,), **keywords
            )
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        # A title, a rule across, what is wrong, another rule; in a box where the terminal knows such characters.
        rows = [row.strip("│ ") for row in complaint.getvalue().splitlines()]
        rules = [place for place, row in enumerate(rows) if row.startswith("╭") or not row.strip("─-")]
        message = " ".join(rows[rules[0] + 1 : rules[1]]).removeprefix("Error parsing ")
        raise UsageError(f"{message}; see sens {command} --help") from stop


def preset_named(arguments: Sequence[str], command: str, fallback: str) -> tuple[Any, str]:
    """The preset named in the arguments: its values are the defaults that the real parser shows and overrides."""
    from train.presets import PRESETS

    name = fallback
    for position, argument in enumerate(arguments):
        if argument == "--preset" and position + 1 < len(arguments):
            name = arguments[position + 1]
        elif argument.startswith("--preset="):
            name = argument.removeprefix("--preset=")
    if name not in PRESETS:
        raise UsageError(f"no preset {name!r} (want one of {', '.join(PRESETS)})")
    return PRESETS[name], name
