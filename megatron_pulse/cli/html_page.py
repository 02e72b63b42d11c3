"""Self-contained HTML page."""

from __future__ import annotations

import html
from collections.abc import Sequence

from megatron_pulse.fonts import printable

_STYLE = """\
body { font: 15px/1.45 Helvetica, Arial, sans-serif; margin: 24px; color: #222; }
h2 { margin: 28px 0 8px; font-size: 18px; } p { margin: 4px 0; }
.picture { overflow-x: auto; margin: 16px 0; }
.picture svg { width: 100%; height: auto; min-width: 640px; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; }
td, th { padding: 4px 12px; text-align: right; white-space: nowrap; }
th { border-bottom: 1px solid #888; }
tr.first { font-weight: bold; }
dl { display: grid; grid-template-columns: max-content auto; gap: 2px 18px; margin: 8px 0; }
dt { color: #555; } dd { margin: 0; }
pre { background: #f4f4f4; padding: 10px 14px; white-space: pre-wrap; }
.bar { display: inline-block; height: 13px; vertical-align: middle; }
.track { display: inline-block; width: min(360px, 40vw); background: #f0f0f0;
  border: 1px solid #bbb; white-space: nowrap; line-height: 0; text-align: left; }
.solid { background: #1d4a7a; }
.hatched { background-color: #e4d095;
  background-image: repeating-linear-gradient(45deg, #e4d095 0 3px, #7a6420 3px 4px); }
"""
_STYLE += "".join(
    f"table.left{k} td:nth-child({k + 1}), table.left{k} th:nth-child({k + 1}) "
    f"{{ text-align: left; white-space: normal; min-width: {18 if k > 2 else 0}em; }}\n"
    for k in range(8)
)


def page(title: str, *parts: str) -> str:
    """Return the page; ``parts`` are HTML."""
    text = html.escape(printable(title))
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{text}</title>'
        f"<style>\n{_STYLE}</style></head><body>\n<h1>{text}</h1>\n"
        + "\n".join(map(printable, parts))
        + "\n</body></html>\n"
    )


def lines(texts: Sequence[str]) -> str:
    """Paragraph for each text."""
    return "".join(f"<p>{html.escape(text)}</p>" for text in texts)


def picture(svg: str) -> str:
    """Drawing that scrolls if the page is narrower."""
    return f'<div class="picture">{svg}</div>'


def listed(pairs: Sequence[tuple[str, str]]) -> str:
    """Definition list of names and values."""
    items = "".join(
        f"<dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd>" for name, value in pairs
    )
    return f"<dl>{items}</dl>"


def table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    left: Sequence[int] = (),
    bold_first: bool = False,
) -> str:
    """Table; columns ``left`` are set flush left."""

    def line(tag: str, cells: Sequence[str]) -> str:
        return "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells)

    body = "".join(
        f"<tr{' class="first"' * (bold_first and k == 0)}>{line('td', row)}</tr>"
        for k, row in enumerate(rows)
    )
    flush = " ".join(f"left{k}" for k in left)
    head = f"<tr>{line('th', columns)}</tr>"
    return f'<div class="wide"><table class="{flush}">{head}{body}</table></div>'
