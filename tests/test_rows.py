"""Real files of every kind, read in chunks, give what the library gives on the array."""

import jax
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import sens
from analysis import rows
from analysis.rows import RowsError, summary, thetas_of_file


@pytest.fixture
def p(rng) -> np.ndarray:
    u = rng.standard_normal((2, 3, 7, 12))
    e = np.exp(3 * u - (3 * u).max(-1, keepdims=True))
    return (e / e.sum(-1, keepdims=True)).astype(np.float32)


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(rows, "CHUNK", 12 * 5)  # five rows, which does not divide 42


def assert_same(result, p, where=None):
    expected = jax.jit(sens.theta_bracket)(p, where)
    np.testing.assert_array_equal(result.lower, expected.lower)
    np.testing.assert_array_equal(result.upper, expected.upper)
    assert result.lower.shape == p.shape[:-1]


def test_npy(tmp_path, p, small_chunks):
    np.save(tmp_path / "a.npy", p)
    seen = []
    (result,) = thetas_of_file(tmp_path / "a.npy", progress=lambda *step: seen.append(step))
    assert_same(result, p)
    np.testing.assert_allclose(result.prefix, sens.theta_prefix(p), atol=1e-6)
    np.testing.assert_allclose(result.p_max, p.max(-1), rtol=1e-6)
    assert seen[0] == ("a", 5, 42)
    assert seen[-1] == ("a", 42, 42)


def test_one_row_and_other_dtypes(tmp_path, p):
    np.save(tmp_path / "a.npy", p[0, 0, 0])
    (result,) = thetas_of_file(tmp_path / "a.npy")
    assert result.lower.shape == ()
    half = np.full((3, 8), 0.125, np.float16)
    np.save(tmp_path / "a.npy", half)
    (result,) = thetas_of_file(tmp_path / "a.npy")
    np.testing.assert_array_equal(result.upper, 1)
    np.save(
        tmp_path / "a.npy", np.asfortranarray(p[0, 0].astype(np.float64)) / p[0, 0].sum(-1, keepdims=True, dtype=float)
    )
    (result,) = thetas_of_file(tmp_path / "a.npy", tol=1e-12)
    assert result.lower.dtype == np.float64


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_with_masks(tmp_path, p, rng, save):
    where = np.tril(np.ones((7, 12), bool), 5)
    masked = np.where(where, p, 0) / np.where(where, p, 0).sum(-1, keepdims=True)
    save(tmp_path / "a.npz", layer0=masked, layer1=p[0])
    save(tmp_path / "mask.npz", layer0=where, layer1=np.ones(12, bool))
    first, second = thetas_of_file(tmp_path / "a.npz", tmp_path / "mask.npz")
    assert (first.name, second.name) == ("layer0", "layer1")
    assert_same(first, masked, where)
    assert_same(second, p[0])


def test_parquet_of_lists(tmp_path, p):
    flat = p.reshape(42, 12)
    lists = [row / row.sum() for row in (r[: 1 + i % 12] for i, r in enumerate(flat))]
    pq.write_table(pa.table({"p": pa.array(lists, pa.list_(pa.float32())), "note": ["x"] * 42}), tmp_path / "a.parquet")
    (result,) = thetas_of_file(tmp_path / "a.parquet")
    assert result.name == "p"
    padded = np.stack([np.pad(row, (0, 12 - len(row))) for row in lists]).astype(np.float32)
    assert_same(result, padded)


def test_parquet_of_columns(tmp_path, p):
    flat = p.reshape(42, 12)
    pq.write_table(pa.table({f"p{i}": flat[:, i] for i in range(12)}), tmp_path / "a.parquet")
    (result,) = thetas_of_file(tmp_path / "a.parquet")
    assert_same(result, flat)


def test_summary(tmp_path, p):
    np.save(tmp_path / "a.npy", p)
    (result,) = thetas_of_file(tmp_path / "a.npy")
    table = summary(result)
    assert len(table) == 2 * 3 * len(rows.QUANTITIES)
    line = table.filter((table["index"] == "[1, 2]") & (table["quantity"] == "lower")).row(0, named=True)
    assert line["count"] == 7
    assert line["median"] == pytest.approx(np.median(result.lower[1, 2]))
    assert line["max"] == pytest.approx(result.lower[1, 2].max())


def test_bad_rows_are_named(tmp_path, p, small_chunks):
    p[1, 2, 3, 4] = -0.25
    np.save(tmp_path / "a.npy", p)
    with pytest.raises(RowsError, match=r"a.npy: array 'a': p\[1, 2, 3, 4\] = -0.25"):
        list(thetas_of_file(tmp_path / "a.npy"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.npy", b"", r"cannot be read as npy \(it is empty;"),
        ("a.npy", b"\x80\x04K\x01.", "cannot be read as npy"),
        ("a.npy", b"0.5 0.5", r"cannot be read as npy \(it begins with b'0\.5 0\.'; an npy file begins with"),
        ("a.npy", b"PAR1", r"it begins with b'PAR1'; an npy file"),
        ("a.npz", b"PK\x05\x06" + bytes(18), "a.npz: has no arrays; at least one is wanted"),
        ("a.npz", b"PK nonsense", "cannot be read as npz"),
        ("a.parquet", b"PAR1", "cannot be read as parquet"),
        ("a.csv", b"0.5,0.5", "a .npy, .npz or .parquet file is wanted"),
    ],
)
def test_files_that_are_not_rows(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RowsError, match=message):
        list(thetas_of_file(tmp_path / name))


def test_arrays_that_are_not_rows(tmp_path, p):
    with pytest.raises(RowsError, match="no such file"):
        list(thetas_of_file(tmp_path / "none.npy"))
    (tmp_path / "folder.npy").mkdir()
    with pytest.raises(RowsError, match=r"folder.npy: is a directory; a .npy"):
        list(thetas_of_file(tmp_path / "folder.npy"))
    np.save(tmp_path / "a.npy", np.arange(4))
    with pytest.raises(RowsError, match="array 'a' is int"):
        list(thetas_of_file(tmp_path / "a.npy"))
    np.save(tmp_path / "a.npy", np.array([{}], object), allow_pickle=True)
    with pytest.raises(RowsError, match=r"cannot be read as npy \(its entries are Python objects; numbers are wanted"):
        list(thetas_of_file(tmp_path / "a.npy"))
    np.save(tmp_path / "a.npy", p)
    np.save(tmp_path / "m.npy", np.ones(5, bool))
    with pytest.raises(RowsError, match=r"m.npy: shape \(5,\) does not broadcast"):
        list(thetas_of_file(tmp_path / "a.npy", tmp_path / "m.npy"))
    np.save(tmp_path / "m.npy", np.ones(12))
    with pytest.raises(RowsError, match="bool is wanted"):
        list(thetas_of_file(tmp_path / "a.npy", tmp_path / "m.npy"))
    np.savez(tmp_path / "m.npz", x=np.ones(12, bool), y=np.ones(12, bool))
    with pytest.raises(RowsError, match="has no array 'a'"):
        list(thetas_of_file(tmp_path / "a.npy", tmp_path / "m.npz"))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((0, 5), r"of shape \(0, 5\): it has no rows; at least one is wanted"),
        ((2, 0, 5), r"of shape \(2, 0, 5\): it has no rows"),
        ((5, 0), r"of shape \(5, 0\): its rows have no entries; at least one is wanted"),
        ((), r"of shape \(\): a single number; at least one axis"),
    ],
)
def test_arrays_without_rows(tmp_path, shape, message):
    np.save(tmp_path / "a.npy", np.ones(shape, np.float32))
    with pytest.raises(RowsError, match=f"a.npy: array 'a' is float32 {message}"):
        list(thetas_of_file(tmp_path / "a.npy"))


def test_npy_of_another_size_than_its_header_says(tmp_path, p):
    np.save(tmp_path / "a.npy", p[0, 0])
    whole = (tmp_path / "a.npy").read_bytes()
    for content, held in ((whole + b"more", 340), (whole[:-4], 332)):
        (tmp_path / "a.npy").write_bytes(content)
        with pytest.raises(RowsError, match=rf"{held} bytes of data, but float32 of shape \(7, 12\) takes 336"):
            list(thetas_of_file(tmp_path / "a.npy"))


def test_arrays_are_chosen_by_name(tmp_path, p):
    a = p.reshape(42, 12)
    b = a[::-1]
    np.savez(tmp_path / "a.npz", ids=np.arange(7), b=b, a=a)
    with pytest.raises(RowsError, match=r"array 'ids' is int64 of shape \(7,\): floating rows .* \(--array names"):
        next(thetas_of_file(tmp_path / "a.npz", progress=lambda *_: pytest.fail("worked first")))
    first, second = thetas_of_file(tmp_path / "a.npz", names=("a", "b"))
    assert (first.name, second.name) == ("a", "b")
    assert_same(first, a)
    assert_same(second, b)
    with pytest.raises(RowsError, match=r"has no array 'c' \(it has 'ids', 'b', 'a'\)"):
        list(thetas_of_file(tmp_path / "a.npz", names=("a", "c")))
    plain = {f"c{i}": b[:, i] for i in range(12)}
    pq.write_table(pa.table({"p": list(a), "ids": [[1]] * 42, **plain}), tmp_path / "a.parquet")
    (result,) = thetas_of_file(tmp_path / "a.parquet", names=("p",))
    assert_same(result, a)
    (result,) = thetas_of_file(tmp_path / "a.parquet", names=list(plain))
    assert_same(result, b)


def test_masks_go_by_name(tmp_path, p):
    np.savez(tmp_path / "a.npz", a=p[0], b=p[1])
    np.savez(tmp_path / "m.npz", a=np.ones(12, bool))
    with pytest.raises(RowsError, match=r"m.npz: has no array 'b' \(it has 'a'\); masks go by the arrays' names"):
        list(thetas_of_file(tmp_path / "a.npz", tmp_path / "m.npz"))
    np.savez(tmp_path / "m.npz", any=np.ones(12, bool))
    first, second = thetas_of_file(tmp_path / "a.npz", tmp_path / "m.npz")
    assert_same(first, p[0])
    assert_same(second, p[1])


HALVES = [0.5, 0.5]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"p": pa.array([], pa.list_(pa.float32()))}, r"array 'p' is float32 of shape \(0, 0\): it has no rows"),
        ({"p": [HALVES, None]}, "column 'p', row 1: null; a list of numbers is wanted"),
        ({"p": [HALVES, []]}, "column 'p', row 1: an empty list; a list of numbers is wanted"),
        ({"p": [HALVES, [1.0], [0.5, 0.25, None]]}, "column 'p', row 2, entry 2: null; a number is wanted"),
        ({"p": [HALVES, [None, 1.0]]}, "column 'p', row 1, entry 0: null"),
        ({"p": pa.array([HALVES, None], pa.list_(pa.float32(), 2))}, "column 'p', row 1: null"),
        ({"p": [[HALVES]]}, r"column 'p' is list<.*list<.*double>>; lists of floating numbers are wanted"),
        ({"p": [HALVES], "ids": [[1, 2]]}, r"column 'ids' is list<.*int64>; lists of floating numbers are wanted"),
        ({"p": HALVES, "q": [0.5, None]}, "column 'q', row 1: null; a number is wanted"),
        ({"p": HALVES, "id": [1, 2]}, "column 'id' is int64; columns of lists, or else floating columns alone"),
        ({}, "has no arrays; at least one is wanted"),
    ],
)
def test_parquet_files_that_are_not_rows(tmp_path, columns, message):
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    with pytest.raises(RowsError, match=rf"a.parquet: {message}"):
        list(thetas_of_file(tmp_path / "a.parquet"))


def test_parquet_nulls_beyond_the_first_batch(tmp_path):
    pq.write_table(pa.table({"p": [HALVES] * 5000 + [[None]]}), tmp_path / "a.parquet")
    with pytest.raises(RowsError, match="column 'p', row 5000, entry 0: null"):
        list(thetas_of_file(tmp_path / "a.parquet"))


def test_parquet_as_polars_writes_it(tmp_path, p):
    lists = [row.tolist() for row in p.reshape(42, 12)]
    pl.DataFrame({"p": pl.Series(lists, dtype=pl.List(pl.Float32))}).write_parquet(tmp_path / "a.parquet")
    (result,) = thetas_of_file(tmp_path / "a.parquet")
    assert_same(result, p.reshape(42, 12))
