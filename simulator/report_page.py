"""Pages of HTML that need no other file: reports of experiments, of loads, of simulations and of measurements."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

STYLE = (
    ":root{color-scheme:light dark;--text:#222;--page:#fff;--line:#ccc;--soft:#f4f5f6}"
    "@media(prefers-color-scheme:dark){:root{--text:#e3e5e8;--page:#16191d;--line:#444a52;--soft:#20242a}}"
    "body{font-family:sans-serif;max-width:76rem;margin:2rem auto;padding:0 1rem;color:var(--text);"
    "background:var(--page)}table{border-collapse:collapse;margin:1rem 0;display:block;overflow-x:auto}"
    "td,th{border:1px solid var(--line);padding:.25rem .6rem;text-align:right}"
    "td:first-child,th:first-child{text-align:left}figure{display:inline-block;margin:.4rem;max-width:100%}"
    "figure svg{max-width:100%;height:auto}pre{background:var(--soft);padding:.6rem;overflow:auto}"
)


def html_page(title: str, body: Iterable[str]) -> str:
    """Return a page; the parts of its body are HTML."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<style>{STYLE}</style></head><body>{''.join(body)}</body></html>\n"
    )


def html_table(markdown: str) -> str:
    """Convert a Markdown table to HTML."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in markdown.splitlines()]
    head, _, *rest = rows
    return rows_table(head, rest)


def rows_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of texts."""
    text = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{text}</tr>{lines}</table>"


def figure(chart: str) -> str:
    """Return a chart as a figure; nothing where there is no chart."""
    return f"<figure>{chart}</figure>" if chart else ""


def heading(text: str) -> str:
    """Return a heading inside a page."""
    return f"<h2>{escape(text)}</h2>"


def paragraph(text: str) -> str:
    """Return a paragraph of plain text."""
    return f"<p>{escape(text)}</p>"
