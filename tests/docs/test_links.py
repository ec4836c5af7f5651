"""Links between pages lead somewhere, on a forge as well as on the site."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import FENCE, IDS, INLINE, PAGES, ROOT, anchors_of, inline_of

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
TOP = ("deploy/", "docs/", "examples/", "length_tagger/", "predictor/", "protos/", "scheduler/", "scripts/", "services/",
       "simulator/", "tests/")  # fmt: skip
PLACEHOLDER = re.compile(r"[…<>A-Z{}]{2,}|NAME|FILE|…")


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_relative_links(page: Path) -> None:
    """Each file is there, and has the heading; the manual does not link outside of docs/, where the site ends."""
    text = INLINE.sub("", FENCE.sub("", page.read_text(encoding="utf-8")))
    for target in LINK.findall(text):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{target}: there is no such file"
        if anchor:
            assert anchor in anchors_of(file), f"{target}: there is no such heading"
        if page.is_relative_to(ROOT / "docs"):
            assert file.is_relative_to(ROOT / "docs"), f"{target}: is not part of the site"


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_files_that_pages_name(page: Path) -> None:
    """A path in inline code exists in the repository, and so does a module that is named without its folder."""
    for code in inline_of(page):
        path = code.partition(" ")[0].rstrip(":,")
        if path.startswith(TOP) and not PLACEHOLDER.search(path):
            assert any(ROOT.glob(path.rstrip("/"))), f"`{code}`: there is no such file"
        elif re.fullmatch(r"[\w/]+\.py", path):
            assert any(any((ROOT / top).rglob(path)) for top in TOP), f"`{code}`: there is no such file"


def test_every_page_of_the_manual_is_in_the_navigation() -> None:
    """A page that no reader finds is no page."""
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in PAGES:
        if page.is_relative_to(ROOT / "docs"):
            assert f": {page.relative_to(ROOT / 'docs')}\n" in navigation, page


def test_readme_is_one_screen() -> None:
    """At most 800 words."""
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 800
