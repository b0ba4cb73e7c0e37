"""TensorBoard events of a run, if they are wanted."""

from pathlib import Path
from typing import Any


class _NoEvents:
    def write(self, table: str, rows: list[dict[str, Any]]) -> None:
        """Nothing was asked for."""

    def close(self) -> None:
        """Nothing is open."""


class _TensorBoard:
    """The record as TensorBoard scalars: updates, per-layer figures, and of attention the medians over pooled heads."""

    def __init__(self, directory: Path, first: int):
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(directory), purge_step=first)

    def write(self, table: str, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            if table == "attention":
                values = {row["quantity"]: row["median"]} if row["head"] is None else {}
            else:
                places = ("update", "layer", "sublayer")
                values = {k: v for k, v in row.items() if k not in places and isinstance(v, int | float)}
            place = next((f"{name}-{row[name]}" for name in ("layer", "sublayer") if name in row), "")
            for name, value in values.items():
                self._writer.add_scalar("/".join(part for part in (table, name, place) if part), value, row["update"])

    def close(self) -> None:
        self._writer.close()


def open_events(directory: Path | None, first: int) -> _NoEvents | _TensorBoard:
    """Where the tables are also written: events in a directory, those from update `first` on anew, or nowhere."""
    return _NoEvents() if directory is None else _TensorBoard(directory, first)
