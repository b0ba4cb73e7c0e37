r"""Products of Jacobians through a chain of residual sublayers, matrix-free and exact on every probe.

A sublayer adds a branch to its stream, ``X_{k+1} = join_k(X_k, branch_k(X_k))``: a pre-norm one joins by ``X + B``, a
post-norm one by ``LN(X + B)``. With ``N_k`` and ``M_k`` the derivatives of the join in its two arguments and ``F_k``
that of the branch, the Jacobian is ``A_k = N_k + M_k F_k``. The product from depth ``l`` to ``m`` expands by how many
branches a path enters::

    P = A_{m-1} ... A_l  =  prod_k N_k  +  sum_k (prod_{j>k} N_j) M_k F_k (prod_{j<k} N_j)  +  (two branches or more)
                             bare           first                                               rest

Pre-norm has ``N_k = I``: `bare` is the identity term of Theorem 4.5 and `first` is ``sum_k J_k``. Post-norm has
``N_k = J_LN(Y_k)``: `bare` is the LayerNorm-only term of Theorem 4.6. Each term obeys its own recursion in ``k``, so
one sweep over the depth carries all of them for a probe, forwards (`push_terms`, tangents) or backwards (`pull_terms`,
gradients), and no Jacobian is formed.

Memory is that of one activation a sublayer, kept in the `Chain`, of the probes, and of the inside of one sublayer. The
sweep is a scan: 72 sublayers compile as fast as 8. For many probes use `jax.vmap`: each sublayer is linearised once.

Source: S. M. Emadi, arXiv 2602.18849, Theorems 4.5 and 4.6; the sweeps are ours.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from sens import checks
from sens.decompose import svd

Params = Any
Stream = Float[Array, "..."]
Depth = int | Int[Array, ""]
Collect = Callable[[Int[Array, ""], Any], Any]


class Sublayer(NamedTuple):
    """``x -> join(params, x, branch(params, x))``, a map of the stream onto its own shape.

    A map without residual is the branch itself with ``join = lambda params, x, b: b``: its bare term is zero.
    """

    branch: Callable[[Params, Stream], Array]
    join: Callable[[Params, Stream, Array], Stream]


@dataclasses.dataclass(frozen=True)
class Chain:
    """Sublayers in a repeating order, and the points at which a forward pass visits them (`chain`)."""

    sublayers: tuple[Sublayer, ...]
    """One period: sublayer `k` of the chain is ``sublayers[k % period]`` with ``params[k // period]``."""
    params: Params
    """Arrays with a leading axis of periods."""
    points: Float[Array, "depth ..."]
    """``X_k``, what enters sublayer `k`."""
    end: Float[Array, "..."]
    """``X_depth``, what leaves the last."""

    @property
    def depth(self) -> int:
        return self.points.shape[0]


class Terms(NamedTuple):
    """A product applied to one vector, and its parts that enter no branch and exactly one; `rest` completes the sum."""

    total: Stream
    bare: Stream
    first: Stream

    @property
    def rest(self) -> Stream:
        """Paths through two branches or more: the difference, to the rounding of the largest part."""
        return self.total - self.bare - self.first


def chain(sublayers: Sequence[Sublayer], params: Params, x: Stream) -> Chain:
    """Run a stream through every sublayer and keep the points.

    Args:
      sublayers: one period of them.
      params: arrays whose leading axis counts periods.
      x: the stream that enters the first.

    Raises:
      ValueError: no sublayer, no period, or a sublayer that changes the shape or dtype of the stream.

    Example:
      >>> doubling = Sublayer(branch=lambda a, x: a * x, join=lambda a, x, b: x + b)
      >>> linked = chain([doubling], jnp.ones(3), jnp.array([1.0]))
      >>> print(linked.points.ravel(), linked.end, push(linked, jnp.array([1.0]), 0, 2))
      [1. 2. 4.] [8.] [4.]
    """
    sublayers = tuple(sublayers)
    periods = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(params)}
    if not sublayers or len(periods) != 1 or next(iter(periods)) in ((), (0,)):
        raise ValueError(
            "a chain wants at least one sublayer, and parameters with one leading axis, of at least one period; "
            f"got {len(sublayers)} sublayers and leading axes {sorted(periods)}"
        )

    def period(x: Stream, params: Params) -> tuple[Stream, Array]:
        points = []
        for sublayer in sublayers:
            points.append(x)
            x = sublayer.join(params, x, sublayer.branch(params, x))
            if x.shape != points[0].shape or x.dtype != points[0].dtype:
                raise ValueError(f"a sublayer turned {points[0].dtype}{points[0].shape} into {x.dtype}{x.shape}")
        return x, jnp.stack(points)

    end, points = jax.lax.scan(period, x, params)
    return Chain(sublayers, params, points.reshape(-1, *x.shape), end)


def bare_chain(linked: Chain) -> Chain:
    """The chain with every branch held at its value: its products are the `bare` terms, for the cost of the joins."""

    def values(params: Params, points: Array) -> tuple[Array, ...]:
        return tuple(s.branch(params, x) for s, x in zip(linked.sublayers, points, strict=True))

    points = linked.points.reshape(-1, len(linked.sublayers), *linked.points.shape[1:])
    branches = jax.lax.map(lambda layer: values(*layer), (linked.params, points))

    def held(position: int, sublayer: Sublayer) -> Sublayer:
        return Sublayer(
            branch=lambda params, _: params[1][position], join=lambda params, x, b: sublayer.join(params[0], x, b)
        )

    sublayers = tuple(held(position, sublayer) for position, sublayer in enumerate(linked.sublayers))
    return dataclasses.replace(linked, sublayers=sublayers, params=(linked.params, branches))


def push(linked: Chain, v: Stream, start: Depth, stop: Depth) -> Stream:
    """``P v``, the tangent `v` at depth `start` carried to depth `stop`; linear in `v` and transposable.

    Raises:
      ValueError: unless ``0 <= start < stop <= depth`` and `v` has the shape of the stream. Depths known only inside
        `jax.jit` give NaN when they are out of order or out of the chain.
    """
    return _forward(linked, lambda maps, v: maps.join(v, maps.branch(v)), v, v, start, stop, None)[0]


def pull(linked: Chain, u: Stream, start: Depth, stop: Depth) -> Stream:
    """``P^T u``, the cotangent `u` at depth `stop` carried back to depth `start`; raises as `push` does."""
    return _backward(linked, _pull_through, u, u, start, stop, None)[0]


def push_terms(
    linked: Chain, v: Stream, start: Depth, stop: Depth, collect: Collect | None = None
) -> tuple[Terms, Any]:
    """The terms of ``P v``, and `collect` of them along the way.

    `collect(k, terms)` is called after sublayer `k` with the terms at depth ``k + 1``; its results are stacked over all
    of the chain's sublayers (those outside the range see the vector as it stands).
    """

    def act(maps: _Maps, terms: Terms) -> Terms:
        return Terms(
            total=maps.join(terms.total, maps.branch(terms.total)),
            bare=maps.join(terms.bare, maps.zero),
            first=maps.join(terms.first, maps.branch(terms.bare)),
        )

    return _forward(linked, act, v, Terms(v, v, jnp.zeros_like(v)), start, stop, collect)


def pull_terms(
    linked: Chain, u: Stream | Terms, start: Depth, stop: Depth, collect: Collect | None = None
) -> tuple[Terms, Any]:
    """The terms of ``P^T u``, and `collect` of them along the way: one pass serves every depth before `stop`.

    Instead of a cotangent `u` may be the terms that a chain above this one gave: the two then act as one chain.

    `collect(k, terms)` is called after sublayer `k` with the terms at depth ``k``, those of the product from `k` to
    `stop`; its results are stacked over all of the chain's sublayers (those outside the range see the vector as it
    stands).

    Under `jax.vmap` a sublayer is linearised once, and pulls for eight probes at a time. This has no reverse derivative
    of its own (`pull` has).
    """

    def act(maps: _Maps, terms: Terms) -> Terms:
        total, of_total = maps.join(terms.total)
        bare, of_bare = maps.join(terms.bare)
        entered = maps.branch(jnp.stack([of_total, of_bare]))
        return Terms(total=total + entered[0], bare=bare, first=maps.join(terms.first)[0] + entered[1])

    terms = u if isinstance(u, Terms) else Terms(u, u, jnp.zeros_like(u))
    return _backward(linked, act, terms.total, terms, start, stop, collect, _a_few_at_a_time)


class _Maps(NamedTuple):
    """A sublayer linearised at its point: pushes ``branch(v)``, ``join(v, b)``, or pulls ``branch(c)``, ``join(c)``.

    In `pull_terms` `branch` pulls several cotangents, stacked.
    """

    branch: Callable[..., Any]
    join: Callable[..., Any]
    zero: Array  # tangent or cotangent of the branch's value


def _pull_through(maps: _Maps, u: Stream) -> Stream:
    skipped, into_branch = maps.join(u)
    return skipped + maps.branch(into_branch)


def _forward(linked, act, v, carry, start, stop, collect):
    def linearised(sublayer: Sublayer, params: Params, x: Stream) -> _Maps:
        b, branch = jax.linearize(lambda x: sublayer.branch(params, x), x)
        _, join = jax.linearize(lambda x, b: sublayer.join(params, x, b), x, b)
        return _Maps(branch, join, jnp.zeros_like(b))

    return _sweep(linked, act, linearised, v, carry, start, stop, collect, reverse=False)


@jax.custom_batching.custom_vmap
def _a_few_at_a_time(branch: Callable[[Array], tuple[Stream]], cotangents: Array) -> Array:
    return jax.vmap(lambda cotangent: branch(cotangent)[0])(cotangents)


@_a_few_at_a_time.def_vmap
def _(axis_size: int, in_batched: Any, *arguments: Any) -> tuple[Array, bool]:
    """Vmapped, those of eight probes at a time: few keep a CPU's cores waiting, many outgrow its caches."""
    del axis_size
    leaves, tree = jax.tree.flatten(arguments)
    batched = jax.tree.leaves(in_batched)

    def pulled(mapped: list[Array]) -> Array:
        each = iter(mapped)
        own = [next(each) if is_batched else leaf for leaf, is_batched in zip(leaves, batched, strict=True)]
        branch, cotangents = tree.unflatten(own)
        return jax.vmap(lambda cotangent: branch(cotangent)[0])(cotangents)

    mapped = [leaf for leaf, is_batched in zip(leaves, batched, strict=True) if is_batched]
    return jax.lax.map(pulled, mapped, batch_size=8), True


def _backward(linked, act, u, carry, start, stop, collect, apply=lambda branch, c: branch(c)[0]):
    def linearised(sublayer: Sublayer, params: Params, x: Stream) -> _Maps:
        b, branch = jax.vjp(lambda x: sublayer.branch(params, x), x)
        _, join = jax.vjp(lambda x, b: sublayer.join(params, x, b), x, b)
        return _Maps(lambda c: apply(branch, c), join, jnp.zeros_like(b))

    return _sweep(linked, act, linearised, u, carry, start, stop, collect, reverse=True)


def _sweep(
    linked: Chain,
    act: Callable[[_Maps, Any], Any],
    linearised: Callable[[Sublayer, Params, Stream], _Maps],
    vector: Stream,
    carry: Any,
    start: Depth,
    stop: Depth,
    collect: Collect | None,
    *,
    reverse: bool,
) -> tuple[Any, Any]:
    """Carry what `act` acts on through the sublayers of the range; the other ones are skipped at run time."""
    carry = _checked(linked, vector, carry, start, stop)
    period = len(linked.sublayers)
    positions = range(period - 1, -1, -1) if reverse else range(period)

    def body(carry, layer):
        index, params, points = layer
        collected = [None] * period
        for position in positions:
            k = index * period + position
            sublayer, x = linked.sublayers[position], points[position]
            carry = jax.lax.cond(
                (start <= k) & (k < stop),
                lambda carry, s=sublayer, x=x: act(linearised(s, params, x), carry),
                lambda carry: carry,
                carry,
            )
            collected[position] = None if collect is None else collect(k, carry)
        return carry, jax.tree.map(lambda *figures: jnp.stack(figures), *collected)

    points = linked.points.reshape(-1, period, *linked.points.shape[1:])
    layers = jnp.arange(points.shape[0], dtype=jnp.int32), linked.params, points
    # Differentiated (a product as somebody's linear map), the body is computed again instead of stored.
    carry, collected = jax.lax.scan(jax.checkpoint(body, prevent_cse=False), carry, layers, reverse=reverse)
    return carry, jax.tree.map(lambda figures: figures.reshape(-1, *figures.shape[2:]), collected)


def _checked(linked: Chain, vector: Stream, carry: Any, start: Depth, stop: Depth) -> Any:
    if vector.shape != linked.end.shape or vector.dtype != linked.end.dtype:
        raise ValueError(
            f"the vector is {vector.dtype}{vector.shape}, the chain's stream {linked.end.dtype}{linked.end.shape}"
        )
    for depth in (start, stop):
        if not jnp.issubdtype(jnp.result_type(depth), jnp.integer):
            raise TypeError(f"depths are whole numbers of sublayers, got {depth}")
    in_order = (start >= 0) & (start < stop) & (stop <= linked.depth)
    if checks.is_traced(in_order):
        return jax.tree.map(lambda leaf: jnp.where(in_order, leaf, jnp.nan), carry)
    if not in_order:
        raise ValueError(f"depths must be 0 <= start < stop <= {linked.depth}, got start {start} and stop {stop}")
    return carry


class SingularValues(NamedTuple):
    """The largest singular values of a linear map, each with how far from one it may be."""

    values: Float[Array, " count"]
    """Descending; the first is attained, so a lower bound of the norm."""
    residuals: Float[Array, " count"]
    """Some singular value of the map lies within this distance of the value."""
    converged: Bool[Array, " count"]
    """``residual <= rtol * value``."""


def singular_values(
    push: Callable[[Stream], Array],
    pull: Callable[[Array], Stream],
    start: Stream,
    *,
    count: int = 4,
    steps: int = 24,
    rtol: float = 1e-2,
) -> SingularValues:
    r"""The largest singular values of a linear map by Golub-Kahan bidiagonalisation with full reorthogonalisation.

    After `steps` products with the map and its transpose ``A V = U B`` and ``A^T U = V B^T + beta v e^T`` hold with
    ``B`` bidiagonal. A singular triplet ``(sigma, p, q)`` of ``B`` gives ``A V q = sigma U p`` exactly, and
    ``A^T U p = sigma V q + (beta p_last) v``, whose last term is the residual.

    Args:
      push: the map.
      pull: its transpose.
      start: a random vector of the map's domain.
      count: how many values.
      steps: most products; memory is ``2 steps`` vectors. No more are taken than the domain has dimensions.
      rtol: relative residual at which a value counts as converged.

    Raises:
      ValueError: `count` or `steps` below one, or fewer steps than values; an rtol that is not positive; a start that
        is zero or not finite (inside jit: NaN).

    Example:
      >>> A = jnp.diag(jnp.array([3.0, 2.0, 1.0]))
      >>> found = singular_values(lambda v: A @ v, lambda u: A.T @ u, jnp.ones(3), count=2)
      >>> print([f"{value:.3f}" for value in found.values], found.converged)
      ['3.000', '2.000'] [ True  True]
    """
    steps = min(steps, start.size)
    if not 1 <= count <= steps:
        raise ValueError(
            f"count must be from 1 to the number of steps ({steps} on {start.size} dimensions), got {count}"
        )
    if not 0 < rtol < math.inf:
        raise ValueError(f"rtol must be positive, got {rtol}")
    length = jnp.linalg.norm(start.ravel())
    directed = (length > 0) & (length < jnp.inf)
    if not checks.is_traced(directed) and not directed:
        raise ValueError(f"start must be finite and not zero, got one of length {length}")
    image = jax.eval_shape(push, start)
    tiny = 16 * jnp.finfo(start.dtype).eps

    def orthonormal(vector: Array, basis: Array, scale: Array) -> tuple[Array, Array]:
        """The vector's unit part outside the basis, and its length; zero where only rounding is left of it."""
        for _ in range(2):  # twice is enough (Kahan)
            vector = vector - basis.T @ (basis @ vector)
        length = jnp.linalg.norm(vector)
        length = jnp.where(length > tiny * scale, length, 0)
        return vector / jnp.where(length > 0, length, 1), length

    def step(k: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
        U, V, alphas, betas, scale = state
        pushed = push(V[k].reshape(start.shape)).ravel()
        scale = jnp.maximum(scale, jnp.linalg.norm(pushed))
        u, alpha = orthonormal(pushed, U, scale)
        v, beta = orthonormal(pull(u.reshape(image.shape)).ravel(), V, scale)
        return U.at[k].set(u), V.at[k + 1].set(v), alphas.at[k].set(alpha), betas.at[k].set(beta), scale

    zero = jnp.zeros((), start.dtype)
    first = start.ravel() / length
    state = (
        jnp.zeros((steps, image.size), start.dtype),
        jnp.zeros((steps + 1, start.size), start.dtype).at[0].set(first),
        jnp.zeros(steps, start.dtype),
        jnp.zeros(steps, start.dtype),
        zero,
    )
    _, _, alphas, betas, _ = jax.lax.fori_loop(0, steps, step, state)
    P, values = svd(jnp.diag(alphas) + jnp.diag(betas[:-1], 1))
    values = jnp.where(directed, values, jnp.nan)
    residuals = betas[-1] * jnp.abs(P[-1])
    return SingularValues(values[:count], residuals[:count], residuals[:count] <= rtol * values[:count])
