"""One page that holds a whole evaluation, figures included, without any other file. Owns: the page's text."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from typing import Any

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1a1a1a; }
table { border-collapse: collapse; display: block; overflow-x: auto; margin: 1rem 0; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid #ccc; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
img { max-width: 100%; height: auto; }
"""


def page(title: str, facts: dict[str, Any], parts: Sequence[str]) -> str:
    """A page of `parts` (from `table`, `paragraph` and `picture`) under a list of facts."""
    listed = "".join(f"<li>{html.escape(str(k))}: {html.escape(str(v))}</li>" for k, v in facts.items())
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head>\n"
        f"<body><h1>{html.escape(title)}</h1><ul>{listed}</ul>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table with a heading."""
    head = "".join(f'<th scope="col">{html.escape(c)}</th>' for c in columns)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(str(c))}</td>" for c in row) + "</tr>" for row in rows)
    return f"<h2>{html.escape(title)}</h2><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def paragraph(text: str) -> str:
    """A line of text."""
    return f"<p>{html.escape(text)}</p>"


def picture(title: str, data: bytes, description: str) -> str:
    """A PNG inside the page, with a heading and a description for those who can't see it."""
    source = base64.b64encode(data).decode()
    return f'<h2>{html.escape(title)}</h2><img alt="{html.escape(description)}" src="data:image/png;base64,{source}">'
