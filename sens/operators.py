"""The block norm of a map's differential, matrix-free and known on both sides (theory: "Lambda itself, with proof").

Nothing here forms a Jacobian: a probe is one tangent pushed forward or one cotangent pulled back.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from sens import checks
from sens.decompose import eigh


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockNorm:
    """A block operator norm known on both sides: of every examined output row, and of their maximum."""

    rows: Int[Array, " r"]
    """Output rows examined, in the order asked for."""
    row_lower: Float[Array, " r"]
    """Attained by a perturbation that was found."""
    row_upper: Float[Array, " r"]
    """No perturbation exceeds it; infinite where nothing was proved."""
    row_converged: Bool[Array, " r"]
    """`row_upper <= (1 + rtol) row_lower`. A row that was proved not to be the maximum may be left wide."""
    lower: Float[Array, ""]
    """Maximum of `row_lower`."""
    upper: Float[Array, ""]
    """Maximum of `row_upper`."""
    converged: Bool[Array, ""]
    """`upper <= (1 + rtol) lower`."""
    witness: Float[Array, "L d"]
    """A perturbation of block norm one that attains `lower`."""


class Differential(NamedTuple):
    """A differential at a point: `push` is the Jacobian, `pull` its transpose, `value` the map there."""

    value: Array
    push: Callable[[Array], Array]
    pull: Callable[[Array], Array]


def block_operator_norm(
    f: Callable[[Float[Array, "L d"]], Float[Array, "m e"]],
    x: Float[Array, "L d"],
    rows: Int[Array, " r"] | Sequence[int] | None = None,
    *,
    key: Key[Array, ""],
    rtol: float = 1e-2,
    geometry: Literal["two", "rms"] = "two",
    row_upper: Float[Array, " r"] | None = None,
    restarts: int = 2,
    steps: int = 30,
    rounds: int = 8,
    batch: int = 16,
) -> BlockNorm:
    """Bracket ‖D f(x)‖ from the (inf,2) to the (inf,2) block norm, ‖Z‖_{inf,2} = max_i ‖z_i‖_2.

    With B_j = d f(x)_i / d x_j the norm of output row i is Lambda_i = max over ‖h_j‖_2 ≤ 1 of ‖Σ_j B_j h_j‖_2.

    - *Lower*: ascend y ← normalise(Σ_j B_j h_j), h_j ← normalise(B_jᵀ y); the value Σ_j ‖B_jᵀ y‖ never falls.
    - *Upper*, by duality: Lambda_i² ≤ (Σ_j t_j) λ_max(G), G = Σ_j B_j B_jᵀ / t_j, for every t > 0. G is only (e, e),
      and its eigenvalue is taken exactly. (A Ritz value would approach λ_max from below and prove nothing.) The row's
      blocks come from e pulls, made once, or, where e L d numbers are too many to keep (more than 2^25), G is formed
      column by column every time, one pull and one push each.
    - *Meeting*: the best weights are t_j = tr(B_jᵀ Y B_j)^(1/2) for the Y, positive and of trace one, that maximises
      their sum, a concave function. Y = y yᵀ at the ascent's fixed point is the first guess; then the best mixture of
      all fixed points and top eigenvectors met so far, and every top eigenvector starts an ascent. What gap remains is
      that of a semidefinite relaxation: as measured, thousandths for dense random maps of width 16 and more, and one
      or two hundredths in rows where two unlike maxima almost tie.

    The proof is about the Jacobian that the derivative rules of `f` represent. Rounding is covered by an allowance: for
    the eigenvalue, for sums over L d terms, and for what push and pull are seen to disagree by.

    Args:
      f: any map of 2-D arrays with forward and reverse derivatives. It is linearised once.
      x: the point.
      rows: output rows to examine, each to `rtol`; the whole is their maximum. None: the whole map, as a proof over all
        rows, in which a row is dropped as soon as its upper end is at most (1 + rtol) times any row's lower end.
      key: for the random starts.
      rtol: relative width at which a bracket counts as converged, rounding included: below 8 sqrt(L d) eps none does.
      geometry: "rms" for the norm between max_i ‖x_i‖_2 / sqrt(width) on both sides (the same if d = e).
      row_upper: bounds already known for these rows in this geometry, such as `sens.bounds.attention_covariance`: with
        `rows=None` they spare the rows that cannot be the maximum their certificate.
      restarts: random starts for each row.
      steps: longest ascent from a start.
      rounds: most certificates formed for a row.
      batch: probes carried at once: memory is O(batch L d) beside what the linearisation of `f` keeps and the blocks of
        one row. On a CPU more are no faster.

    Returns:
      `BlockNorm`. Without convergence the bracket stays wide and says so.

    Raises:
      ValueError: shapes, rows or options that do not fit; a point or value that is not finite; a `row_upper` below what
        is attained.
      TypeError: a point that is not floating, or a map that changes its dtype.
        Inside jit, where values are unknown, bad values give NaN.

    Source: Emadi, arXiv 2602.18849, section 4.1, defines Lambda without computing it; the bracket is ours.

    >>> W = jnp.array([[3.0, 0.0], [0.0, 1.0]])
    >>> norm = block_operator_norm(lambda x: x @ W, jnp.ones((4, 2)), key=jax.random.key(0))
    >>> print(f"{norm.lower:.3f} {norm.upper:.3f} {norm.converged}")
    3.000 3.000 True
    """
    if geometry not in ("two", "rms"):
        raise ValueError(f"geometry must be 'two' or 'rms', got {geometry!r}")
    if not 0 < rtol < math.inf:
        raise ValueError(f"rtol must be positive, got {rtol}")
    for name, value in (("restarts", restarts), ("steps", steps), ("rounds", rounds), ("batch", batch)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if np.ndim(x) != 2:  # before the map is called, which may have its own words for it
        raise ValueError(f"x of shape (L, d) is wanted, got {np.shape(x)}")
    df = linearise(f, x)
    if df.value.ndim != 2:
        raise ValueError(f"a map from (L, d) to (m, e) is wanted, got {np.shape(x)} to {df.value.shape}")
    (L, d), (m, e) = np.shape(x), df.value.shape
    if 0 in (L, d, m, e):
        raise ValueError(f"a map between arrays with entries is wanted, got {(L, d)} to {(m, e)}")
    dtype = df.value.dtype
    scale = math.sqrt(d / e) if geometry == "rms" else 1.0
    picked = jnp.arange(m, dtype=jnp.int32) if rows is None else _checked_rows(rows, m)
    known = jnp.full(picked.shape, jnp.inf, dtype) if row_upper is None else jnp.asarray(row_upper, dtype) / scale
    if known.shape != picked.shape:
        raise ValueError(f"row_upper must have one bound a row, shape {picked.shape}, got {known.shape}")
    slack = 1 + 4 * math.sqrt(L * d) * float(jnp.finfo(dtype).eps)  # for sums over L d terms, on either end
    effort = _Effort((1 + rtol) / slack**2, rtol / 10, steps, rounds, batch)

    # Every row climbs once, `batch` rows at a time: to find the likely maximum, and what it spares the others.
    starts = jax.random.normal(key, (picked.size, restarts, e), dtype)
    climb = lambda row_and_starts: _ascend(_by_probes(df, row_and_starts[0], batch), row_and_starts[1][0], steps, rtol)  # noqa: E731
    climbs = jax.lax.map(climb, (picked, starts), batch_size=min(batch, picked.size))

    # Certificates row by row, the likeliest maximum first, each only for as long as it can matter.
    def settle(best: Array, row: tuple[Array, _Climb, Array, Array]) -> tuple[Array, tuple[Array, Array, Array]]:
        index, climb, starts, upper = row
        goal = best if rows is None else jnp.zeros_like(best)
        lower, y, upper = jax.lax.cond(
            upper > effort.enough * jnp.maximum(climb.value, goal),
            lambda: _certify(df, index, starts.at[0].set(climb.y), upper, goal=goal, effort=effort),
            lambda: (climb.value, climb.y, jnp.where(jnp.isnan(climb.value), jnp.nan, upper)),
        )
        return jnp.maximum(best, lower), (lower, y, upper)

    order = jnp.argsort(-climbs.value)
    ordered = jax.tree.map(lambda a: a[order], (picked, climbs, starts, known))
    _, (lower, y, upper) = jax.lax.scan(settle, climbs.value.max(), ordered)

    best = jnp.argmax(lower)
    witness = _normalise_rows(_pull_row(df, picked[order][best], y[best]))
    inside = (picked >= 0) & (picked < m)  # known only here for rows given inside jit
    back = jnp.argsort(order)
    lower = jnp.where(inside, lower[back] * (scale / slack), jnp.nan)
    upper = jnp.where(inside, _at_least(upper[back] * (scale * slack), lower), jnp.nan)
    if row_upper is not None and not checks.is_traced(upper) and np.isnan(upper).any() and not np.isnan(lower).any():
        row = int(np.argmax(np.isnan(upper)))
        raise ValueError(f"row_upper[{row}] = {row_upper[row]} is no bound: {lower[row]} is attained")
    return BlockNorm(
        rows=picked,
        row_lower=lower,
        row_upper=upper,
        row_converged=upper <= (1 + rtol) * lower,
        lower=lower.max(),
        upper=upper.max(),
        converged=upper.max() <= (1 + rtol) * lower.max(),
        witness=witness * math.sqrt(d) if geometry == "rms" else witness,
    )


def linearise(f: Callable[[Array], Array], x: Float[Array, "..."]) -> Differential:
    """The differential of `f` at `x`, from one evaluation whose residuals every probe reuses.

    Raises a TypeError if the point is not floating or the map does not return one array of its dtype, a ValueError if
    the point or the map's value is not finite (where values are known).
    """
    x = checks.as_float(x, "x")
    value, push = jax.linearize(f, x)
    if not isinstance(value, jax.Array) or value.dtype != x.dtype:
        raise TypeError(f"a map to one {x.dtype} array is wanted, got {jax.tree.map(jax.typeof, value)}")
    for name, array in (("x", x), ("f(x)", value)):
        if not checks.is_traced(array) and not np.isfinite(array).all():
            raise ValueError(f"{name} is not finite")
    transpose = jax.linear_transpose(push, x)
    return Differential(value, push, lambda cotangent: transpose(cotangent)[0])


_HELD = 2**25
"""Numbers in an output row's blocks (e L d) up to which they are kept while it is certified: 128 MiB of float32."""


class _Effort(NamedTuple):
    enough: float  # ratio of the ends at which, rounding allowed for, a bracket is as narrow as asked
    gain: float  # relative gain below which an ascent stops
    steps: int
    rounds: int
    batch: int


class _Climb(NamedTuple):
    """Where an ascent ended: a unit `y`, its token lengths ‖B_jᵀ y‖ and their sum."""

    value: Array
    y: Array
    lengths: Array


class _Row(NamedTuple):
    """One output row of a differential."""

    pull: Callable[[Array], Array]
    """y to the tokens B_jᵀ y, (L, d)."""
    push: Callable[[Array], Array]
    """Tokens h_j to Σ_j B_j h_j, (e,)."""
    gram: Callable[[Array], Array]
    """t to Σ_j B_j B_jᵀ / t_j, (e, e)."""


def _by_probes(df: Differential, row: Array, batch: int) -> _Row:
    """The row through the map itself: two probes a column of the Gram matrix."""

    def gram(t: Array) -> Array:
        e = df.value.shape[1]
        column = lambda unit: df.push(_pull_row(df, row, unit) / t[:, None])[row]  # noqa: E731
        return jax.lax.map(column, jnp.eye(e, dtype=df.value.dtype), batch_size=min(batch, e))

    return _Row(lambda y: _pull_row(df, row, y), lambda tokens: df.push(tokens)[row], gram)


def _by_blocks(df: Differential, row: Array, batch: int) -> _Row:
    """The row's blocks, e probes once; everything else is products of matrices."""
    e = df.value.shape[1]
    units = jnp.eye(e, dtype=df.value.dtype)
    blocks = jax.lax.map(lambda unit: _pull_row(df, row, unit), units, batch_size=min(batch, e))
    flat, shape = blocks.reshape(e, -1), blocks.shape[1:]
    product = functools.partial(jnp.matmul, precision="highest")

    def gram(t: Array) -> Array:
        weighted = (blocks / jnp.sqrt(t)[None, :, None]).reshape(e, -1)
        return product(weighted, weighted.T)

    return _Row(lambda y: product(y, flat).reshape(shape), lambda tokens: product(flat, tokens.ravel()), gram)


def _ascend(row: _Row, start: Array, steps: int, gain: float) -> _Climb:
    """Alternating ascent from `start`, until a step gains less than the relative `gain`."""

    def rising(state: Any) -> Array:
        count, climb, ahead = state
        return (count < steps) & (jnp.linalg.norm(ahead) > (1 + gain) * climb.value)

    def step(state: Any) -> Any:
        count, _, ahead = state
        y = ahead / jnp.linalg.norm(ahead)
        tokens = row.pull(y)
        lengths = jnp.linalg.norm(tokens, axis=1)
        return count + 1, _Climb(lengths.sum(), y, lengths), row.push(_normalise_rows(tokens))

    tokens = jax.eval_shape(row.pull, start)
    nowhere = _Climb(jnp.zeros((), start.dtype), start, jnp.zeros(tokens.shape[0], start.dtype))
    _, climb, _ = jax.lax.while_loop(rising, step, (jnp.int32(0), nowhere, start))
    return climb


def _certify(
    df: Differential, index: Array, starts: Array, upper: Array, *, goal: Array, effort: _Effort
) -> tuple[Array, Array, Array]:
    """Lower end, its y and upper end of one row; done once upper ≤ (1 + rtol) max(lower, goal)."""
    e, (L, d) = df.value.shape[1], jax.eval_shape(df.pull, df.value).shape
    row = (_by_blocks if e * L * d <= _HELD else _by_probes)(df, index, effort.batch)
    ascend = lambda start: _ascend(row, start, effort.steps, effort.gain)  # noqa: E731
    restarts, dtype = starts.shape[0], starts.dtype
    climbs = jax.lax.map(ascend, starts, batch_size=min(effort.batch, restarts))
    # Squared token lengths of the directions met: row s of `atoms` is (tr(B_jᵀ y_s y_sᵀ B_j))_j.
    atoms = jnp.zeros((restarts + 2 * effort.rounds, L), dtype)
    atoms = atoms.at[:restarts].set(climbs.lengths**2)
    slots = jnp.arange(atoms.shape[0], dtype=jnp.int32)

    def unsettled(state: Any) -> Array:
        count, lower, _, upper, _ = state
        return (count < effort.rounds) & (upper > effort.enough * jnp.maximum(lower, goal))

    def tighten(state: Any) -> Any:
        count, lower, y, upper, atoms = state
        filled = restarts + 2 * count
        t = _best_weights(atoms, (slots < filled).astype(dtype))
        # A token that no atom reaches still needs a positive weight; this one costs a thousandth of rtol.
        t = jnp.where(t.sum() > 0, t + effort.gain / 100 * t.mean(), 1)
        squared, top = _dual(df, index, row, t)
        climb = ascend(top)
        met = jnp.stack([jnp.linalg.norm(row.pull(top), axis=1), climb.lengths]) ** 2
        return (
            count + 1,
            jnp.maximum(lower, climb.value),
            jnp.where(climb.value > lower, climb.y, y),
            jnp.minimum(upper, jnp.sqrt(squared)),
            jax.lax.dynamic_update_slice_in_dim(atoms, met, filled, axis=0),
        )

    best = jnp.argmax(climbs.value)
    state = jnp.int32(0), climbs.value[best], climbs.y[best], upper, atoms
    _, lower, y, upper, _ = jax.lax.while_loop(unsettled, tighten, state)
    return lower, y, jnp.where(jnp.isnan(lower), jnp.nan, upper)


def _best_weights(atoms: Array, filled: Array) -> Array:
    """t = (w · atoms)^(1/2) for the mixture w of the filled atoms that maximises Σ_j t_j.

    The multiplicative update is expectation-maximisation for this concave function: it never falls.
    """

    def update(_: int, w: Array) -> Array:
        t = jnp.sqrt(w @ atoms)
        grown = w * (atoms @ jnp.where(t > 0, 1 / t, 0))
        return jnp.where(grown.sum() > 0, grown / grown.sum(), w)

    return jnp.sqrt(jax.lax.fori_loop(0, 200, update, filled / filled.sum()) @ atoms)


def _dual(df: Differential, index: Array, row: _Row, t: Array) -> tuple[Array, Array]:
    """(Σ t) λ_max(Σ_j B_j B_jᵀ / t_j) with its allowance for rounding, and the top eigenvector."""
    gram = row.gram(t)
    eigenvalues, eigenvectors = eigh((gram + gram.T) / 2)
    top, vector = jnp.maximum(eigenvalues[-1], 0), eigenvectors[:, -1]
    # Where pulling and pushing disagree: over all columns, and through the map once more along the top one.
    again = df.push(row.pull(vector) / t[:, None])[index]
    disagreement = jnp.linalg.norm(gram - gram.T) + jnp.linalg.norm(again - gram @ vector)
    rounding = 4 * gram.shape[0] * float(jnp.finfo(gram.dtype).eps) * top + disagreement
    return t.sum() * (top + rounding), vector


def _at_least(upper: Array, lower: Array) -> Array:
    """Upper ends that rounding put below what is attained are raised to it; NaN for what was no bound."""
    tolerance = math.sqrt(float(jnp.finfo(upper.dtype).eps))
    return jnp.where(upper >= (1 - tolerance) * lower, jnp.maximum(upper, lower), jnp.nan)


def _pull_row(df: Differential, row: Array, y: Array) -> Array:
    """Cotangent y at one output row: the tokens B_jᵀ y, (L, d)."""
    return df.pull(jnp.zeros_like(df.value).at[row].set(y))


def _normalise_rows(tokens: Array) -> Array:
    lengths = jnp.linalg.norm(tokens, axis=1, keepdims=True)
    return tokens / jnp.where(lengths > 0, lengths, 1)


def _checked_rows(rows: Any, m: int) -> Array:
    if checks.is_traced(rows):
        return rows.astype(jnp.int32)
    known = np.asarray(rows)
    if known.ndim != 1 or known.size == 0 or not np.issubdtype(known.dtype, np.integer):
        raise ValueError(f"rows must be a non-empty list of row numbers, got {rows!r}")
    if known.min() < 0 or known.max() >= m:
        raise ValueError(f"rows must be in [0, {m}), got {known[(known < 0) | (known >= m)].tolist()}")
    return jnp.asarray(known, jnp.int32)
