r"""Averaged partial Jacobian norms of random pre-norm transformers: the recursion that the measured ones are held to.

``APJN(l) = E ||d h_N / d h_l||_F^2 / dim`` over random weights, for blocks of attention and a ReLU MLP, each behind a
norm, at large width, with bidirectional attention near uniform over ``n`` tokens (queries and keys small, their path
off). The state is that of a pair of tokens: ``q`` the mean square of an entry, ``p`` the mean product of the entries of
two tokens; going back, ``J`` the squared gain within a token and ``K`` across two.

Source: Doshi et al., arXiv 2111.12143; for transformers Alekseev, arXiv 2604.11890. Here ``n`` is finite: a mean over
tokens has mean square ``(q + (n - 1) p) / n``, of many tokens ``p``. That limit gives 7.87 in the first example below.
"""

import math
from collections.abc import Callable
from typing import NamedTuple


class Moments(NamedTuple):
    """Of a norm's output on two tokens with mean square ``q`` and mean product ``p``."""

    q: float
    """Mean square of an entry."""
    p: float
    """Mean product of the entries of two tokens."""
    q_slope: float
    """Mean square of the derivative."""
    p_slope: float
    """Mean product of the derivatives at two tokens."""


Norm = Callable[[float, float], Moments]


def layer_norm(q: float, p: float) -> Moments:
    """LayerNorm and RMSNorm at large width: ``x / sqrt(q)``.

    >>> layer_norm(4.0, 1.0)
    Moments(q=1.0, p=0.25, q_slope=0.25, p_slope=0.25)
    """
    return Moments(1.0, p / q, 1 / q, 1 / q)


def derf(alpha: float = 1.0) -> Norm:
    """The normalisation-free ``erf(alpha x)``, entry by entry, on Gaussian entries.

    >>> moments = derf(1.0)(1e-4, 0.0)
    >>> print(f"{moments.q / 1e-4:.4f} {4 / math.pi:.4f}")
    1.2730 1.2732
    """
    if not 0 < alpha < math.inf:
        raise ValueError(f"alpha must be positive, got {alpha}")
    slope, a = 4 * alpha**2 / math.pi, 2 * alpha**2

    def moments(q: float, p: float) -> Moments:
        return Moments(
            q=2 / math.pi * math.asin(a * q / (1 + a * q)),
            p=2 / math.pi * math.asin(a * p / (1 + a * q)),
            q_slope=slope / math.sqrt(1 + 2 * a * q),
            p_slope=slope / math.sqrt((1 + a * q) ** 2 - (a * p) ** 2),
        )

    return moments


def apjn_recursion(
    q: float,
    p: float,
    blocks: int,
    tokens: int,
    *,
    attention: float = 1.0,
    mlp: float = 1.0,
    norm: Norm = layer_norm,
) -> list[float]:
    """APJN from before every block to after the last; ``blocks + 1`` numbers, the last of them one.

    Args:
      q: mean square of an entry of the stream that enters block 0.
      p: mean product of the entries of two tokens there.
      blocks: number of blocks, each attention and MLP.
      tokens: ``n``, that every token attends to equally.
      attention: ``sigma_O^2 sigma_V^2``, gain of value and output projections on unit variance.
      mlp: ``sigma_1^2 sigma_2^2``, the same of the two projections of the MLP.
      norm: moments of the norm before each: `layer_norm` (RMSNorm is the same), or ``derf(alpha)``.

    Raises:
      ValueError: fewer than one block or token, ``q, p`` that are no mean square and product, or a negative gain.

    Example:
      >>> print(f"{apjn_recursion(1.0, 0.2, 16, 16)[0]:.2f} {apjn_recursion(1.0, 0.2, 16, 16, norm=derf(1.0))[0]:.2f}")
      6.93 16.21
    """
    if not all(isinstance(count, int) and count >= 1 for count in (blocks, tokens)):
        raise ValueError(f"whole numbers of blocks and tokens, at least one, are wanted, got {blocks} and {tokens}")
    if not (q > 0 and abs(p) <= q):
        raise ValueError(f"q must be positive and |p| at most q, got q = {q} and p = {p}")
    if q + (tokens - 1) * p < 0:  # n times the mean square of the tokens' mean
        raise ValueError(f"p must be at least -q/(tokens - 1) = {-q / (tokens - 1):g} for {tokens} tokens, got {p}")
    if not (0 <= attention < math.inf and 0 <= mlp < math.inf):
        raise ValueError(f"gains must be finite and not negative, got attention = {attention} and mlp = {mlp}")
    seen = []
    for _ in range(blocks):
        before_attention = norm(q, p)
        mixed = attention * _mean(before_attention.q, before_attention.p, tokens)
        q, p = q + mixed, p + mixed
        before_mlp = norm(q, p)
        cosine = min(1.0, before_mlp.p / before_mlp.q)
        seen.append((before_attention, before_mlp, cosine))
        q, p = q + mlp * before_mlp.q / 2, p + mlp * before_mlp.q * _relu(cosine)
    within, across = 1.0, 0.0
    gains = [within]
    for before_attention, before_mlp, cosine in reversed(seen):
        within *= 1 + mlp * before_mlp.q_slope / 2
        across *= 1 + mlp * before_mlp.p_slope * _relu_slope(cosine)
        mixed = attention * _mean(within, across, tokens)
        within, across = within + before_attention.q_slope * mixed, across + before_attention.p_slope * mixed
        gains.append(within)
    return gains[::-1]


def _mean(within: float, across: float, tokens: int) -> float:
    """Mean square of a mean over tokens."""
    return (within + (tokens - 1) * across) / tokens


def _relu(cosine: float) -> float:
    """Mean product of the ReLUs of two unit Gaussians of this correlation."""
    return (math.sqrt(1 - cosine**2) + cosine * (math.pi - math.acos(cosine))) / (2 * math.pi)


def _relu_slope(cosine: float) -> float:
    """Mean product of their derivatives."""
    return 0.25 + math.asin(cosine) / (2 * math.pi)
