"""Products through depth against dense products, the network's own autodiff, and the paper's examples."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sens import operators, products, spectral
from sens.products import Sublayer

TOKENS, WIDTH, PERIODS = 3, 4, 3
DEPTH = 2 * PERIODS
EPS = 1e-3


def layer_norm(x, gamma):
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    return gamma[None, :] * centred / jnp.sqrt(jnp.mean(centred**2, axis=-1, keepdims=True) + EPS)


def mix(w, u):
    return jax.nn.softmax(u @ u.T, axis=-1) @ u @ w


def feed(w, u):
    return jnp.tanh(u @ w) @ w.T


def network(placement, dtype=np.float64, periods=PERIODS, seed=0):
    """Sublayers, stacked parameters and a stream: mixing and feeding in turn, with the norm before or after the sum."""
    if placement == "pre":
        join = {name: lambda p, x, b: x + b for name in ("mix", "feed")}
        sublayers = (
            Sublayer(lambda p, x: mix(p["mix"], layer_norm(x, p["gamma"])), join["mix"]),
            Sublayer(lambda p, x: feed(p["feed"], layer_norm(x, p["gamma"])), join["feed"]),
        )
    else:
        sublayers = (
            Sublayer(lambda p, x: mix(p["mix"], x), lambda p, x, b: layer_norm(x + b, p["gamma"])),
            Sublayer(lambda p, x: feed(p["feed"], x), lambda p, x, b: layer_norm(x + b, p["gamma"])),
        )
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    params = {
        "mix": 0.4 * draw(periods, WIDTH, WIDTH),
        "feed": 0.4 * draw(periods, WIDTH, WIDTH),
        "gamma": 1 + 0.3 * draw(periods, WIDTH),
    }
    return sublayers, params, draw(TOKENS, WIDTH)


def at(params, k):
    return jax.tree.map(lambda leaf: leaf[k // 2], params)


def applied(sublayers, params, x, start, stop):
    """The network from depth `start` to depth `stop`, as an ordinary function."""
    for k in range(start, stop):
        p = at(params, k)
        x = sublayers[k % 2].join(p, x, sublayers[k % 2].branch(p, x))
    return x


@functools.cache
def programs(placement):
    """A chain and, each compiled once for every range, its products."""
    linked = products.chain(*network(placement))
    names = ("push", "pull", "push_terms", "pull_terms")
    return linked, {name: jax.jit(functools.partial(getattr(products, name), linked)) for name in names}


@functools.cache
def matrices(placement):
    """Dense derivatives of every sublayer: whole, and with its branch held."""
    linked, _ = programs(placement)

    def both(sublayer, p, x):
        b = sublayer.branch(p, x)
        whole = jax.jacfwd(lambda x: sublayer.join(p, x, sublayer.branch(p, x)))(x)
        skipped = jax.jacfwd(lambda x: sublayer.join(p, x, b))(x)
        return whole.reshape(x.size, x.size), skipped.reshape(x.size, x.size)

    compute = [jax.jit(functools.partial(both, sublayer)) for sublayer in linked.sublayers]
    return [jax.device_get(compute[k % 2](at(linked.params, k), linked.points[k])) for k in range(DEPTH)]


def dense_terms(placement, start, stop):
    """Total, bare and first by matrices."""
    total, bare, first = np.eye(TOKENS * WIDTH), np.eye(TOKENS * WIDTH), np.zeros((TOKENS * WIDTH,) * 2)
    for whole, skipped in matrices(placement)[start:stop]:
        first = skipped @ first + (whole - skipped) @ bare
        total, bare = whole @ total, skipped @ bare
    return total, bare, first


RANGES = [(0, DEPTH), (0, 1), (1, 2), (1, 4), (2, 5), (3, DEPTH)]


@pytest.mark.parametrize("placement", ["pre", "post"])
@pytest.mark.parametrize(("start", "stop"), RANGES)
def test_terms_match_dense_products(placement, start, stop, rng):
    _, run = programs(placement)
    v, u = (jnp.asarray(rng.normal(size=(TOKENS, WIDTH))) for _ in range(2))
    forward, _ = run["push_terms"](v, start, stop)
    backward, _ = run["pull_terms"](u, start, stop)
    for name, matrix in zip(("total", "bare", "first"), dense_terms(placement, start, stop), strict=True):
        np.testing.assert_allclose(getattr(forward, name).ravel(), matrix @ v.ravel(), rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(getattr(backward, name).ravel(), matrix.T @ u.ravel(), rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(forward.bare + forward.first + forward.rest, forward.total, rtol=1e-14, atol=1e-14)
    if stop - start == 1:  # one branch at most
        np.testing.assert_allclose(forward.rest, 0, atol=1e-13)


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_push_and_pull_match_the_whole_networks_autodiff(placement, rng):
    linked, run = programs(placement)
    for start, stop in [(0, DEPTH), (1, 4)]:
        whole = functools.partial(applied, linked.sublayers, linked.params, start=start, stop=stop)
        v, u = (jnp.asarray(rng.normal(size=(TOKENS, WIDTH))) for _ in range(2))
        value, pushed = jax.jit(lambda x, v, f=whole: jax.jvp(f, (x,), (v,)))(linked.points[start], v)
        pulled = jax.jit(lambda x, u, f=whole: jax.vjp(f, x)[1](u)[0])(linked.points[start], u)
        np.testing.assert_allclose(value, linked.end if stop == DEPTH else linked.points[stop], rtol=1e-12)
        np.testing.assert_allclose(run["push"](v, start, stop), pushed, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(run["pull"](u, start, stop), pulled, rtol=1e-10, atol=1e-12)


@pytest.mark.float32
@pytest.mark.parametrize("placement", ["pre", "post"])
def test_push_and_pull_are_adjoint(placement, dtype, rng):
    linked = products.chain(*network(placement, dtype))
    v, u = (jnp.asarray(rng.normal(size=(TOKENS, WIDTH)), dtype) for _ in range(2))
    pushed, pulled = products.push(linked, v, 1, 5), products.pull(linked, u, 1, 5)
    assert pushed.dtype == pulled.dtype == dtype
    tolerance = 50 * float(jnp.finfo(dtype).eps * jnp.linalg.norm(u) * jnp.linalg.norm(pushed))
    np.testing.assert_allclose(jnp.sum(u * pushed), jnp.sum(v * pulled), atol=tolerance)


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_one_sweep_collects_every_depth(placement, rng):
    linked, run = programs(placement)
    w = jnp.asarray(rng.normal(size=(TOKENS, WIDTH)))
    _, ahead = products.push_terms(linked, w, 1, DEPTH, collect=lambda k, terms: (k, terms))
    _, back = products.pull_terms(linked, w, 0, 5, collect=lambda k, terms: (k, terms))
    np.testing.assert_array_equal(ahead[0], np.arange(DEPTH))
    np.testing.assert_array_equal(back[0], np.arange(DEPTH))
    for k in range(1, 5):
        to_here, from_here = run["push_terms"](w, 1, k + 1)[0], run["pull_terms"](w, k, 5)[0]
        for name in ("total", "bare", "first"):
            np.testing.assert_allclose(getattr(ahead[1], name)[k], getattr(to_here, name), rtol=1e-12, atol=1e-14)
            np.testing.assert_allclose(getattr(back[1], name)[k], getattr(from_here, name), rtol=1e-12, atol=1e-14)
    np.testing.assert_array_equal(ahead[1].total[0], w)  # not in the range: as it stands
    np.testing.assert_array_equal(back[1].total[5], w)


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_bare_chain_multiplies_the_bare_terms(placement, rng):
    linked, run = programs(placement)
    held = products.bare_chain(linked)
    w = jnp.asarray(rng.normal(size=(TOKENS, WIDTH)))
    np.testing.assert_allclose(products.push(held, w, 1, 5), run["push_terms"](w, 1, 5)[0].bare, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(products.pull(held, w, 1, 5), run["pull_terms"](w, 1, 5)[0].bare, rtol=1e-12, atol=1e-14)


def test_many_probes_and_depths_known_only_at_run_time(rng):
    linked, run = programs("post")
    probes = jnp.asarray(rng.normal(size=(5, TOKENS, WIDTH)))

    @jax.jit
    @chex.assert_max_traces(n=1)
    def one_program(probes, start, stop):
        return jax.vmap(lambda v: products.push(linked, v, start, stop))(probes)

    for start, stop in RANGES:
        expected = [run["push"](v, start, stop) for v in probes]
        np.testing.assert_allclose(one_program(probes, start, stop), expected, rtol=1e-12)
    for start, stop in [(-1, 2), (2, 2), (4, 3), (0, DEPTH + 1)]:
        assert np.isnan(one_program(probes, start, stop)).all()


@pytest.mark.parametrize("count", [3, 11])
def test_pulls_for_several_probes_are_those_of_each(rng, count):
    """Fewer than go through a sublayer at a time, and more, with some left over."""
    linked, run = programs("post")
    probes = jnp.asarray(rng.normal(size=(count, TOKENS, WIDTH)))
    together = jax.jit(jax.vmap(lambda u: products.pull_terms(linked, u, 1, 5)[0]))(probes)
    for number, u in enumerate(probes):
        for found, wanted in zip(together, run["pull_terms"](u, 1, 5)[0], strict=True):
            np.testing.assert_allclose(found[number], wanted, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (2, 2), (4, 3), (0, DEPTH + 1)])
@pytest.mark.parametrize("product", [products.push, products.pull, products.push_terms, products.pull_terms])
def test_a_range_out_of_order_or_out_of_the_chain_is_refused(product, start, stop):
    linked, _ = programs("pre")
    with pytest.raises(ValueError, match=f"<= {DEPTH}, got start {start} and stop {stop}"):
        product(linked, linked.end, start, stop)


def test_what_does_not_fit_is_refused():
    linked, _ = programs("pre")
    sublayers, params, x = linked.sublayers, linked.params, linked.end
    with pytest.raises(ValueError, match=r"float64\(3,\), the chain's stream float64\(3, 4\)"):
        products.push(linked, jnp.ones(3), 0, 1)
    with pytest.raises(ValueError, match="float32"):
        products.pull(linked, jnp.ones((TOKENS, WIDTH), jnp.float32), 0, 1)
    with pytest.raises(ValueError, match="at least one sublayer"):
        products.chain([], params, x)
    with pytest.raises(ValueError, match="at least one period"):
        products.chain(sublayers, jax.tree.map(lambda leaf: leaf[:0], params), x)
    halving = Sublayer(lambda p, x: x[:, :2], lambda p, x, b: b)
    with pytest.raises(ValueError, match=r"turned float64\(3, 4\) into float64\(3, 2\)"):
        products.chain([halving], params, x)


def test_the_program_does_not_grow_with_depth():
    def program(periods):
        sublayers, params, x = network("post", periods=periods)

        def terms(params, x, u):
            linked = products.chain(sublayers, params, x)
            return products.pull_terms(linked, u, 0, linked.depth, lambda k, terms: jnp.sum(terms.total**2))[1]

        compiled = jax.jit(terms).lower(params, x, x).compile()
        points = 2 * periods * x.nbytes
        memory = compiled.memory_analysis()
        assert memory is not None
        return len(str(jax.make_jaxpr(terms)(params, x, x)).splitlines()), memory.temp_size_in_bytes, points

    (short, few, few_points), (long, many, many_points) = program(4), program(36)
    assert long == short
    # Beside one stored point a sublayer (held twice: stacked by period and flat) nothing may grow.
    assert many - few < 3 * (many_points - few_points)


def test_a_product_is_a_linear_map_for_the_norms():
    linked, run = programs("post")
    matrix, *_ = dense_terms("post", 1, 5)

    def product(v):
        return products.push(linked, v, 1, 5)

    zero = jnp.zeros_like(linked.end)
    transposed = jax.linear_transpose(product, zero)
    np.testing.assert_allclose(transposed(linked.end)[0], run["pull"](linked.end, 1, 5), rtol=1e-12)
    norm = jax.jit(lambda zero: spectral.spectral_norm(product, zero, key=jax.random.key(0)))(zero)
    top = np.linalg.svd(matrix, compute_uv=False)[0]
    assert norm.lower <= top * (1 + 1e-12)
    assert top <= norm.upper
    assert norm.converged
    block = jax.jit(lambda zero: operators.block_operator_norm(product, zero, key=jax.random.key(1)))(zero)
    assert block.converged
    # ||P||_{inf,2} lies between the norm of one row of blocks and the sum of the norms of its blocks.
    blocks = matrix.reshape(TOKENS, WIDTH, TOKENS, WIDTH).transpose(0, 2, 1, 3)
    sums = np.linalg.norm(blocks, 2, axis=(2, 3)).sum(axis=1).max()
    assert np.linalg.norm(matrix.reshape(TOKENS, WIDTH, -1), 2, axis=(1, 2)).max() <= block.upper
    assert block.lower <= sums * (1 + 1e-12)


# The paper's examples.


@given(a=st.floats(0.01, 0.9), half=st.integers(1, 30))
@settings(deadline=None, max_examples=25)
def test_the_alternating_scalar_chain_decays_beside_its_identity_term(a, half):
    terms, _ = alternating(a, 2 * half)
    np.testing.assert_allclose(terms.total, (1 - a**2) ** half, rtol=1e-12)
    np.testing.assert_array_equal(terms.bare, 1.0)
    np.testing.assert_allclose(terms.first, 0.0, atol=1e-14)
    np.testing.assert_allclose(terms.rest, (1 - a**2) ** half - 1, rtol=1e-12, atol=1e-14)


@jax.jit
def alternating(a, stop):
    """x_{k+1} = x_k + (-1)^k a x_k, 60 of them."""
    flip = Sublayer(lambda scale, x: scale * x, lambda scale, x, b: x + b)
    linked = products.chain([flip], a * jnp.tile(jnp.array([1.0, -1.0]), 30), jnp.ones(1))
    return products.push_terms(linked, jnp.ones(1), 0, stop)


def norm_only(y, gamma):
    """One post-norm sublayer without a branch, at the point `y`."""
    sublayer = Sublayer(lambda p, x: jnp.zeros_like(x), lambda p, x, b: layer_norm(x + b, p))
    return products.chain([sublayer], gamma[None], y)


def test_the_layer_norm_jacobian_kills_ones_and_shrinks_its_input(rng):
    y, gamma = jnp.asarray(rng.normal(size=(TOKENS, WIDTH))), jnp.asarray(1 + 0.3 * rng.normal(size=WIDTH))
    linked = norm_only(y, gamma)
    np.testing.assert_allclose(products.push(linked, jnp.ones_like(y), 0, 1), 0, atol=1e-15)
    centred = y - jnp.mean(y, axis=1, keepdims=True)
    sigma = jnp.sqrt(jnp.mean(centred**2, axis=1, keepdims=True) + EPS)
    expected = gamma[None, :] / sigma * (EPS / sigma**2) * centred
    np.testing.assert_allclose(products.push(linked, centred, 0, 1), expected, rtol=1e-10)
    closed = [
        np.diag(gamma) / s @ (np.eye(WIDTH) - np.ones((WIDTH, WIDTH)) / WIDTH - np.outer(c, c) / (WIDTH * s**2))
        for s, c in zip(np.asarray(sigma).ravel(), np.asarray(centred), strict=True)
    ]
    v = jnp.asarray(rng.normal(size=y.shape))
    np.testing.assert_allclose(products.push(linked, v, 0, 1), np.einsum("tij,tj->ti", closed, v), rtol=1e-10)


@pytest.mark.float32
def test_zeroed_branches_leave_the_identity_before_and_none_after(dtype, rng):
    u = jnp.asarray(rng.normal(size=(TOKENS, WIDTH)), dtype)
    for placement in ("pre", "post"):
        sublayers, params, x = network(placement, dtype)
        linked = products.chain(sublayers, {**params, "mix": 0 * params["mix"], "feed": 0 * params["feed"]}, x)
        terms, _ = products.pull_terms(linked, u, 0, DEPTH)
        np.testing.assert_array_equal(terms.total, terms.bare)
        np.testing.assert_array_equal(terms.first, 0)
        if placement == "pre":
            np.testing.assert_array_equal(terms.total, u)
        else:
            ones = jnp.ones_like(u)
            np.testing.assert_allclose(products.push(linked, ones, 0, 1), 0, atol=float(100 * jnp.finfo(dtype).eps))


def test_the_tokenwise_bound_lifts_to_the_sequence():
    linked, _ = programs("post")
    _, bare, _ = dense_terms("post", 0, DEPTH)
    a = []
    for k in range(DEPTH):
        p = at(linked.params, k)
        y = linked.points[k] + linked.sublayers[k % 2].branch(p, linked.points[k])
        a.append(np.max(np.abs(p["gamma"])) / np.sqrt(np.var(y, axis=1) + EPS))
    a = np.asarray(a)
    norm = np.linalg.norm(bare, 2)
    assert norm <= a.prod(axis=0).max() <= a.max(axis=1).prod() * (1 + 1e-12)
    # No token is mixed with another: the norm is that of the worst token's own block.
    blocks = bare.reshape(TOKENS, WIDTH, TOKENS, WIDTH)
    np.testing.assert_allclose(norm, max(np.linalg.norm(blocks[i, :, i], 2) for i in range(TOKENS)), rtol=1e-12)


def test_singular_values_of_a_product_through_depth():
    linked, _ = programs("post")
    matrix, *_ = dense_terms("post", 0, DEPTH)

    @jax.jit
    def found(start):
        return products.singular_values(
            lambda v: products.push(linked, v, 0, DEPTH), lambda u: products.pull(linked, u, 0, DEPTH), start, count=3
        )

    measured = found(jax.random.normal(jax.random.key(0), linked.end.shape))
    np.testing.assert_allclose(measured.values, np.linalg.svd(matrix, compute_uv=False)[:3], rtol=1e-9)
    np.testing.assert_allclose(measured.residuals, 0, atol=1e-9)


def test_depths_and_periods_that_do_not_fit_are_refused():
    sublayer = Sublayer(lambda a, x: a[0] * a[1] * x, lambda a, x, b: x + b)
    with pytest.raises(ValueError, match=r"got 1 sublayers and leading axes \[\(2,\), \(3,\)\]"):
        products.chain([sublayer], (jnp.ones(3), jnp.ones(2)), jnp.ones(4))
    linked = products.chain([sublayer], (jnp.ones(3), jnp.ones(3)), jnp.ones(4))
    with pytest.raises(TypeError, match=r"whole numbers of sublayers, got 0\.5"):
        products.push(linked, jnp.ones(4), 0.5, 2)  # pyright: ignore[reportArgumentType]
