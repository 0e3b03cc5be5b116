"""The report as one self-contained HTML file, right in light and dark mode."""

from __future__ import annotations

import base64
import html
import re
from pathlib import Path

from jinja2 import Environment
from markdown_it import MarkdownIt
from markdown_it.token import Token

TEMPLATE = Path(__file__).with_name("page.html")


def page(markdown: str, title: str, pictures: dict[str, tuple[bytes, bytes]]) -> str:
    """HTML of a Markdown text; `pictures` maps an image's address to its (light, dark) SVG.

    HTML inside the text, such as a model may answer, is shown and not obeyed.
    """
    # Without autolinking and raw HTML nothing that a model wrote becomes an active part of the page.
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = parser.parse(markdown)
    sections = _anchor_headings(tokens)
    body = _put_in_pictures(parser.renderer.render(tokens, parser.options, {}), pictures)
    body = body.replace("<table>", '<div class="scroll"><table>').replace("</table>", "</table></div>")
    template = Environment(autoescape=False, keep_trailing_newline=True).from_string(TEMPLATE.read_text())
    shown = [(anchor, html.escape(name)) for anchor, name in sections]
    return template.render(title=html.escape(title), sections=shown, body=body)


def _anchor_headings(tokens: list[Token]) -> list[tuple[str, str]]:
    """Give every second-level heading an id; returns (id, text) of each."""
    found: list[tuple[str, str]] = []
    for i, token in enumerate(tokens):
        if token.type == "heading_open" and token.tag == "h2":
            name = tokens[i + 1].content
            anchor = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
            token.attrSet("id", anchor)
            found.append((anchor, name))
    return found


def _put_in_pictures(body: str, pictures: dict[str, tuple[bytes, bytes]]) -> str:
    for address, (light, dark) in pictures.items():
        body = re.sub(
            rf'<img src="{re.escape(address)}" alt="([^"]*)" />',
            lambda match, light=light, dark=dark: (  # type: ignore[misc]
                f'<picture><source media="(prefers-color-scheme: dark)" srcset="{_inline(dark)}">'
                f'<img src="{_inline(light)}" alt="{match[1]}"></picture>'
            ),
            body,
        )
    return body


def _inline(svg: bytes) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg).decode()
