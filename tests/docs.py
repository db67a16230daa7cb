"""The README and the pages of `docs/` as tests see them: their code blocks, headings, links and tables."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#+ (.+?)\s*$", re.MULTILINE)
_LINK = re.compile(r"\]\(([^)\s]+)\)|<(?:img|a)\b[^>]*?\b(?:src|href)=\"([^\"]+)\"")
_CODE_SPAN = re.compile(r"`[^`\n]+`")
_CELL_BORDER = re.compile(r"(?<!\\)\|")


@dataclass(frozen=True)
class Block:
    """A fenced block; `title` is the heading above it, `number` counts the blocks of a page from 1."""

    page: Path
    title: str
    number: int
    language: str
    code: str

    def __str__(self) -> str:
        return f"{self.page.name}-{self.number}-{self.title}"


def blocks(page: Path, language: str) -> list[Block]:
    """The fenced blocks of a page in `language` ("" for those that name none)."""
    text = page.read_text()
    headings = [(match.start(), match[1]) for match in _HEADING.finditer(_without_code(text))]
    found = []
    for number, match in enumerate(_FENCE.finditer(text), 1):
        above = [title for start, title in headings if start < match.start()]
        found.append(Block(page, above[-1] if above else page.name, number, match[1], match[2]))
    return [block for block in found if block.language == language]


def prose(page: Path) -> str:
    """The text of a page without its fenced blocks, each character where it was."""
    return _without_code(page.read_text())


def anchors(page: Path) -> set[str]:
    """What links into the page may name, as GitHub makes it of the headings."""
    found: set[str] = set()
    for match in _HEADING.finditer(prose(page)):
        words = re.sub(r"[^\w\- ]", "", match[1].lower()).replace(" ", "-")
        anchor, count = words, 0
        while anchor in found:
            count += 1
            anchor = f"{words}-{count}"
        found.add(anchor)
    return found


def links(page: Path) -> list[str]:
    """The targets of links and images, but for those inside code."""
    text = _CODE_SPAN.sub("", prose(page))
    return [match[1] or match[2] for match in _LINK.finditer(text)]


def tables(text: str) -> list[list[list[str]]]:
    """The tables of a text: rows of cells, the row of dashes left out."""
    found: list[list[list[str]]] = []
    inside = False
    for line in text.splitlines():
        if not line.startswith("|"):
            inside = False
            continue
        cells = [cell.strip() for cell in _CELL_BORDER.split(line.strip())[1:-1]]
        if not inside:
            found.append([])
        inside = True
        if not all(re.fullmatch(r":?-+:?", cell) for cell in cells):
            found[-1].append(cells)
    return found


def section(page: Path, title: str) -> str:
    """What stands under a heading, up to the next one of its level or above."""
    text = prose(page)
    match = re.search(rf"^(#+) {re.escape(title)}\s*$", text, re.MULTILINE)
    assert match is not None, f"{page.name} has no section {title!r}"
    rest = text[match.end() :]
    end = re.search(rf"^#{{1,{len(match[1])}}} ", rest, re.MULTILINE)
    return rest[: end.start()] if end else rest


def _without_code(text: str) -> str:
    return _FENCE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
