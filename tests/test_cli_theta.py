"""`sens theta` as its users meet it: what it refuses and when, what it prints, how it stops."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import sens.__main__ as cli
from analysis import identity, rows
from tests.trained import ROOT, finish, start


@pytest.fixture
def theta(run):
    """`sens theta`: status, output, error output."""
    return lambda *arguments: run("theta", *arguments)


@pytest.fixture
def complaint(complaint):
    """The words of the line with which `sens theta` must fail."""
    return lambda *arguments: complaint("theta", *arguments).removeprefix("sens: error: ").removesuffix("\n")


@pytest.fixture
def file(tmp_path) -> Path:
    """Two heads of three uniform rows."""
    np.save(tmp_path / "w.npy", np.full((2, 3, 4), 0.25, np.float32))
    return tmp_path / "w.npy"


@pytest.fixture
def no_work(monkeypatch):
    """Fail as soon as a row is measured."""
    monkeypatch.setattr(rows, "_measure", lambda *_: pytest.fail("worked before it looked at its arguments"))


# Where the statistics go.


def test_out_is_written_whole(theta, file):
    out = file.with_name("s.parquet")
    out.write_text("old")
    status, printed, _ = theta(file, "--out", out)
    assert status == 0
    assert printed.endswith(f"wrote {out}\n")
    table = pl.read_parquet(out)
    assert table["index"].unique().sort().to_list() == ["[0]", "[1]"]
    assert set(table["quantity"]) == set(rows.QUANTITIES)
    assert sorted(path.name for path in file.parent.iterdir()) == ["s.parquet", "w.npy"]


@pytest.mark.usefixtures("no_work")
def test_out_never_replaces_an_input(complaint, tmp_path):
    path, mask, link = (tmp_path / name for name in ("rows.parquet", "mask.parquet", "link.parquet"))
    pl.DataFrame({"p": [[0.5, 0.5]]}).write_parquet(path)
    pl.DataFrame({"p": [[True, True]]}).write_parquet(mask)
    os.link(path, link)
    before = path.read_bytes(), mask.read_bytes()
    for out in (path, tmp_path / "." / path.name, link):
        assert complaint(path, "--out", out) == f"--out {out}: that is the input {path}; another file is wanted"
    assert complaint(path, "--where", mask, "--out", mask).startswith(f"--out {mask}: that is the input {mask}")
    assert (path.read_bytes(), mask.read_bytes()) == before


@pytest.mark.usefixtures("no_work")
def test_out_is_looked_at_before_any_work(complaint, file, monkeypatch):
    folder, missing, other = file.parent / "d.parquet", file.parent / "none" / "s.parquet", file.parent / "s.csv"
    folder.mkdir()
    wanted = "a file name ending in .parquet is wanted"
    assert complaint(file, "--out", other) == f"--out {other}: is no parquet file's name; {wanted}"
    assert complaint(file, "--out", file).endswith(wanted)
    assert complaint(file, "--out", folder) == f"--out {folder}: is a directory; {wanted}"
    assert complaint(file, "--out", "") == f"--out .: is a directory; {wanted}"
    assert complaint(file, "--out", missing).startswith(f"--out {missing}: no directory {missing.parent};")
    assert complaint(file, "--out", file / "s.parquet").startswith(f"--out {file / 's.parquet'}: no directory {file};")
    monkeypatch.setattr(os, "access", lambda *_: False)
    kept = file.with_name("kept.parquet")
    kept.touch()
    assert "cannot be written (the file is read-only)" in complaint(file, "--out", kept)


@pytest.mark.usefixtures("no_work")
def test_out_where_nothing_can_be_created(complaint, file):
    if not Path("/proc/self").is_dir():
        pytest.skip("no /proc")
    assert "cannot be written (" in complaint(file, "--out", "/proc/s.parquet")


def test_verify_looks_at_its_out_too(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(identity, "verify", lambda *_, **__: pytest.fail("worked first"))
    (tmp_path / "file").touch()
    for out, what in (
        ("", "--out .: is a directory"),
        (tmp_path, "is a directory"),
        (tmp_path / "file" / "v.json", ""),
    ):
        assert cli.main(["verify", "--out", str(out)]) == 2
        err = capsys.readouterr().err
        assert what in err
        assert err.count("\n") == 1


# What is printed.


def test_a_table_that_is_no_terminals_is_not_wrapped(theta, tmp_path, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    long, rows_of_4 = "decoder.attention." + "x" * 100, np.full((6, 1, 4), 0.25, np.float32)
    np.savez(tmp_path / "w.npz", **{long: rows_of_4, "one": rows_of_4[:, 0]})
    status, printed, _ = theta(tmp_path / "w.npz")
    assert status == 0
    names = [line.split()[0] for line in printed.splitlines() if line.startswith("  ") and line.strip()]
    assert names == ["array", *(f"{long}[{i}]" for i in range(6)), "one"]


def test_arrays_are_chosen_by_name(theta, complaint, tmp_path):
    np.savez(tmp_path / "w.npz", w=np.full((6, 4), 0.25, np.float32), ids=np.arange(3))
    assert complaint(tmp_path / "w.npz").endswith("floating rows are wanted (--array names those to measure)")
    status, printed, _ = theta(tmp_path / "w.npz", "--array", "w")
    assert status == 0
    assert "  w  " in printed


@pytest.mark.usefixtures("no_work")
def test_a_result_that_would_go_nowhere_is_not_computed(file, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", None)
    assert cli.main(["theta", str(file)]) == 2
    assert "standard output is closed" in capsys.readouterr().err


# Ctrl-C.


def test_ctrl_c_ends_with_130_at_once(tmp_path):
    """A program is being compiled then: were the interpreter taken down, its thread would crash the process."""
    path = tmp_path / "w.npy"
    np.save(path, np.full((4096, 512), 1 / 512, np.float32))
    process = start("theta", path, more={"JAX_ENABLE_COMPILATION_CACHE": "0"})
    maps = Path(f"/proc/{process.pid}/maps")
    until = time.monotonic() + 120
    while maps.exists() and str(path) not in maps.read_text() and time.monotonic() < until:
        time.sleep(0.02)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    assert finish(process) == (130, "", "sens: stopped; the same command starts from the beginning\n")


def test_ctrl_c_while_packages_are_imported_waits_for_them():
    done = []

    def import_packages() -> None:
        with cli._undisturbed():
            signal.raise_signal(signal.SIGINT)
            done.append(True)

    with pytest.raises(KeyboardInterrupt):
        import_packages()
    assert done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("command", ["theta", "reproduce"])
def test_what_is_said_is_true_of_the_command(command, monkeypatch, capsys):
    def stopped() -> int:
        raise KeyboardInterrupt

    def leave(status: int) -> None:
        raise SystemExit(status)

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.setattr(cli.sys, "unraisablehook", cli.sys.unraisablehook)
    monkeypatch.setattr(cli, "main", stopped)
    monkeypatch.setattr(cli.os, "_exit", leave)
    monkeypatch.setattr(cli.sys, "argv", ["sens", command])
    try:
        with pytest.raises(SystemExit) as stop:
            cli.run_and_exit()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert stop.value.code == 130
    then = {"theta": "starts from the beginning", "reproduce": "continues"}[command]
    assert capsys.readouterr().err == f"sens: stopped; the same command {then}\n"


def test_ctrl_c_inside_a_callback_is_not_lost():
    """Python drops an exception raised in a finalizer; the interrupt comes again."""
    script = (
        "import sens.__main__ as cli, signal, time, weakref\n"
        "def main():\n"
        "    thing = type('Thing', (), {})()\n"
        "    kept = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGINT))\n"
        "    del thing\n"
        "    time.sleep(30)\n"
        "cli.main = main\n"
        "cli.run_and_exit()\n"
    )
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=25).returncode == 130
