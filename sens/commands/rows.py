"""Commands on attention rows: verify, theta, inspect."""

import contextlib
import dataclasses
import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from sens.commands import UsageError, check_directory, check_writable, parse


def verify(arguments: Sequence[str]) -> None:
    """`sens verify`."""

    @dataclasses.dataclass(frozen=True)
    class Verify:
        """Check ||J_tau(u)||_{inf->1} = theta(p)/tau: all sign vectors on the left, all subsets on the right."""

        lengths: tuple[int, ...] = (8, 16)
        """Row lengths, up to 20: the work doubles with each."""
        rows: int = 500
        """Random logit rows for each length."""
        seed: int = 0
        """Of the logits."""
        out: Path = Path("verify.json")
        """Where the numbers go."""

    options = parse(Verify, "verify", arguments)
    from analysis.identity import verify as run

    if not options.lengths or not all(2 <= length <= 20 for length in options.lengths):
        raise UsageError(f"lengths must be from 2 to 20, got {' '.join(map(str, options.lengths)) or 'none'}")
    if options.rows < 1:
        raise UsageError(f"rows must be at least 1, got {options.rows}")
    if options.out.is_dir():
        raise UsageError(f"--out {options.out}: is a directory; a file's name is wanted")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    check_writable(options.out, options.out.parent)
    run(options.out, options.lengths, options.rows, options.seed, show=print)


def theta(arguments: Sequence[str]) -> None:
    """`sens theta`."""
    import tyro

    @dataclasses.dataclass(frozen=True)
    class Theta:
        """Theta of every probability row in a file, from both sides: quantiles over the rows of each layer and head.

        The table, and --out in full, have a line for each index of the leading axes but the last. The values of single
        rows are what `analysis.rows.thetas_of_file` yields in Python.

        Of a parquet file every column of lists is read, a row a list, other columns ignored; without such a column,
        floating columns alone, side by side. Lists may differ in length: a shorter one's support is shorter.
        """

        file: Annotated[Path, tyro.conf.Positional]
        """.npy, .npz or .parquet; rows along the last axis, any leading axes (layer, head, query)."""
        where: Path | None = None
        """A file of boolean arrays, False outside a row's support, matched by array name (a lone array: any name)."""
        array: tuple[str, ...] = ()
        """Arrays of an npz, or columns of a parquet file, that are to be measured, if not all."""
        tol: float = 1e-6
        """Width at which a bracket is narrow enough."""
        out: Path | None = None
        """Write the quantiles of all quantities there, as parquet."""

    options = parse(Theta, "theta", arguments)
    import polars as pl

    from analysis import rows, tables
    from analysis.rows_table import theta_table
    from train import progress

    if not options.tol > 0:
        raise UsageError(f"tol must be positive, got {options.tol}")
    if options.out is not None:
        _check_out(options.out, (options.file, options.where))
    elif sys.stdout is None:  # closed by the caller
        raise UsageError("standard output is closed and there is no --out: the result would be lost")
    with progress.counting(str(options.file)) as done:
        found = rows.thetas_of_file(
            options.file,
            options.where,
            options.tol,
            lambda _name, finished, total: done(finished, total),
            options.array,
        )
        with contextlib.closing(found):  # what it unpacked is removed however this ends
            summaries = [rows.summary(array) for array in found]
    tables.show([theta_table(summaries)])
    if options.out is not None:
        temporary = options.out.with_name(options.out.name + ".tmp")
        pl.concat(summaries).write_parquet(temporary)
        temporary.replace(options.out)
        print(f"wrote {options.out}")


def _check_out(out: Path, inputs: Sequence[Path | None]) -> None:
    """Refuse, before any work, a place where the statistics cannot be written or would replace what is read."""
    if out.suffix != ".parquet" or out.is_dir():
        what = "is a directory" if out.is_dir() else "is no parquet file's name"
        raise UsageError(f"--out {out}: {what}; a file name ending in .parquet is wanted")
    for path in inputs:
        if path is not None and out.exists() and path.exists() and out.samefile(path):
            raise UsageError(f"--out {out}: that is the input {path}; another file is wanted")
    if not out.parent.is_dir():
        raise UsageError(f"--out {out}: no directory {out.parent}; one that exists is wanted")
    check_writable(out, out.parent)


def inspect(arguments: Sequence[str]) -> None:
    """`sens inspect`."""
    import tyro

    @dataclasses.dataclass(frozen=True)
    class Inspect:
        """A published model on a text: theta, largest entry, entropy, sink mass of every attention row.

        With --bounds also Lambda of its attention, with --depth the Jacobian profile through depth.
        """

        model: Annotated[Path, tyro.conf.Positional]
        """A directory in the hub's layout (config.json, safetensors), a .gguf file, or glassllm's .npz."""
        text: Annotated[Path, tyro.conf.arg(help_behavior_hint="(required)")]
        """The text: a file, or - for standard input."""
        out: Path = Path("inspect")
        """Where inspect.parquet and report.html go."""
        length: int | None = None
        """Tokens in a sequence; by default 512, or the model's positions if they are fewer."""
        sequences: int = 1
        """Sequences to measure, from the text's start."""
        tau: float = 1.0
        """Factor on the model's softmax temperature."""
        tokenizer: Path | None = None
        """A tokenizer's file or directory, instead of the model's own."""
        head: tuple[int, int] | None = None
        """Layer and head whose theta shades the text; by default the one with the most dominated rows."""
        rows: bool = False
        """Also write rows.parquet: a line an attention row."""
        bounds: bool = False
        """Also measure Lambda of some layers' attention, from both sides, and its bounds: a minute or two a layer."""
        bounds_layers: tuple[int, ...] | None = None
        """With --bounds: the layers to measure; by default 0, N/4, N/2, 3N/4 and N-1."""
        bounds_length: int = 32
        """With --bounds: tokens of the text to measure on; time grows with the square."""
        depth: bool = False
        """Also measure the products of Jacobians from every depth to the output; every block is read again."""
        compare: Path | None = None
        """Another model, set beside the first."""
        compare_tau: float | None = None
        """Factor on the temperature of that other model, or of the same one."""

    options = parse(Inspect, "inspect", arguments)
    from analysis import inspect_report
    from analysis.inspect import prepare, read_text
    from models.pretrained import open_model
    from train import progress

    if not options.bounds and options.bounds_layers is not None:
        raise UsageError("--bounds-layers is about --bounds")
    if options.bounds_layers == ():
        raise UsageError("bounds-layers must name at least one layer")
    for name in ("length", "sequences", "tau", "compare_tau", "bounds_length"):
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            raise UsageError(f"{name.replace('_', '-')} must be positive, got {value}")
    check_directory(options.out)
    text = read_text(options.text)
    pairs = [(options.model, options.tau)]
    if options.compare is not None or options.compare_tau is not None:
        pairs.append((options.compare or options.model, options.compare_tau or options.tau))
    ready = []
    for path, tau in pairs:
        inspect_report.check_head(str(path), open_model(path).config, options.head)
        ready.append(
            prepare(
                path,
                text,
                tokenizer=options.tokenizer,
                length=options.length,
                sequences=options.sequences,
                tau=tau,
                bounds_layers=options.bounds_layers if options.bounds else (),
                bounds_length=options.bounds_length,
                depth=options.depth,
            )
        )
    found = []
    for (path, _), measure in zip(pairs, ready, strict=True):
        with progress.counting(str(path)) as done:
            found.append(measure(progress=done))
    if len(found) > 1 and found[0].name == found[1].name:  # two directories of one name
        found[1] = dataclasses.replace(found[1], name=f"{found[1].name} (2)")
    command = "sens inspect " + shlex.join(arguments)
    out = inspect_report.write(options.out, found, command=command, head=options.head, rows=options.rows)
    inspect_report.show(found)
    print(f"wrote {out / 'report.html'}")
