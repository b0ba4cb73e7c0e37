"""Norms of a map's differential, matrix-free: from Jacobian-vector products alone, each with its status.

`block_operator_norm` brackets the (inf,2) -> (inf,2) norm with a proof by duality; `spectral_norm` brackets the
Frobenius -> Frobenius norm with a stated probability. Neither forms a Jacobian: a probe is one tangent or cotangent.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

Geometry = Literal["two", "rms"]


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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SpectralNorm:
    """A spectral norm between a Ritz value and a bound that fails with a probability the caller chose."""

    lower: Float[Array, ""]
    """Largest Ritz value: attained up to rounding."""
    upper: Float[Array, ""]
    """Holds with probability at least `1 - failure` over the random start."""
    converged: Bool[Array, ""]
    """`upper <= (1 + rtol) lower`."""
    steps: Int[Array, ""]
    """Lanczos steps taken; each is one product with the Jacobian and one with its transpose."""


class _Map(NamedTuple):
    """A differential at a point: `push` is the Jacobian, `pull` its transpose, `output` the value of the map."""

    output: Array
    push: Callable[[Array], Array]
    pull: Callable[[Array], Array]


def block_operator_norm(
    f: Callable[[Float[Array, "L d"]], Float[Array, "m e"]],
    x: Float[Array, "L d"],
    rows: Int[Array, " r"] | Sequence[int] | None = None,
    *,
    key: Key[Array, ""],
    rtol: float = 1e-2,
    geometry: Geometry = "two",
    row_upper: Float[Array, " r"] | None = None,
    restarts: int = 2,
    steps: int = 30,
    rounds: int = 8,
    batch: int = 32,
) -> BlockNorm:
    r"""Bracket ``||D f(x)||`` from the (inf,2) to the (inf,2) block norm, ``max_i ||z_i||_2``.

    With ``B_j = d f(x)_i / d x_j`` the norm of output row ``i`` is ``Lambda_i = max_{||h_j||_2 <= 1} ||sum_j B_j h_j||``.

    - *Lower*: ascend ``y <- normalise(sum_j B_j h_j)``, ``h_j <- normalise(B_j^T y)``; the value never falls.
    - *Upper*, by duality: ``Lambda_i^2 <= (sum_j t_j) lambda_max(G)``, ``G = sum_j B_j B_j^T / t_j``, for all ``t > 0``.
      ``G`` is only ``e x e``: it is formed column by column (one `pull`, one `push` each) and its eigenvalue taken
      exactly. Ritz values would approach ``lambda_max`` from below and prove nothing.
    - *Meeting*: the best weights are ``t_j^2 = tr(B_j^T Y B_j)`` with ``Y`` a maximiser of the concave
      ``sum_j tr(B_j^T Y B_j)^(1/2)`` over density matrices. ``Y = y y^T`` at the fixed point of the ascent is the first guess; then
      ``Y`` is the best mixture of the fixed points and top eigenvectors met so far, and every top eigenvector starts an ascent.

    The proof is of the Jacobian that `f`'s own derivative rules represent; rounding is covered by an allowance for the
    eigenvalue, for sums over ``L d`` terms, and for the asymmetry seen in ``G`` (where the two products disagree).

    Args:
      f: any map of 2-D arrays that has forward and reverse derivatives.
      x: the point.
      rows: output rows to examine, each to `rtol`; the whole is their maximum. ``None``: all rows, as a proof for the whole
        map: a row is dropped as soon as its upper end falls to ``(1 + rtol)`` times the best lower end of any row.
      key: for the random starts.
      rtol: relative width at which a bracket counts as converged.
      geometry: ``"two"``, or ``"rms"`` for the norm between ``max_i ||x_i||_2 / sqrt(width)`` (equal if ``d = e``).
      row_upper: bounds already known for these rows, in the same geometry, such as `sens.bounds.attention_covariance`:
        with ``rows=None`` they spare rows their certificate.
      restarts: random starts for each row.
      steps: longest ascent from a start.
      rounds: most certificates formed for a row.
      batch: probes carried at once; memory is ``O(batch L d)`` beside what the linearisation of `f` keeps.

    Returns:
      `BlockNorm`. Without convergence the bracket stays wide and says so.

    Raises:
      ValueError: shapes, rows or options that do not fit; a point or value that is not finite.
      TypeError: a point that is not real floating point. Under `jit`, where values are unknown, bad values give NaN.

    Example:
      >>> W = jnp.array([[3.0, 0.0], [0.0, 1.0]])
      >>> norm = block_operator_norm(lambda x: x @ W, jnp.ones((4, 2)), key=jax.random.key(0))
      >>> print(f"{norm.lower:.3f} {norm.upper:.3f} {norm.converged}")
      3.000 3.000 True

    Source: Emadi, arXiv 2602.18849, defines Lambda (section 4.1) without computing it; the bracket is ours.
    """
    for name, value in (("restarts", restarts), ("steps", steps), ("rounds", rounds), ("batch", batch)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if not rtol > 0:
        raise ValueError(f"rtol must be positive, got {rtol}")
    if geometry not in ("two", "rms"):
        raise ValueError(f"geometry must be 'two' or 'rms', got {geometry!r}")
    differential = _linearise(f, x)
    m, e = differential.output.shape
    scale = math.sqrt(x.shape[1] / e) if geometry == "rms" else 1.0
    picked = jnp.arange(m, dtype=jnp.int32) if rows is None else jnp.asarray(_checked_rows(rows, m))
    known = jnp.full(picked.shape, jnp.inf, x.dtype)
    if row_upper is not None:
        known = jnp.asarray(row_upper, x.dtype) / scale
        if known.shape != picked.shape:
            raise ValueError(f"row_upper must have one bound a row, {picked.shape}, got {known.shape}")
    tolerance = jnp.asarray(rtol, x.dtype)

    def climb(row_and_start: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        return _ascend(differential, *row_and_start, steps=steps, rtol=tolerance / 10)

    # Starts: every row climbs from `restarts` random directions, `batch` climbs at a time.
    starts = jax.random.normal(key, (picked.size * restarts, e), x.dtype)
    row_of_start = jnp.repeat(picked, restarts)
    values, ys, lengths = jax.lax.map(climb, (row_of_start, starts), batch_size=batch)
    values = values.reshape(-1, restarts)
    ys = ys.reshape(-1, restarts, e)
    lengths = lengths.reshape(-1, restarts, x.shape[0])

    # Certificates: row by row, the likeliest maximum first, each stopped when it can no longer matter.
    def settle(best: Array, item: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array, Array]]:
        row, value, y, length, bound = item
        goal = best if rows is None else jnp.zeros_like(best)
        row_lower, y, bound = _certify(
            differential,
            row,
            value,
            y,
            length,
            bound,
            goal=goal,
            rtol=tolerance,
            steps=steps,
            rounds=rounds,
            batch=batch,
        )
        return jnp.maximum(best, row_lower), (row_lower, y, bound)

    order = jnp.argsort(-values.max(axis=1))
    items = (picked[order], values[order], ys[order], lengths[order], known[order])
    _, (lower, y, upper) = jax.lax.scan(settle, values.max(), items)

    top = jnp.argmax(lower)
    witness = _normalise_rows(_pull_row(differential, picked[order][top], y[top]))
    # One-sided allowances for sums over L d terms; scaled to the geometry.
    slack = 4 * math.sqrt(x.size) * jnp.finfo(x.dtype).eps
    inside = (picked >= 0) & (picked < m)
    back = jnp.argsort(order)
    row_lower = jnp.where(inside, lower[back] * scale / (1 + slack), jnp.nan)
    upper = jnp.where(inside, upper[back] * scale * (1 + slack), jnp.nan)
    return BlockNorm(
        rows=picked,
        row_lower=row_lower,
        row_upper=upper,
        row_converged=upper <= (1 + tolerance) * row_lower,
        lower=row_lower.max(),
        upper=upper.max(),
        converged=upper.max() <= (1 + tolerance) * row_lower.max(),
        witness=witness * math.sqrt(x.shape[1]) if geometry == "rms" else witness,
    )


def spectral_norm(
    f: Callable[[Float[Array, "..."]], Float[Array, "..."]],
    x: Float[Array, "..."],
    *,
    key: Key[Array, ""],
    rtol: float = 1e-2,
    failure: float = 1e-6,
    steps: int = 128,
) -> SpectralNorm:
    r"""Bracket the spectral norm of ``D f(x)``, from the Frobenius to the Frobenius norm, by Golub-Kahan-Lanczos.

    ``k`` steps from a random unit ``v`` build the orthonormal polynomials ``p_0 .. p_k`` of the spectral measure of ``J^T J`` at ``v``.

    - *Lower*: the root of the largest zero of ``p_k``, which is the largest Ritz value.
    - *Upper*: the measure's mass at ``lambda_max`` is ``c^2``, the squared component of ``v`` along a top singular vector, and by
      Christoffel at most ``1 / sum_j p_j(lambda_max)^2``; and ``|c| >= delta`` with probability ``1 - delta sqrt(2 n / pi)``
      at least. So ``lambda_max`` is at most the ``mu`` at which ``sum_j p_j(mu)^2 = 1 / delta^2``. It adapts to the spectrum
      where the a-priori bound of Kuczynski and Wozniakowski (1992) assumes the worst.

    No basis is kept: memory is that of two vectors. Lost orthogonality repeats Ritz values that have converged and
    leaves the largest one right.

    Args:
      f: any map that has forward and reverse derivatives.
      x: the point.
      key: for the random start.
      rtol: relative width at which the bracket counts as converged.
      failure: probability with which `upper` may be too small.
      steps: most Lanczos steps.

    Returns:
      `SpectralNorm`. Without convergence the bracket stays wide and says so.

    Raises:
      ValueError: an option out of range, or a point or value that is not finite.
      TypeError: a point that is not real floating point. Under `jit`, where values are unknown, bad values give NaN.

    Example:
      >>> norm = spectral_norm(lambda x: jnp.array([[3.0, 0.0], [0.0, 1.0]]) @ x, jnp.ones(2), key=jax.random.key(0))
      >>> print(f"{norm.lower:.3f} {norm.upper:.3f} {norm.converged}")
      3.000 3.000 True
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    if not rtol > 0:
        raise ValueError(f"rtol must be positive, got {rtol}")
    if not 0 < failure < 1:
        raise ValueError(f"failure must be in (0, 1), got {failure}")
    _, push, pull = _linearise(f, x, block=False)
    stride = min(8, steps)  # steps between two checks
    length = stride * -(-steps // stride)
    log_delta = math.log(failure) - 0.5 * math.log(2 * x.size / math.pi)

    def step(k: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
        u, v, alphas, betas = state
        u, alpha = _normalise(push(v) - betas[k] * u)
        v, beta = _normalise(pull(u) - alpha * v)
        return u, v, alphas.at[k].set(alpha), betas.at[k + 1].set(beta)

    def advance(state: tuple[Array, ...]) -> tuple[Array, ...]:
        k, krylov, *_ = state
        krylov = jax.lax.fori_loop(k, k + stride, step, krylov)
        lower, upper = _ritz_bracket(*krylov[2:], k + stride, log_delta)
        return k + stride, krylov, lower, upper

    def unfinished(state: tuple[Array, ...]) -> Array:
        k, _, lower, upper = state
        return (k < length) & (upper > (1 + rtol) * lower)

    start, _ = _normalise(jax.random.normal(key, x.shape, x.dtype))
    krylov = (
        jnp.zeros(jax.eval_shape(push, start).shape, x.dtype),
        start,
        jnp.zeros(length, x.dtype),
        jnp.zeros(length + 1, x.dtype),
    )
    zero = jnp.zeros((), x.dtype)
    k, _, lower, upper = jax.lax.while_loop(unfinished, advance, (jnp.int32(0), krylov, zero, zero + jnp.inf))
    # The widest rounding of a product is that of a sum over all of x.
    slack = 4 * math.sqrt(x.size) * jnp.finfo(x.dtype).eps
    lower, upper = lower / (1 + slack), upper * (1 + slack)
    return SpectralNorm(lower=lower, upper=upper, converged=upper <= (1 + rtol) * lower, steps=k)


def _ritz_bracket(alphas: Array, betas: Array, k: Array, log_delta: float) -> tuple[Array, Array]:
    """Largest singular value of the bidiagonal after `k` steps, and the `mu` at which the polynomials reach 1/delta^2.

    For `mu` above the largest Ritz value the ratios `p_j / p_{j-1}` are the pivots of `mu I - T` over the off-diagonal:
    positive, and without overflow. Both numbers are roots of monotone tests on them.
    """
    size = alphas.size
    live = jnp.arange(size, dtype=jnp.int32) < k
    diagonal = alphas**2 + betas[:-1] ** 2
    off = alphas * betas[1:]

    def tests(mu: Array) -> tuple[Array, Array]:
        def pivot(carry, entry):
            below, ratio, log_p, log_sum, positive = carry
            d, o, alive = entry
            ratio = ((mu - d) - below / ratio) / o
            log_p = log_p + jnp.log(jnp.where(ratio > 0, ratio, 1))
            new = (
                jnp.broadcast_to(o, mu.shape),
                ratio,
                log_p,
                jnp.logaddexp(log_sum, 2 * log_p),
                positive & (ratio > 0),
            )
            return jax.tree.map(lambda a, b: jnp.where(alive, a, b), new, carry), None

        flat = jnp.zeros_like(mu)
        carry, _ = jax.lax.scan(pivot, (flat, flat + 1, flat, flat, mu > 0), (diagonal, off, live))
        *_, log_sum, positive = carry
        return positive, positive & (log_sum >= -2 * log_delta)

    top = diagonal.max() * (1 - 4 * jnp.finfo(alphas.dtype).eps)
    wide = 2 * (diagonal.max() + off.max()) * math.exp(-log_delta)
    ritz = _first_true(lambda mu: tests(mu)[0], top, wide)
    bound = _first_true(lambda mu: tests(mu)[1], ritz, wide)
    return jnp.sqrt(ritz), jnp.sqrt(bound)


def _first_true(test: Callable[[Array], Array], low: Array, high: Array) -> Array:
    """Least point of `[low, high]` from which a monotone test holds: a search of 64 points at once on a log scale."""
    grid = jnp.linspace(0, 1, 64, dtype=low.dtype)

    def narrow(_, ends):
        low, high = ends
        points = low * (high / low) ** grid
        first = jnp.argmax(test(points).at[-1].set(True))
        return points[jnp.maximum(first - 1, 0)], points[first]

    passes = 6 if low.dtype == jnp.float32 else 10
    return jax.lax.fori_loop(0, passes, narrow, (low, high))[1]


def _linearise(f: Callable[[Array], Array], x: Array, *, block: bool = True) -> _Map:
    """Check the point and the map, and linearise once: every probe reuses the residuals of this one evaluation."""
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"the point must be real floating point, got {x.dtype}")
    if block and x.ndim != 2:
        raise ValueError(f"the point must have two axes (tokens, width), got shape {x.shape}")
    output, push = jax.linearize(f, x)
    if not isinstance(output, jax.Array) or (block and output.ndim != 2):
        found = jax.tree.map(jnp.shape, output)
        raise ValueError(f"the map must return one array{' of two axes (tokens, width)' if block else ''}, got {found}")
    if output.dtype != x.dtype:
        raise TypeError(f"the map must keep the point's dtype {x.dtype}, got {output.dtype}")
    for name, value in (("point", x), ("map's value", output)):
        if not isinstance(value, jax.core.Tracer) and not np.isfinite(value).all():
            raise ValueError(f"the {name} is not finite")
    transpose = jax.linear_transpose(push, x)
    return _Map(output, push, lambda cotangent: transpose(cotangent)[0])


def _checked_rows(rows: Any, m: int) -> Any:
    if isinstance(rows, jax.core.Tracer):
        return rows
    rows = np.asarray(rows)
    if rows.ndim != 1 or rows.size == 0 or not np.issubdtype(rows.dtype, np.integer):
        raise ValueError(f"rows must be a non-empty list of row numbers, got {rows!r}")
    if rows.min() < 0 or rows.max() >= m:
        raise ValueError(f"rows must be in [0, {m}), got {rows[(rows < 0) | (rows >= m)].tolist()}")
    return rows.astype(np.int32)


def _pull_row(differential: _Map, row: Array, y: Array) -> Array:
    """Cotangent `y` at one output row: the tokens `B_j^T y`, (L, d)."""
    return differential.pull(jnp.zeros_like(differential.output).at[row].set(y))


def _lengths(tokens: Array) -> Array:
    return jnp.linalg.norm(tokens, axis=1)


def _normalise(vector: Array) -> tuple[Array, Array]:
    """A unit vector (zero if the vector is zero) and the length."""
    length = jnp.linalg.norm(vector.ravel())
    return vector / jnp.where(length > 0, length, 1), length


def _normalise_rows(tokens: Array) -> Array:
    length = _lengths(tokens)[:, None]
    return tokens / jnp.where(length > 0, length, 1)


def _ascend(differential: _Map, row: Array, start: Array, *, steps: int, rtol: Array) -> tuple[Array, Array, Array]:
    """Alternating ascent from `start`: the value reached, the unit `y` at which, and the token lengths `||B_j^T y||`."""

    def rising(state):
        count, value, _, _, ahead = state
        return (count < steps) & (jnp.linalg.norm(ahead) > (1 + rtol) * value)

    def climb(state):
        count, _, _, _, ahead = state
        y, _ = _normalise(ahead)
        tokens = _pull_row(differential, row, y)
        lengths = _lengths(tokens)
        return count + 1, lengths.sum(), y, lengths, differential.push(_normalise_rows(tokens))[row]

    zero = jnp.zeros((), start.dtype)
    lengths = jnp.zeros(jax.eval_shape(lambda: _pull_row(differential, row, start)).shape[0], start.dtype)
    _, value, y, lengths, _ = jax.lax.while_loop(rising, climb, (jnp.int32(0), zero, start, lengths, start))
    return value, y, lengths


def _mixture(atoms: Array, filled: Array) -> Array:
    """Weights `t = sqrt(w . atoms)` that maximise `sum(t)` over mixtures `w` of the filled atoms.

    The multiplicative update is expectation-maximisation for this concave function: it never falls.
    """

    def update(_, w):
        t = jnp.sqrt(w @ atoms)
        grown = w * (atoms @ jnp.where(t > 0, 1 / t, 0))
        total = grown.sum()
        return jnp.where(total > 0, grown / total, w)

    w = jax.lax.fori_loop(0, 200, update, filled / filled.sum())
    return jnp.sqrt(w @ atoms)


def _certify(
    differential: _Map,
    row: Array,
    values: Array,
    ys: Array,
    lengths: Array,
    upper: Array,
    *,
    goal: Array,
    rtol: Array,
    steps: int,
    rounds: int,
    batch: int,
) -> tuple[Array, Array, Array]:
    """Lower end, its `y` and upper end of one row, from its climbs; done once `upper <= (1 + rtol) max(lower, goal)`."""
    restarts, e = ys.shape
    dtype = ys.dtype
    best = jnp.argmax(values)
    atoms = jnp.zeros((restarts + 2 * rounds, lengths.shape[1]), dtype).at[:restarts].set(lengths**2)
    slots = jnp.arange(atoms.shape[0], dtype=jnp.int32)

    def unsettled(state):
        count, lower, _, upper, _ = state
        return (count < rounds) & (upper > (1 + rtol) * jnp.maximum(lower, goal))

    def certify(state):
        count, lower, y, upper, atoms = state
        filled = restarts + 2 * count
        t = _mixture(atoms, (slots < filled).astype(dtype))
        # A token that no atom touches still needs a positive weight; this much costs less than rtol / 1000.
        t = jnp.where(t.sum() > 0, t + 1e-3 * rtol * t.mean(), 1)

        def column(unit):
            return differential.push(_pull_row(differential, row, unit) / t[:, None])[row]

        gram = jax.lax.map(column, jnp.eye(e, dtype=dtype), batch_size=min(batch, e))
        eigenvalues, vectors = jnp.linalg.eigh((gram + gram.T) / 2)
        rounding = 4 * e * jnp.finfo(dtype).eps * eigenvalues[-1] + jnp.linalg.norm(gram - gram.T)
        proved = jnp.sqrt(t.sum() * (jnp.maximum(eigenvalues[-1], 0) + rounding))
        eigenvector = vectors[:, -1]
        value, climbed, climbed_lengths = _ascend(differential, row, eigenvector, steps=steps, rtol=rtol / 10)
        seen = jnp.stack([_lengths(_pull_row(differential, row, eigenvector)), climbed_lengths]) ** 2
        return (
            count + 1,
            jnp.maximum(lower, value),
            jnp.where(value > lower, climbed, y),
            jnp.minimum(upper, proved),
            jax.lax.dynamic_update_slice_in_dim(atoms, seen, filled, axis=0),
        )

    state = jnp.int32(0), values[best], ys[best], upper, atoms
    _, lower, y, upper, _ = jax.lax.while_loop(unsettled, certify, state)
    return lower, y, jnp.where(jnp.isnan(lower), jnp.nan, upper)
