"""A published model on a text, layer by layer: every attention row's theta, largest entry, entropy and sink mass.

Memory is one block's parameters and one sequence's attention at a time, whatever the model's depth: a block is read,
the streams go through it, its rows become a few numbers each, and the next one is read.

Rows of padding tokens, and rows whose support is one token (the first of a causal model: p_max 1, theta 0 whatever the
model) are left out, as NaN.
"""

import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import polars as pl
from jaxtyping import Array, Bool, Float, Int

import sens
from analysis import inspect_bounds, inspect_depth
from analysis.attention import by_head, sampled_layers, summarise
from models import ModelConfig, gpt
from models.pretrained import ModelError, Pretrained, open_model
from models.pretrained.tokenizer import Tokenizer
from models.pretrained.tokenizer import load as load_tokenizer

DOMINANT = 2 / 3
"""A row with a larger atom has theta = 4 p_max (1 - p_max) < 8/9, any other at least 8/9 (the dichotomy)."""

QUANTITIES = (*sens.AttentionStats._fields, "dominant", "sink")
"""Of a row: `sens.AttentionStats`, whether p_max > 2/3 (the mean is the share of such rows), and the mass on its head's
sink, the token with the most mass over the sequence."""


Progress = Callable[[int, int], None]


@dataclasses.dataclass(frozen=True)
class Text:
    """A text cut into sequences of one length, the last one padded."""

    tokens: Int[np.ndarray, "s t"]
    where: Bool[np.ndarray, "s t"]
    """False for padding."""
    pieces: list[list[str]]
    """What each token stands for, for reading: specials in angle brackets."""
    left_out: int
    """Tokens of the text that are in no sequence."""


@dataclasses.dataclass(frozen=True)
class Inspection:
    """What `inspect` found."""

    name: str
    config: ModelConfig
    text: Text
    rows: dict[str, Float[np.ndarray, "n s h t"]]
    """The `QUANTITIES` of every row: layer, sequence, head, position of the query. NaN for a row that is left out."""
    sink: Int[np.ndarray, "n s h"]
    """The position of each head's sink."""
    layers: dict[str, Float[np.ndarray, " n"]]
    """Of every layer: root mean square of the stream that enters, largest `a_{k,i}` of its norms (Corollary A.3)."""
    bounds: pl.DataFrame | None
    """A line a layer that was chosen: Lambda and the bounds on it (`inspect_bounds`)."""
    pathways: pl.DataFrame | None
    """A line a head of those layers."""
    depth: pl.DataFrame | None
    """A line a sublayer: its Jacobian, and the product from it to the output (`inspect_depth`)."""


def read_text(path: Path) -> str:
    """The text of a file, or of standard input for `-`."""
    try:
        content = sys.stdin.buffer.read() if path == Path("-") else path.read_bytes()
        return content.decode("utf-8")
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ModelError(f"{path}: not UTF-8 text (byte {error.start})") from error


def cut(text: str, tokenizer: Tokenizer, length: int, sequences: int) -> Text:
    """The first `sequences` stretches of a text, each between the tokens that the model expects before and after.

    `ModelError` for a text without tokens, or with a single one in all, and for a length without room for two of them.
    """
    room = length - len(tokenizer.prefix) - len(tokenizer.suffix)
    if room < 2:
        raise ModelError(f"a length of {length} has no room for text; want at least {length - room + 2}")
    ids, spans = tokenizer.encode(text)
    if not ids.size:
        raise ModelError("the text is empty")
    if ids.size + length - room < 2:
        raise ModelError("the text is a single token, whose attention row is one entry; want at least two")
    starts = range(0, ids.size, room)[:sequences]
    tokens, where = np.zeros((len(starts), length), np.int32), np.zeros((len(starts), length), bool)
    words, pieces = _pieces(text, spans), []
    before, after = (
        [f"⟨{tokenizer.decode(np.array([id]))}⟩" for id in end] for end in (tokenizer.prefix, tokenizer.suffix)
    )
    for row, start in enumerate(starts):
        inner = slice(start, start + room)
        whole = [*tokenizer.prefix, *ids[inner].tolist(), *tokenizer.suffix]
        tokens[row, : len(whole)], where[row, : len(whole)] = whole, True
        pieces.append([*before, *words[inner], *after])
    longest = int(where.sum(axis=-1).max())
    return Text(tokens[:, :longest], where[:, :longest], pieces, max(0, ids.size - room * len(starts)))


def _pieces(text: str, spans: np.ndarray) -> list[str]:
    """The stretch of text of each token: from where the last one ended, so that together they are the text."""
    ends = np.maximum.accumulate(spans[:, 1])
    return [text[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)]


def prepare(
    path: Path,
    text: str,
    *,
    tokenizer: Path | None = None,
    length: int | None = None,
    sequences: int = 1,
    tau: float = 1.0,
    bounds_layers: Sequence[int] | None = (),
    bounds_length: int = 32,
    depth: bool = False,
) -> Callable[..., Inspection]:
    """`inspect` with its arguments for a model on disk and a text, to be called (with `progress`, if it is wanted).

    What can be refused is refused here, before anything is measured: of two models the second as well. The text is cut
    by the model's own tokenizer unless another's path is given, into `sequences` sequences. With `bounds_layers`
    (None: 0, N/4, N/2, 3N/4, N-1) Lambda and its bounds are measured there, on a sequence of `bounds_length` tokens
    from the text's start.
    """
    model = open_model(path)
    config = model.config
    encoder = load_tokenizer(path, config.vocab_size, model.tokenizer, tokenizer)
    cut_text = cut(text, encoder, min(512, config.context) if length is None else length, sequences)
    layers = sampled_layers(config.n_layer) if bounds_layers is None else tuple(sorted(set(bounds_layers)))
    bounds_text = cut(text, encoder, min(bounds_length, config.context), 1) if layers else None
    _check(model, layers, cut_text, bounds_text)
    name = path.resolve().stem if path.is_file() else path.resolve().name
    return functools.partial(
        inspect,
        model,
        cut_text,
        tau=tau,
        name=name + (f", τ × {tau:g}" if tau != 1 else ""),
        bounds_layers=layers,
        bounds_text=bounds_text,
        depth=depth,
    )


def inspect(
    model: Pretrained,
    text: Text,
    *,
    tau: float = 1.0,
    name: str,
    bounds_layers: Sequence[int] = (),
    bounds_text: Text | None = None,
    depth: bool = False,
    progress: Progress = lambda done, total: None,
) -> Inspection:
    """Measure every attention row of every layer; `tau` multiplies the model's own softmax temperature.

    Also measured, if asked for: Lambda and its bounds at some layers, on the first sequence of `bounds_text`; the
    products of Jacobians through depth, on the first sequence of `text`, for which every block is read a second time.

    `progress(done, total)` counts layers: once for the rows, once for the bounds, once for the depth. `ModelError`
    where the model gives numbers that are none, where the text has a token that it does not know or is longer than its
    positions, for a layer that it does not have.
    """
    config = dataclasses.replace(model.config, tau=model.config.tau * tau)
    _check(model, bounds_layers, text, bounds_text)
    steps = itertools.count(1)
    total = config.n_layer * (2 if depth else 1) + len(set(bounds_layers))
    step = lambda: progress(next(steps), total)  # noqa: E731
    ends = model.ends()
    streams = list(_embed(config, ends, jnp.asarray(text.tokens)))
    at = None if bounds_text is None else inspect_bounds.start(config, ends, jnp.asarray(bounds_text.tokens[0]))
    del ends
    figures, bounds, entering = [], [], []
    for layer in range(config.n_layer):
        block = model.block(layer)
        if depth:
            entering.append(streams[0])
        figures.append(_layer(config, block, streams, text.where, f"{model.path}: layer {layer}"))
        step()
        if at is not None:
            if layer in bounds_layers:
                bounds.append(inspect_bounds.measure(config, block, at, layer))
                step()
            at = inspect_bounds.advance(config, block, at)
        del block  # before the next one is read
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *figures)
    return Inspection(
        name=name,
        config=config,
        text=text,
        **stacked,
        bounds=inspect_bounds.table(bounds),
        pathways=inspect_bounds.pathways_table(bounds),
        depth=inspect_depth.profile(model, config, text.tokens[0], [*entering, streams[0]], step) if depth else None,
    )


def _check(model: Pretrained, layers: Sequence[int], *texts: Text | None) -> None:
    config = model.config
    for text in texts:
        if text is not None and text.tokens.shape[-1] > config.context:
            raise ModelError(
                f"{model.path}: {text.tokens.shape[-1]} tokens are more than its {config.context} positions"
            )
        if text is not None and text.tokens.max() >= config.vocab_size:
            raise ModelError(f"{model.path}: token {text.tokens.max()} is not among its {config.vocab_size}")
    for layer in layers:
        if not 0 <= layer < config.n_layer:
            raise ModelError(f"{model.path} has no layer {layer} (0 to {config.n_layer - 1})")


def _layer(
    config: ModelConfig, block: gpt.Params, streams: list[Array], where: Bool[np.ndarray, "s t"], place: str
) -> dict[str, Any]:
    """The figures of a layer over all sequences, whose streams go through its block in place, one after the other."""
    sequences = []
    for s, real in enumerate(jnp.asarray(where)):
        streams[s], p, mask, scalars = _forward(config, block, streams[s], real)
        try:
            sequences.append(jax.device_get({**_measure(p, mask, real), "scalars": scalars}))
        except ValueError as error:
            raise ModelError(f"{place} gives attention rows that are no probabilities ({error})") from error
    figures = jax.tree.map(lambda *leaves: np.stack(leaves), *sequences)
    scalars = figures.pop("scalars")
    rms = np.sqrt(np.average(scalars.pop("mean_square"), weights=where.sum(axis=-1)))
    return {**figures, "layers": {"residual_rms": rms, **{name: values.max() for name, values in scalars.items()}}}


@functools.partial(jax.jit, static_argnums=0)
def _embed(config: ModelConfig, ends: gpt.Params, tokens: Int[Array, "s t"]) -> Float[Array, "s t d"]:
    return gpt.embed(config, {"ends": ends}, tokens)


@functools.partial(jax.jit, static_argnums=0)
def _forward(
    config: ModelConfig, block_params: gpt.Params, x: Float[Array, "t d"], where: Bool[Array, " t"]
) -> tuple[Float[Array, "t d"], Float[Array, "h t t"], Bool[Array, "1 t t"], dict[str, Float[Array, ""]]]:
    """The stream that leaves a block, its attention rows and their support, and figures of the block."""
    gains = gpt.norm_gains(config, block_params, x, where=where)
    a_attention, a_ffn = (jnp.max(gain, where=where, initial=0) for gain in gains)
    return (
        gpt.block(config, block_params, x, where=where),
        gpt.attention_weights(config, block_params, x, where=where),
        gpt.support(config, x.shape[0], where),
        {
            "mean_square": jnp.mean(jnp.square(x), where=where[:, None]),
            "a_attention": a_attention,
            "a_ffn": a_ffn,
        },
    )


def _measure(p: Float[Array, "h t t"], mask: Bool[Array, "1 t t"], where: Bool[Array, " t"]) -> Any:
    """The `QUANTITIES` of a layer's rows, and each head's sink; `ValueError` for rows that are no probabilities.

    Not one program: a compiler that may read masked rows wherever it likes masks them again each time.
    """
    return _finish(sens.attention_stats(p, mask), p, mask, where)


@jax.jit
def _finish(
    stats: sens.AttentionStats, p: Float[Array, "h t t"], mask: Bool[Array, "1 t t"], where: Bool[Array, " t"]
) -> Any:
    sinks = sens.attention_sinks(p, where[None, :, None])
    rows = {**stats._asdict(), "dominant": (stats.p_max > DOMINANT).astype(p.dtype), "sink": sinks.mass}
    left_out = ~(where[None] & (jnp.sum(mask, axis=-1) > 1))
    return {
        "rows": {name: jnp.where(left_out, jnp.nan, rows[name]) for name in QUANTITIES},
        "sink": sinks.position.astype(jnp.int32),
    }


def record(inspection: Inspection) -> Iterator[dict[str, Any]]:
    """The lines of `inspect.parquet`: statistics of each quantity, by layer and head, and pooled over heads (null).

    What is one number a layer (`Inspection.layers`) stands there as a quantity with a count of one; so do Lambda and
    its bounds (`bounds.lambda_lower`, ...), of a head too (`bounds.value`, ...), and the profile through depth, by the
    layer's sublayer (`depth.attention.gain`, `depth.ffn.gain`, ...). What does not apply is left out.
    """
    for quantity in QUANTITIES:
        for layer, values in enumerate(inspection.rows[quantity]):
            for head, summary in by_head(values[None])[0]:
                yield {"layer": layer, "head": head, "quantity": quantity, **summary}
    for quantity, values in inspection.layers.items():
        for layer, value in enumerate(values):
            yield {"layer": layer, "head": None, "quantity": quantity, **summarise(np.array([value]))}
    for prefix, table in (("bounds", inspection.bounds), ("bounds", inspection.pathways), ("depth", inspection.depth)):
        for line in [] if table is None else table.iter_rows(named=True):
            place = {name: line.pop(name, None) for name in ("layer", "head", "kind", "sublayer")}
            named = f"{prefix}.{place.pop('kind')}" if place["kind"] else prefix
            for quantity, value in line.items():
                if value is not None and not isinstance(value, str):
                    single = summarise(np.array([value], np.float64))
                    yield {"layer": place["layer"], "head": place["head"], "quantity": f"{named}.{quantity}", **single}
