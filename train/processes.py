"""Several processes that train one run, one for each machine or each device: JAX's own runtime connects them.

They find each other by what the environment says:

- under Slurm, by its variables, as JAX reads them (`srun sens train ...`), or
- by `JAX_COORDINATOR_ADDRESS` (host:port at which process 0 can be reached), `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID`.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import NoReturn

import jax
from jax.experimental import multihost_utils

COORDINATOR, COUNT, INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
VARIABLES: tuple[str, ...] = (COORDINATOR, COUNT, INDEX)

HEARTBEAT_SECONDS = 60
"""How long a process may be silent before the others end."""


class ProcessError(ValueError):
    """Variables of the environment that do not describe processes."""


def join() -> None:
    """Join the other processes, if the environment names any. Call it before any device is used.

    Raises `ProcessError` for variables that are missing or wrong, `RuntimeError` when the others do not come.
    """
    given = [name for name in VARIABLES if name in os.environ]
    if given:
        missing = [name for name in VARIABLES if name not in os.environ]
        if missing:
            raise ProcessError(f"{given[0]} is set, so {' and '.join(missing)} must be too")
        count, index = _number(COUNT), _number(INDEX)
        address = os.environ[COORDINATOR]
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal():
            raise ProcessError(f"{COORDINATOR} must be host:port, got {address!r}")
        if not index < count:
            raise ProcessError(f"{INDEX} must be below {COUNT}, got {index} of {count}")
        if count > 1:
            jax.distributed.initialize(address, count, index, heartbeat_timeout_seconds=HEARTBEAT_SECONDS)
    elif "SLURM_STEP_NODELIST" in os.environ and os.environ.get("SLURM_NTASKS", "1") != "1":  # a step of several tasks
        jax.distributed.initialize(cluster_detection_method="slurm", heartbeat_timeout_seconds=HEARTBEAT_SECONDS)


def first() -> bool:
    """Whether this is the process that writes the record: the only one, or number 0."""
    return jax.process_index() == 0


def several() -> bool:
    """Whether this process has joined others."""
    return jax.distributed.is_initialized()


def wait(place: str) -> None:
    """Until every process is at this place."""
    if several():
        multihost_utils.sync_global_devices(place)


def stopped(update: int) -> bool:
    """Whether to stop after this update: true in every process at the same one, soon after any had a SIGTERM."""
    return several() and multihost_utils.reached_preemption_sync_point(update)


@contextlib.contextmanager
def alive() -> Iterator[None]:
    """What is done together with the other processes: when one of them is gone this one ends too, with a word why.

    It ends at once, not by an exception: on the way out whatever waits for the others (a save under way, JAX's own
    shutdown) would wait for one that is gone.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not several():
            raise
        reason = str(error).splitlines()[0]
        print(
            f"sens: process {jax.process_index()} of {jax.process_count()} lost another one ({reason}) and ends; "
            "start all of them again: the run goes on from its newest checkpoint",
            file=sys.stderr,
        )
        leave(1)


def leave(status: int) -> NoReturn:
    """End this process without waiting for the others, which may wait for it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _number(name: str) -> int:
    if not os.environ[name].isdecimal():
        raise ProcessError(f"{name} must be a number, got {os.environ[name]!r}")
    return int(os.environ[name])
