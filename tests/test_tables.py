"""Table 1 against figures worked out from the record by other means, and both renderings of it."""

import io
import json
import statistics

import pytest
import rich.console

from analysis import records, tables
from analysis.records import RecordError
from analysis.tables import Table, run_table, summarise, table_1, to_markdown, to_rich
from tests.recorded import write_run


def column(table: Table, name: str) -> dict[str, str]:
    index = table.columns.index(name)
    return {row[0]: row[index] for row in table.rows}


@pytest.fixture
def six(tmp_path):
    for placement in ("pre", "post"):
        for seed in (42, 123, 456):
            write_run(tmp_path / f"{placement}-{seed}", placement, seed)
    return records.read_runs(list(tmp_path.iterdir()))


def lines(run, table):
    return [json.loads(line) for line in (run.path / f"{table}.jsonl").read_text().splitlines()]


def test_summary_from_the_raw_lines(six):
    for run in six:
        one, updates, attention = summarise(run), lines(run, "updates"), lines(run, "attention")
        last = [row for row in attention if row["head"] is None and row["update"] == 60]
        first = [row for row in attention if row["head"] is None and row["update"] == 1]
        prefix = [row for row in last if row["quantity"] == "prefix"]

        def mean(rows, quantity):
            return statistics.fmean(row["mean"] for row in rows if row["quantity"] == quantity)

        assert one.final_loss == pytest.approx(statistics.fmean(row["loss"] for row in updates[10:]), rel=1e-12)
        assert one.largest_norm == max(row["grad_norm"] for row in updates)
        assert one.certificate == pytest.approx(statistics.fmean(row["median"] for row in prefix), rel=1e-12)
        assert one.entropy == pytest.approx((mean(first, "entropy"), mean(last, "entropy")), rel=1e-12)
        assert one.p_max == pytest.approx((mean(first, "p_max"), mean(last, "p_max")), rel=1e-12)
        assert one.envelope == (min(row["p5"] for row in prefix), max(row["p95"] for row in prefix))
        blocks = [row["grad_norm"] for row in lines(run, "layers") if row["update"] == 60]
        assert one.block_norms == blocks
        assert len(blocks) == 4


def test_certificate_is_over_tau(tmp_path):
    path = write_run(tmp_path / "run")
    at_one = summarise(records.read_run(path)).certificate
    assert at_one is not None
    config = records.read_config(path)
    config["model"]["tau"] = 2.0
    records.write_json(path / "config.json", config)
    assert summarise(records.read_run(path)).certificate == pytest.approx(at_one / 2)


def test_table_1_is_ours_beside_the_paper(six):
    table = table_1(six)
    assert table.columns == ("", "pre-LN, ours", "pre-LN, paper", "post-LN, ours", "post-LN, paper")
    assert "seeds 42, 123, 456" in table.title
    for placement in ("pre", "post"):
        losses = [summarise(run).final_loss for run in six if run.placement == placement]
        ours, paper = column(table, f"{placement}-LN, ours"), column(table, f"{placement}-LN, paper")
        cell = ours["mean loss, last 50 updates"]
        assert cell.startswith(f"{sum(losses) / 3:.3f} ± {statistics.stdev(losses):.3f}")
        assert all(f"{loss:.3f}" in cell for loss in losses)
        assert paper == {name: figures[placement] for name, figures in tables.PAPER.items()}
    assert column(table, "pre-LN, paper")["spike updates"] == "9.0 ± 1.0"
    assert column(table, "post-LN, paper")["largest pre-clip norm"] == "112"


def test_one_seed_has_no_deviation(tmp_path):
    table = table_1([records.read_run(write_run(tmp_path / "run"))])
    ours = column(table, "pre-LN, ours")
    assert table.columns == ("", "pre-LN, ours", "pre-LN, paper")
    assert not any("±" in cell for cell in ours.values())
    assert ours["mean loss, last 50 updates"].endswith("(n = 1)")


def test_sample_deviation():
    assert tables.spread([1.0, 2.0, 3.0, 6.0], "{:.3f}") == "3.000 ± 2.160 (1.000, 2.000, 3.000, 6.000)"


def test_profile_of_shallow_models(tmp_path):
    one = records.read_run(write_run(tmp_path / "one", n_layer=1))
    two = records.read_run(write_run(tmp_path / "two", n_layer=2))
    cells = [column(table_1([run]), "pre-LN, ours")["block gradient norms, last"] for run in (one, two)]
    assert cells[0].startswith("first")
    assert "last" not in cells[0]
    assert "last" in cells[1]
    assert "between" not in cells[1]


def test_not_recorded_is_said(tmp_path):
    path = write_run(tmp_path / "run", updates=3, planned=60)
    for table in ("attention", "layers"):
        (path / f"{table}.jsonl").unlink()
    run = records.read_run(path)
    ours = column(table_1([run]), "pre-LN, ours")
    assert ours["normalised entropy, first → last"] == "not recorded"
    assert ours["block gradient norms, last"] == "not recorded"
    assert column(run_table([run]), "updates")["pre-LN, seed 42"] == "3 of 60"


def test_empty_record_is_refused(tmp_path):
    path = write_run(tmp_path / "fresh", updates=1)
    (path / "updates.jsonl").write_text("")
    with pytest.raises(RecordError, match=r"fresh: no update is recorded yet"):
        table_1([records.read_run(path)])


def test_mixtures_are_refused(tmp_path):
    a, b = write_run(tmp_path / "a", seed=1), write_run(tmp_path / "b", seed=1)
    deeper = write_run(tmp_path / "deeper", seed=2, n_layer=6)
    with pytest.raises(RecordError, match="want one of each"):
        table_1(records.read_runs([a, b]))
    with pytest.raises(RecordError, match=r"more than the seed differs: model\.n_layer"):
        table_1(records.read_runs([a, deeper]))


def test_foreign_directories_are_refused(tmp_path):
    with pytest.raises(RecordError, match="no such run directory"):
        records.read_runs([tmp_path / "nowhere"])
    with pytest.raises(RecordError, match="not a run directory"):
        records.read_runs([tmp_path])


def test_differences_names_fields_one_side_lacks():
    assert tables.differences({"a": {"b": 1, "c": None}}, {"a": {"b": 1}}) == {"a.c"}


def test_both_renderings_hold_every_cell(six):
    table = table_1(six)
    text = to_markdown(table)
    assert len(text.splitlines()) == 2 + 2 + len(table.rows)
    for line, row in zip(text.splitlines()[4:], table.rows, strict=True):
        assert [cell.strip() for cell in line.strip("|").split(" | ")] == list(row)
    output = io.StringIO()
    rich.console.Console(file=output, width=400).print(to_rich(table))
    assert all(cell in output.getvalue() for row in table.rows for cell in row)


def test_rich_reads_no_markup():
    output = io.StringIO()
    rich.console.Console(file=output, width=80).print(to_rich(Table("T", ("a",), (("[red]x[/red]",),))))
    assert "[red]x[/red]" in output.getvalue()


def test_a_narrow_terminal_cuts_no_digit():
    output = io.StringIO()
    table = Table("T", ("a", "b"), (("1.2345678901234567", "2.3456789012345678"),))
    rich.console.Console(file=output, width=24).print(to_rich(table))
    assert "…" not in output.getvalue()
    assert sum(map(output.getvalue().count, "0123456789")) == 34


def test_ragged_table_is_refused():
    with pytest.raises(ValueError, match="2 columns"):
        Table("T", ("a", "b"), (("1",),))


def test_records_read_by_pandas_too(six):
    pandas = pytest.importorskip("pandas")
    frame = pandas.read_json(six[0].path / "updates.jsonl", lines=True)
    assert frame["loss"].tolist() == pytest.approx(six[0].updates["loss"].to_list(), rel=1e-12)
