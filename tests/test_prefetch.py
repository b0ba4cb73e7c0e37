"""Batches are read ahead by a thread, and nothing of that shows in their order or in the state."""

import contextlib
import threading
from pathlib import Path

import numpy as np
import pytest

from tests.trained import readers
from train.data import TokenDataset, batches
from train.files import DataError


class Watched(TokenDataset):
    """Says when a window has been read, and fails at one that it is told to."""

    def __init__(self, directory: Path, context: int, failing: int = -1) -> None:
        super().__init__(directory, context)
        self.failing, self.done = failing, {index: threading.Event() for index in range(len(self))}

    def __getitem__(self, index: int) -> np.ndarray:
        if index == self.failing:
            raise DataError(f"window {index} is damaged")
        self.done[index].set()
        return super().__getitem__(index)


def test_the_next_batch_is_read_ahead_and_the_state_is_that_of_the_last_one_taken(numbers: Path):
    source = Watched(numbers, 16)
    with contextlib.closing(batches(source, micro_batch=2, accumulation=2)) as iterator:
        first = next(iterator)
        assert source.done[7].wait(30)  # the second batch's last window, which nobody asked for yet
        assert iterator.get_state() == {"next_index": 1}
        second = next(iterator)
        assert iterator.get_state() == {"next_index": 2}
        assert readers() == 1
        iterator.set_state({"next_index": 1})  # what was read ahead is not what comes next now
        np.testing.assert_array_equal(next(iterator), second)
    assert readers() == 0
    assert not np.array_equal(first, second)
    assert not source.done[40].is_set()  # and no more than that is read ahead


def test_what_fails_while_reading_ahead_fails_where_it_is_due(numbers: Path):
    with contextlib.closing(batches(Watched(numbers, 16, failing=9), micro_batch=2, accumulation=2)) as iterator:
        next(iterator)
        next(iterator)
        with pytest.raises(DataError, match="window 9 is damaged"):
            next(iterator)
        assert iterator.get_state() == {"next_index": 2}
    assert readers() == 0
