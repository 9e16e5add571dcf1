"""What the site adds to docs/: texts that stand elsewhere in the project, and links that lead there.

A link to a file of the project that is no page is shown without being one: the site has no such file.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = {
    ROOT / "ARCHITECTURE.md": "architecture.md",
    ROOT / "CHANGELOG.md": "changelog.md",
    ROOT / "README.md": "readme.md",
    ROOT / "SECURITY.md": "security.md",
    ROOT / "examples" / "README.md": "examples.md",
}
"""Texts outside docs/, and which page each becomes."""
_SOURCES = {page: source for source, page in PAGES.items()}
_LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")
_OUTSIDE = re.compile(r"[a-z]+:")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=source.read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links as the site has them."""
    source = _SOURCES.get(page.file.src_uri, DOCS / page.file.src_uri)

    def moved(match: re.Match[str]) -> str:
        return linked(match["text"], match["target"], source)

    return _LINK.sub(moved, markdown)


def linked(text: str, target: str, source: Path) -> str:
    """A link in the file `source`, or its text alone where the site has nothing there."""
    name, mark, anchor = target.partition("#")
    if not name or _OUTSIDE.match(target):
        return f"[{text}]({target})"
    path = (source.parent / name).resolve()
    if path.is_dir() and path / "README.md" in PAGES:
        path /= "README.md"
    if path in PAGES:
        return f"[{text}]({PAGES[path]}{mark}{anchor})"
    if path.is_relative_to(DOCS) or not path.exists():
        # One that leads nowhere is left for the build to complain about.
        inside = path.relative_to(DOCS) if path.is_relative_to(DOCS) else name
        return f"[{text}]({inside}{mark}{anchor})"
    return text
