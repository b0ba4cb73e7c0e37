"""How far is the prefix certificate from the truth, on rows of trained models? The tables of docs/theta.md.

    sens probe RUN                                    (writes RUN/probe/rows.parquet)
    sens inspect MODEL --text FILE --rows --out DIR   (writes DIR/rows.parquet)
    python benchmarks/certificates.py ROWS.parquet [ROWS.parquet ...]

Prints, pooled over the files, one line a bin of `p_max` and one line a layer: how many rows, the share whose bracket is
closed to 1e-6, the share whose prefix certificate is short of the proved lower end by more than 1e-3 and 1e-2, and the
median and largest shortfall.
"""

import itertools
import sys

import numpy as np
import polars as pl

from analysis.tables import Table, to_markdown

EDGES = (0.05, 0.1, 0.2, 1 / 3, 0.5, 2 / 3)


def shortfalls(rows: pl.DataFrame, by: str) -> Table:
    """One line a value of column `by`."""
    columns = ("rows", "closed to 1e-6", "short by > 1e-3", "> 1e-2", "median shortfall", "largest")
    lines = []
    for (value,), part in rows.sort(by).group_by([by], maintain_order=True):
        short = (part["lower"] - part["prefix"]).clip(0).to_numpy()
        width = (part["upper"] - part["lower"]).to_numpy()
        shares = (np.mean(width <= 1e-6), np.mean(short > 1e-3), np.mean(short > 1e-2))
        ends = (np.median(short), short.max())
        cells = (*(f"{100 * share:.2f} %" for share in shares), *(f"{end:.1e}" for end in ends))
        lines.append((str(value), str(part.height), *cells))
    return Table(
        f"Prefix certificate against the bracket, by {'p_max' if by == 'bin' else by}",
        ("p_max" if by == "bin" else by, *columns),
        tuple(lines),
    )


def main(paths: list[str]) -> None:
    wanted = ["layer", "p_max", "prefix", "lower", "upper"]
    rows = pl.concat([pl.read_parquet(path, columns=wanted).cast({"layer": pl.Int64}) for path in paths])
    edges = [0.0, *EDGES, 1.0]
    rows = rows.with_columns(pl.lit("").alias("bin"))
    for low, high in itertools.pairwise(edges):
        inside = pl.col("p_max").is_between(low, high, closed="right")
        name = pl.lit(f"{low:.3f} to {high:.3f}")
        rows = rows.with_columns(pl.when(inside).then(name).otherwise(pl.col("bin")).alias("bin"))
    for by in ("bin", "layer"):
        print(to_markdown(shortfalls(rows, by)), end="\n\n")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1:])
