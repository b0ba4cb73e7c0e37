"""The run record: appended, cut back, read whole; what is torn or foreign is told apart."""

import json

import polars as pl
import pytest

from analysis import records
from analysis.records import RecordError
from tests.recorded import write_run


def update_row(update: int, loss: float = 2.0):
    return {"update": update, "loss": loss, "grad_norm": 1.0, "learning_rate": 0.1, "tokens": 64 * update, "skipped": 0}


def layer_rows(update: int, layers: int = 3):
    columns = [name for name in records.LAYER_COLUMNS if name not in ("update", "layer")]
    return [{"update": update, "layer": layer, **dict.fromkeys(columns, 0.5)} for layer in range(layers)]


def test_rows_come_back_in_order_with_their_types(tmp_path):
    for update in (1, 2):
        records.append(tmp_path, "updates", [update_row(update, 2.5)])
        records.append(tmp_path, "layers", layer_rows(update))
    table = records.read_table(tmp_path, "updates")
    assert table.schema == pl.Schema(records.UPDATE_COLUMNS)
    assert table.rows(named=True) == [update_row(1, 2.5), update_row(2, 2.5)]
    assert records.read_table(tmp_path, "layers").rows(named=True) == [*layer_rows(1), *layer_rows(2)]


def test_a_row_of_other_columns_is_refused_and_nothing_of_its_batch_written(tmp_path):
    wrong = {**update_row(2), "colour": 1}
    with pytest.raises(RecordError, match="'updates' wants columns"):
        records.append(tmp_path, "updates", [update_row(1), wrong])
    lacking = {name: value for name, value in update_row(2).items() if name != "loss"}
    with pytest.raises(RecordError, match="'updates' wants columns"):
        records.append(tmp_path, "updates", [lacking])
    assert records.read_table(tmp_path, "updates").is_empty()


def test_a_number_that_is_not_finite_never_reaches_the_file(tmp_path):
    """JSON has none: the line would make the whole table unreadable."""
    with pytest.raises(ValueError, match="not JSON compliant"):
        records.append(tmp_path, "updates", [update_row(1), update_row(2, float("nan"))])
    assert records.read_table(tmp_path, "updates").is_empty()


@pytest.mark.parametrize("table", records.TABLES)
def test_a_table_without_lines_is_an_empty_frame_of_its_columns(tmp_path, table):
    assert records.read_table(tmp_path, table).schema == pl.Schema(records.TABLES[table])
    (tmp_path / f"{table}.jsonl").write_text('{"upd')
    assert records.read_table(tmp_path, table).is_empty()


def test_truncating_forgets_what_came_after_an_update(tmp_path):
    for update in range(1, 6):
        records.append(tmp_path, "updates", [update_row(update)])
        records.append(tmp_path, "layers", layer_rows(update))
    records.truncate(tmp_path, 3)
    assert records.read_table(tmp_path, "updates")["update"].to_list() == [1, 2, 3]
    assert records.read_table(tmp_path, "layers")["update"].to_list() == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert {path.name for path in tmp_path.iterdir()} == {"updates.jsonl", "layers.jsonl"}
    records.truncate(tmp_path, 0)
    assert records.read_table(tmp_path, "layers").is_empty()


def test_a_torn_last_line_is_not_there_yet_and_goes_with_the_next_truncation(tmp_path):
    records.append(tmp_path, "updates", [update_row(1), update_row(2)])
    path = tmp_path / "updates.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"update": 3, "loss"')
    assert records.read_table(tmp_path, "updates")["update"].to_list() == [1, 2]
    records.truncate(tmp_path, 9)
    assert path.read_bytes() == whole


def test_a_damaged_line_is_an_error_that_names_the_file(tmp_path):
    records.append(tmp_path, "updates", [update_row(1)])
    path = tmp_path / "updates.jsonl"
    path.write_bytes(b'{"update": oops}\n' + path.read_bytes())
    with pytest.raises(RecordError, match=r"updates.jsonl: a line is damaged"):
        records.read_table(tmp_path, "updates")
    with pytest.raises(RecordError, match=r"updates.jsonl, line 1: damaged"):
        records.truncate(tmp_path, 1)
    assert path.read_bytes().startswith(b'{"update": oops}\n')


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "config.json"
    records.write_json(path, {"a": 1})
    (tmp_path / "config.json.tmp").write_text("left by a kill")
    records.write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 2}
    with pytest.raises(TypeError):
        records.write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 2}


def test_what_is_no_run_is_named(tmp_path):
    with pytest.raises(RecordError, match="nowhere: no such run directory"):
        records.read_config(tmp_path / "nowhere")
    with pytest.raises(RecordError, match="not a run directory"):
        records.read_config(tmp_path)
    for content, message in (
        ("{", "not JSON"),
        ("[1]", "not the configuration"),
        ('{"model": {}}', "not the configuration"),
    ):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(RecordError, match=f"config.json: {message}"):
            records.read_config(tmp_path)


def test_runs_are_read_pre_first_then_by_seed(tmp_path):
    made = [("post", 42), ("pre", 123), ("post", 7), ("pre", 42)]
    paths = [write_run(tmp_path / f"{placement}-{seed}", placement, seed, updates=3) for placement, seed in made]
    runs = records.read_runs(paths)
    assert [run.label for run in runs] == ["pre-LN, seed 42", "pre-LN, seed 123", "post-LN, seed 7", "post-LN, seed 42"]
    assert runs[0].path == paths[3]
    assert runs[0].updates["update"].to_list() == [1, 2, 3]
