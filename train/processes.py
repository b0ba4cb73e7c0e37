"""Several processes that train one run, one for each machine or each device: JAX's own runtime connects them.

They find each other by what the environment says:

- under Slurm, by its variables, as JAX reads them (`srun sens train ...`), or
- by `JAX_COORDINATOR_ADDRESS` (host:port at which process 0 can be reached), `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID`.
"""

import os

import jax
from jax.experimental import multihost_utils

COORDINATOR, COUNT, INDEX = VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")

HEARTBEAT_SECONDS = 30
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
        if not index < count:
            raise ProcessError(f"{INDEX} must be below {COUNT}, got {index} of {count}")
        if count > 1:
            jax.distributed.initialize(
                os.environ[COORDINATOR], count, index, heartbeat_timeout_seconds=HEARTBEAT_SECONDS
            )
    elif int(os.environ.get("SLURM_NTASKS", 1)) > 1 and "SLURM_PROCID" in os.environ:
        jax.distributed.initialize(cluster_detection_method="slurm", heartbeat_timeout_seconds=HEARTBEAT_SECONDS)


def first() -> bool:
    """Whether this is the process that writes the record: the only one, or number 0."""
    return jax.process_index() == 0


def wait(place: str) -> None:
    """Until every process is at this place."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(place)


def stopped(update: int) -> bool:
    """Whether to stop after this update: true in every process at the same one, soon after any had a SIGTERM."""
    return jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(update)


def _number(name: str) -> int:
    if not os.environ[name].isdecimal():
        raise ProcessError(f"{name} must be a number, got {os.environ[name]!r}")
    return int(os.environ[name])
