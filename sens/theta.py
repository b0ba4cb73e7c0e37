"""theta(p) = 4 max over subsets S of p(S)(1 - p(S)): its closed forms, the prefix certificate and the exact value.

Everything here means theta of the row divided by its sum. The two-sided certificate is in `sens.bracket`.
"""

import math
import numbers
import time

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from sens import checks, partition
from sens.bracket import Bracket
from sens.prefix import prefix_mass


def theta_uniform(k: int) -> float:
    """Theta of a row uniform on k atoms: 1 - (1 - 2 floor(k/2)/k)², so 1 for even k and 1 - 1/k² for odd k.

    >>> theta_uniform(2), theta_uniform(3)
    (1.0, 0.8888888888888888)
    """
    if not isinstance(k, numbers.Integral) or k < 1:
        raise ValueError(f"k = {k}: a whole number of atoms, at least one, is wanted")
    return 1 - (k % 2) / k**2


def theta_bounds_from_p_max(p_max: Float[ArrayLike, "*rows"]) -> tuple[Float[Array, "*rows"], Float[Array, "*rows"]]:
    """The best (lower, upper) for theta that the row's largest entry alone gives.

    - p_max ≥ 1/2: theta = 4 p_max (1 - p_max), both ends.
    - p_max < 1/2: max(1 - p_max², 8/9) ≤ theta ≤ 1.

    So theta < 8/9 exactly where p_max > 2/3 (the dichotomy).

    >>> import jax.numpy as jnp
    >>> lower, upper = theta_bounds_from_p_max(jnp.array([0.75, 0.5, 0.2]))
    >>> print(lower, upper)
    [0.75 1.   0.96] [0.75 1.   1.  ]
    """
    p_max = checks.as_float(p_max, "p_max")
    valid = (p_max > 0) & (p_max <= 1)
    if not checks.is_traced(valid) and not valid.all():
        raise ValueError(f"p_max = {p_max[~valid].ravel()[0]}: a largest probability, above 0 and at most 1, is wanted")
    dominant = 4 * p_max * (1 - p_max)
    lower = jnp.where(p_max >= 0.5, dominant, jnp.maximum(1 - p_max**2, 8 / 9))
    upper = jnp.where(p_max >= 0.5, dominant, 1)
    return jnp.where(valid, lower, math.nan), jnp.where(valid, upper, math.nan)


def theta_prefix(
    p: Float[ArrayLike, "*rows n"], where: Bool[ArrayLike, "*rows n"] | None = None
) -> Float[Array, "*rows"]:
    """The paper's prefix certificate, a lower bound (to rounding): 4 c (1 - c), c the sorted prefix sum nearest to 1/2.

    No sort: see `sens.prefix`.

    Derivative: that of 4 c (1 - c) with the prefix held fixed (equal entries at its edge share alike), a subgradient.
    An invalid row is a `ValueError`, inside jit NaN.

    >>> import jax.numpy as jnp
    >>> print(theta_prefix(jnp.array([0.5, 0.3, 0.2])))
    1.0
    """
    rows = checks.as_rows(p, where)
    c = _prefix_mass(rows.reshape(-1, rows.shape[-1])).reshape(rows.shape[:-1])
    result = jnp.where(checks.row_is_valid(rows), 4 * c * (1 - c), math.nan)
    checks.raise_on_invalid(result, p, where)
    return result


_prefix_mass = jax.jit(prefix_mass)  # called eagerly, the loops inside would be compiled again at every call


def theta_exact(p: npt.ArrayLike, where: npt.ArrayLike | None = None) -> Float[np.ndarray, "*rows"]:
    """Theta itself, within 1e-12, on the host in float64: rows of support at most 40, tens of milliseconds each.

    A longer support is a `ValueError`: `theta_bracket` has no limit, nor has `theta_within`. An invalid row is a
    `ValueError`.

    >>> print(theta_exact([0.5, 0.3, 0.2]))
    1.0
    """
    rows, atoms = _host_rows(p, where)
    for row in np.ndindex(rows):
        if atoms[row].size > partition.EXACT_SIZE:
            raise ValueError(
                f"row {row} has support {atoms[row].size}, more than {partition.EXACT_SIZE}: "
                f"theta_bracket and theta_within take any"
            )
    result = np.empty(rows)
    for row in np.ndindex(rows):
        difference = partition.least_difference(_units(atoms[row]))
        result[row] = _theta_of_difference(difference, int(_units(atoms[row]).sum()))
    return result


def theta_within(p: npt.ArrayLike, seconds: float, where: npt.ArrayLike | None = None) -> Bracket:
    """Bracket(lower, upper) around theta on the host in float64, of any support, spending about `seconds` in all.

    In time, a row's 40 largest entries are partitioned exactly: supports to 40 come out exactly (width under 1e-15),
    most longer ones too. Once the time is up (looked at between rows) the remaining rows get their 12 largest: a wider
    bracket at worst, as true as the others.

    >>> lower, upper = theta_within([0.5, 0.3, 0.2], seconds=1.0)
    >>> bool(lower <= 1.0 <= upper), bool(upper - lower < 1e-15)
    (True, True)
    """
    if not seconds >= 0:
        raise ValueError(f"seconds = {seconds}: a time limit of at least zero is wanted")
    end = time.monotonic() + seconds
    rows, atoms = _host_rows(p, where)
    lower, upper = np.empty(rows), np.empty(rows)
    for row in np.ndindex(rows):
        q = _units(atoms[row])
        head = partition.EXACT_SIZE if time.monotonic() < end else 12
        least, most = partition.difference_bounds(q, head)
        # What the grid leaves out of the row is less than one unit an entry; then half a unit in the last place.
        total, left = int(q.sum()), q.size
        lower[row] = _theta_of_difference(min(most + left, total), total) * (1 - 2**-52)
        upper[row] = min(_theta_of_difference(max(least - left, 0), total + left) * (1 + 2**-52), 1.0)
    return Bracket(lower, upper)  # pyright: ignore[reportArgumentType]  (NumPy's float64, whatever jax's setting)


def _host_rows(p: npt.ArrayLike, where: npt.ArrayLike | None) -> tuple[tuple[int, ...], np.ndarray]:
    """The leading shape, and for each row its positive entries in float64; an error for what is not probabilities."""
    if isinstance(p, np.ma.MaskedArray):
        raise TypeError("p is a masked array; its data is wanted, and `where` for the mask: True in the support")
    p = np.asarray(p)
    if p.dtype.kind != "f":
        raise TypeError(f"p has dtype {p.dtype}; a floating dtype of NumPy is wanted")
    if p.ndim == 0 or p.shape[-1] == 0:
        raise ValueError(f"p has shape {p.shape}; at least one entry along the last axis is wanted")
    mask = np.asarray(checks.as_mask(np.asarray(True if where is None else where), p.shape))
    atoms = np.empty(p.shape[:-1], object)
    for row in np.ndindex(atoms.shape):
        values = p[row][mask[row]].astype(np.float64)
        if not ((values >= 0).all() and abs(values.sum() - 1) <= checks.SUM_TOLERANCE):
            raise ValueError(checks.describe_invalid(p[row], row, mask[row]))
        atoms[row] = values[values > 0]
    return p.shape[:-1], atoms


def _units(atoms: np.ndarray) -> np.ndarray:
    """Entries in whole units of 2^-60: what that leaves out changes theta by less than 1e-15."""
    return np.floor(atoms * 2.0**60).astype(np.int64)


def _theta_of_difference(difference: int, total: int) -> float:
    """1 - (difference/total)², correctly rounded (Python's quotient of integers is)."""
    return (total - difference) * (total + difference) / total**2


def subset_masses(p: np.ndarray) -> np.ndarray:
    """p(S) of all 2^n subsets S of each row: shape (..., n) to (..., 2^n), S as the bits of the index."""
    masses = np.zeros((*p.shape[:-1], 1))
    for i in range(p.shape[-1]):
        masses = np.concatenate([masses, masses + p[..., i : i + 1]], axis=-1)
    return masses
