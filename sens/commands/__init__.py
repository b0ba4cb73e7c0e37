"""The commands behind `sens`, one function each: what they share. Everything heavy is imported when a command runs."""

import contextlib
import dataclasses
import difflib
import io
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_type_hints


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


@contextlib.contextmanager
def fitting() -> Iterator[None]:
    """A configuration's `ValueError` as a `UsageError`."""
    try:
        yield
    except ValueError as error:
        raise UsageError(str(error)) from error


def check_directory(out: Path) -> None:
    """Refuse, before any work, a directory that cannot be made or written to; nothing is made yet."""
    there = next(path for path in (out, *out.absolute().parents) if path.exists())
    if not there.is_dir():
        raise UsageError(f"--out {out}: {there} is a file; a directory is wanted")
    check_writable(out, there)


def check_writable(out: Path, directory: Path) -> None:
    """Refuse, before any work, an output for which nothing can be created in the directory."""
    try:
        with tempfile.TemporaryFile(dir=directory):  # asks the file system itself: modes alone do not tell
            pass
        if out.is_file() and not os.access(out, os.W_OK):
            raise PermissionError(None, "the file is read-only")
    except OSError as error:
        raise UsageError(f"--out {out}: cannot be written ({error.strerror}); another place is wanted") from error


def preset_named(arguments: Sequence[str], command: str, fallback: str) -> tuple[Any, str]:
    """The preset named in the arguments: its values are the defaults that the real parser shows and overrides."""
    from train.presets import PRESETS, from_json

    name = fallback
    for position, argument in enumerate(arguments):
        if argument == "--preset" and position + 1 < len(arguments):
            name = arguments[position + 1]
        elif argument.startswith("--preset="):
            name = argument.removeprefix("--preset=")
    if name in PRESETS:
        return PRESETS[name], name
    if not name.endswith(".json"):
        raise UsageError(f"no preset {name!r} (want one of {', '.join(PRESETS)}, or a .json file)")
    try:
        return from_json(json.loads(Path(name).read_text(encoding="utf-8"))), name
    except OSError as error:
        raise UsageError(f"preset {name}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"preset {name}: {error}") from error


def with_settings(arguments: Sequence[str], *kinds: type) -> list[str]:
    """`--set field=value ...` in arguments replaced by the options of those fields: a value is read in one way."""
    fields = {field.name: get_type_hints(kind)[field.name] for kind in kinds for field in dataclasses.fields(kind)}
    given, settings, inside = [], [], False
    for argument in arguments:
        inside = argument == "--set" or (inside and not argument.startswith("--"))
        if argument.startswith("--set="):
            settings.append(argument.removeprefix("--set="))
        elif not inside:
            given.append(argument)
        elif argument != "--set":
            settings.append(argument)
    return given + [part for setting in settings for part in _option(setting, fields)]


def _option(setting: str, fields: dict[str, Any]) -> list[str]:
    name, equals, value = setting.partition("=")
    field = name.strip().replace("-", "_")
    if not equals:
        raise UsageError(f"--set {setting}: want field=value")
    if field not in fields:
        near = difflib.get_close_matches(field, fields, 1)
        raise UsageError(f"--set {setting}: no field {name!r}{f'; did you mean {near[0]}?' if near else ''}")
    option = field.replace("_", "-")
    if fields[field] is bool:
        if value not in ("true", "false"):
            raise UsageError(f"--set {setting}: {field} is true or false")
        return [f"--{option}" if value == "true" else f"--no-{option}"]
    if "tuple" in str(fields[field]):
        return [f"--{option}", *filter(None, value.split(","))]
    return [f"--{option}={value}"]
