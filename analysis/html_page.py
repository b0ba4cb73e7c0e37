"""A self-contained HTML page from text, tables and figures: no network, no scripts, light and dark.

Every text passes through `html.escape` here, and no other module makes a tag from data.
"""

import base64
import html
from collections.abc import Iterable
from pathlib import Path

from matplotlib.figure import Figure

from analysis.plotting import save
from analysis.tables import Table

SVG_LIMIT = 450_000
"""Bytes above which a figure goes into the page as PNG: five figures then stay under 5 MB."""

STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1c; --paper: #ffffff; --soft: #666666; --line: #d8d8d8; --tint: #f4f6f8; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e4e4; --paper: #15171a; --soft: #a0a0a0; --line: #3a3d42; --tint: #1e2226; }
}
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.55 system-ui, sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 2rem 1.2rem 4rem; }
h1 { font-size: 1.7rem; line-height: 1.25; } h2 { margin-top: 2.6rem; border-bottom: 1px solid var(--line); }
p, li { max-width: 46rem; } figcaption, caption { color: var(--soft); font-size: .9rem; }
figure { margin: 1.4rem 0; } figure img { width: 100%; height: auto; background: #ffffff; border-radius: 6px; }
.wide { overflow-x: auto; margin: 1.2rem 0; } table { border-collapse: collapse; font-size: .88rem; }
caption { text-align: left; padding-bottom: .4rem; }
th, td { text-align: left; vertical-align: top; padding: .35rem .7rem; border-bottom: 1px solid var(--line); }
thead th { border-bottom: 2px solid var(--line); }
.notice { background: var(--tint); border-left: 4px solid #e69f00; padding: .6rem 1rem; border-radius: 4px; }
code, pre { font: .9em ui-monospace, monospace; background: var(--tint); border-radius: 4px; }
pre { padding: .8rem 1rem; overflow-x: auto; } pre.text { white-space: pre-wrap; } code { padding: .1em .3em; }
"""


class Html(str):
    """Markup: made in this module alone, its texts already escaped."""


def page(title: str, body: Iterable[Html]) -> Html:
    """The whole document."""
    return Html(
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        f"<h1>{html.escape(title)}</h1>\n" + "\n".join(body) + "\n</main>\n</body>\n</html>\n"
    )


def section(title: str, *blocks: Html | str) -> Html:
    """A heading and its blocks; plain text becomes a paragraph."""
    parts = (block if isinstance(block, Html) else f"<p>{text(block)}</p>" for block in blocks)
    return Html(f"<h2>{html.escape(title)}</h2>\n" + "\n".join(parts))


def text(words: str) -> Html:
    """Escaped text, with `code` in backquotes."""
    parts = html.escape(words).split("`")
    return Html("".join(f"<code>{part}</code>" if i % 2 else part for i, part in enumerate(parts)))


def bullets(items: Iterable[str]) -> Html:
    """A list of texts."""
    return Html("<ul>" + "".join(f"<li>{text(item)}</li>" for item in items) + "</ul>")


def code(lines: str) -> Html:
    """Text to be typed, as it stands."""
    return Html(f"<pre>{html.escape(lines)}</pre>")


def notice(title: str, items: Iterable[str]) -> Html:
    """A list set apart from the story."""
    return Html(f'<div class="notice"><p><strong>{html.escape(title)}</strong></p>{bullets(items)}</div>')


def table(content: Table) -> Html:
    """A table whose first column names its rows; it scrolls by itself where the page is narrow."""
    head = "".join(f'<th scope="col">{html.escape(column)}</th>' for column in content.columns)
    rows = "".join(
        f'<tr><th scope="row">{html.escape(name)}</th>'
        + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
        + "</tr>"
        for name, *cells in content.rows
    )
    return Html(
        f'<div class="wide"><table><caption>{html.escape(content.title)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def tinted(pieces: Iterable[tuple[str, float, str]]) -> Html:
    """Running text whose pieces are (words, shade in [0, 1], what a pointer over them shows)."""
    spans = (
        f'<span style="background:rgb(213 94 0/{min(max(shade, 0.0), 1.0):.2f})" title="{html.escape(note)}">'
        f"{html.escape(words)}</span>"
        for words, shade, note in pieces
    )
    return Html(f'<pre class="text">{"".join(spans)}</pre>')


def figure(stem: Path, drawing: Figure, caption: str) -> Html:
    """Save the figure and put it into the page as data: an image runs no script and its names clash with no other's."""
    png, svg = save(drawing, stem)
    path, kind = (svg, "svg+xml") if svg.stat().st_size <= SVG_LIMIT else (png, "png")
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    words = html.escape(caption)
    image = f'<img src="data:image/{kind};base64,{data}" alt="{words}">'
    return Html(f"<figure>{image}<figcaption>{words}</figcaption></figure>")
