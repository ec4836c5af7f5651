"""The manual builds as a site, strictly, and the site needs nothing from other hosts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

pytest.importorskip("material", reason="needs the extra docs (make docs)")

# What a browser loads by itself, unlike links, which readers follow.
LOADED = re.compile(r"""<(?:script|img|iframe|source)[^>]*\ssrc=["']?(?:https?:)?//|url\(["']?(?:https?:)?//""")
STYLE = re.compile(r"""<link[^>]*rel=["']?(?:stylesheet|preconnect|preload|icon)[^>]*href=["']?(?:https?:)?//""")


@pytest.mark.slow
def test_it_builds_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    """A dead link or a page outside the navigation would fail the build."""
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", tmp_path], cwd=ROOT, capture_output=True, text=True,
        check=False, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    pages = sorted(tmp_path.rglob("*.html"))
    assert len(pages) > len(list((ROOT / "docs").glob("*.md")))
    for page in [*pages, *tmp_path.rglob("*.css")]:
        text = page.read_text(encoding="utf-8")
        assert not LOADED.search(text), page
        assert not STYLE.search(text), page
