"""The pages of the manual, and what they contain: code blocks, inline code, links, headings."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "deploy/**/README.md", "length_tagger/models/README.md",
                    "services/engine_state/FORMAT.md")
    for path in ROOT.glob(pattern)
)  # fmt: skip
IDS = [str(path.relative_to(ROOT)) for path in PAGES]

FENCE = re.compile(r"^( *)(```+)([^\n`]*)\n(.*?)^\1\2 *$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
RUN = re.compile(r"<!-- run(: server)? -->\n$")
BLOCK = re.compile(r"(?:\S*/)?block")
SEPARATORS = {"&", "&&", ";", "|", ">"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeBlock:
    """A fenced block; `run` is "" where no test runs it, "block" where one does, "server" for one that keeps running."""

    language: str
    text: str
    run: str


def text_of(page: Path) -> str:
    """The source of a page."""
    return page.read_text(encoding="utf-8")


def blocks_of(page: Path) -> list[CodeBlock]:
    """The fenced blocks of a page, in order."""
    text = text_of(page)
    found = []
    for fence in FENCE.finditer(text):
        mark = RUN.search(text[: fence.start()])
        run = "" if mark is None else "server" if mark[1] else "block"
        found.append(CodeBlock(language=fence[3].strip(), text=fence[4], run=run))
    return found


def prose_of(page: Path) -> str:
    """A page without its fenced blocks."""
    return FENCE.sub("", text_of(page))


def inline_of(page: Path) -> list[str]:
    """The inline code of a page."""
    return INLINE.findall(prose_of(page))


def anchors_of(page: Path) -> set[str]:
    """The anchors of a page's headings, as forges and the site make them."""
    headings = re.findall(r"^#+ +(.*)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    plain = (re.sub(r"[`*]", "", heading).strip().lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


def commands_in(text: str) -> Iterator[list[str]]:
    """The command lines of a shell block, word by word; comments, assignments and redirections are left out."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        command: list[str] = []
        for word in [*words, ";"]:
            if word in SEPARATORS:
                while command and re.fullmatch(r"\w+=.*", command[0]):
                    command = command[1:]
                if command:
                    yield command
                command = []
            else:
                command.append(word)


def block_commands(page: Path) -> Iterator[list[str]]:
    """What a page tells `block` to do, in blocks and in inline code."""
    texts = [one.text for one in blocks_of(page) if one.language in ("bash", "")]
    texts += [code for code in inline_of(page) if code.startswith("block ")]
    for text in texts:
        if "block " in text:
            yield from (words[1:] for words in commands_in(text) if BLOCK.fullmatch(words[0]))
