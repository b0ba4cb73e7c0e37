"""Strictness for every test: no implicit promotion of dtype or rank, warnings are errors, x64 as the leg says.

`make test` runs two legs: JAX_ENABLE_X64=1 over everything, JAX_ENABLE_X64=0 over the tests marked `float32`.
"""

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("JAX_ENABLE_X64", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis
import jax
import numpy as np
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_compilation_cache_dir", ".jax_cache")
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)

# A script's background job ignores Ctrl-C, and so would every process that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples every time: what fails after a change failed because of it.
hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None)
hypothesis.settings.load_profile("fixed")


@pytest.fixture(autouse=True, scope="module")
def room_for_programs() -> Iterator[None]:
    """A compiled program maps memory, of which Linux allows a process 65,530 pieces: many tests on, it would crash."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 15_000:
        jax.clear_caches()


@pytest.fixture
def rng() -> np.random.Generator:
    """A generator of its own for each test: the order of tests changes nothing."""
    return np.random.default_rng(20260218)


@pytest.fixture(params=[np.float32, np.float64], ids=["float32", "float64"])
def dtype(request) -> type:
    """Both supported dtypes; float64 only where x64 is on."""
    if request.param is np.float64 and not jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
        pytest.skip("x64 is off in this leg")
    return request.param


@pytest.fixture
def run(capsys):
    """Run a command in this process: status, output, error output."""

    def run(*arguments: object) -> tuple[int, str, str]:
        from sens.__main__ import main

        status = main([str(argument) for argument in arguments])
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def complaint(run):
    """Run a command that must fail with exit status 2 and one line; returns the line."""

    def complaint(*arguments: object) -> str:
        status, out, err = run(*arguments)
        assert status == 2, err
        assert out == ""
        assert err.startswith("sens: error: ")
        assert err.count("\n") == 1
        assert err.endswith("\n")
        return err

    return complaint


@pytest.fixture
def refused(complaint, tmp_path: Path) -> Callable[..., None]:
    """Train on a source that must be refused with a line that is its name and a message; nothing is made."""

    def refused(source: str, message: str, *arguments: str) -> None:
        out = tmp_path / "run"
        line = complaint("train", "--preset", "tiny", "--out", out, "--source", source, *arguments)
        assert re.fullmatch(f"sens: error: {re.escape(source)}{message}\n", line), line
        assert not out.exists()

    return refused


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """A small text file."""
    from tests.trained import write_corpus

    return write_corpus(tmp_path_factory.mktemp("text") / "corpus.txt")


@pytest.fixture
def numbers(tmp_path) -> Path:
    """A data set of 1000 byte tokens in several shards: 100 documents "aa.....a" of 9 letters and an end each."""
    from train.data import prepare

    source = tmp_path / "numbers.jsonl"
    source.write_text("".join(json.dumps({"text": chr(97 + i % 26) * 9}) + "\n" for i in range(100)))
    prepare(str(source), "bytes", tmp_path / "numbers", shard_bytes=128)
    return tmp_path / "numbers"


@pytest.fixture(scope="session")
def finished(tmp_path_factory, corpus) -> Path:
    """A run of the `tiny` preset from start to end, its data set beside it in `data`: look, do not touch."""
    from tests.trained import tiny
    from train.loop import train

    run = tmp_path_factory.mktemp("finished") / "run"
    train(run, tiny(corpus), run.parent / "data")
    return run
