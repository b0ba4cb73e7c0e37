"""`verify.json`: the identity of theory.md, section 2, checked exhaustively and written down."""

from collections.abc import Callable, Sequence
from pathlib import Path

import sens
from analysis.records import RecordError, write_json

TOLERANCE = 1e-13
"""Largest relative error that counts as equality in float64."""


def verify(
    out: Path, lengths: Sequence[int] = (8, 16), rows: int = 500, seed: int = 0, *, show: Callable[[str], None]
) -> None:
    """Check both sides at every length, show the worst relative error of each, and write all numbers to `out`.

    Raises `RecordError` if an error reaches `TOLERANCE`; the numbers are written all the same.
    """
    checks = []
    for length in lengths:
        check = sens.verify_identity(length, rows, seed=seed)
        show(f"L = {length:2d}: {rows} rows, worst relative error {check.worst:.2e}")
        checks.append(
            {
                "length": length,
                "rows": rows,
                "norm": check.norm.tolist(),
                "theta_over_tau": check.theta.tolist(),
                "relative_error": check.relative_error.tolist(),
                "worst": check.worst,
            }
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    write_json(out, {"tolerance": TOLERANCE, "checks": checks})
    worst = max(check["worst"] for check in checks)
    if not worst < TOLERANCE:
        raise RecordError(f"{out}: the two sides differ by {worst:.2e}, more than {TOLERANCE:.0e}")
