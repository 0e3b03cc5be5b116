"""The HTML page is self-contained, and shows what a model wrote without obeying it."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from colocate_grpo.report.markdown import code, table
from colocate_grpo.report.page import page

EVIL = '<script>alert(1)</script> [x](javascript:alert(1)) ![y](http://example.com/y.png) ```\n</code> "quoted"'


class Elements(HTMLParser):
    """Elements with their attributes, and the text of all of them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def _page() -> Elements:
    text = f"# Run\n\n## First part\n\n![Curves](curves.png)\n\n{code(EVIL, 'text')}\n\n## Second\n\n"
    text += table(["a", "b"], [["x|y", "1"]]) + "\n"
    return Elements(page(text, "Run <1>", {"curves.png": (b"<svg>light</svg>", b"<svg>dark</svg>")}))


def test_nothing_is_loaded_from_elsewhere_and_nothing_runs() -> None:
    found = _page().elements
    assert not [tag for tag, _ in found if tag in ("script", "link", "iframe")]
    addresses = [value for _, attributes in found for key, value in attributes.items() if key in ("src", "srcset")]
    assert len(addresses) == 2
    assert all(address and address.startswith("data:image/svg+xml;base64,") for address in addresses)
    assert all(re.fullmatch("#[a-z-]+", a["href"] or "") for tag, a in found if tag == "a")


def test_what_a_model_wrote_is_shown_word_for_word() -> None:
    assert EVIL in _page().text


def test_both_pictures_are_there_with_their_text() -> None:
    found = _page().elements
    assert [a["media"] for tag, a in found if tag == "source"] == ["(prefers-color-scheme: dark)"]
    assert [a["alt"] for tag, a in found if tag == "img"] == ["Curves"]


def test_sections_can_be_reached() -> None:
    found = _page().elements
    ids = {a["id"] for tag, a in found if tag == "h2"}
    assert ids == {"first-part", "second"}
    assert {a["href"] for tag, a in found if tag == "a"} == {f"#{name}" for name in ids}


def test_a_bar_in_a_cell_is_no_column() -> None:
    cells = [tag for tag, _ in _page().elements if tag == "td"]
    assert len(cells) == 2
