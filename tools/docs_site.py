"""What MkDocs is told beyond mkdocs.yml.

What pages link to outside docs/ becomes part of the site, with nothing copied by hand.  The site is the repository's
tree with docs/ lifted to its root, so a relative link means the same file in a checkout and in the site, and only loses
or gains the part "docs/".
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md", "examples/README.md")
LINK = re.compile(r"(?<=\]\()([^)#\s]+)(?=[)#\s])")


def in_repository(uri: str) -> str:
    """The path in the repository of a page of the site."""
    return uri if uri in PAGES else f"docs/{uri}"


def in_site(path: str) -> str:
    """The path in the site of a file of the repository."""
    return path.removeprefix("docs/")


def target(uri: str, link: str) -> str | None:
    """The file of the repository that a link on the page ``uri`` leads to; None if it leads to no file there."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(in_repository(uri)), link))
    return path if "://" not in link and not path.startswith("..") and (ROOT / path).is_file() else None


def on_files(files: Files, config: Any, **_: Any) -> Files:
    for uri in PAGES:
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / uri)))
    for page in list(files.documentation_pages()):
        for link in LINK.findall(page.content_string):
            path = target(page.src_uri, link)
            if path is not None and files.get_file_from_path(in_site(path)) is None:
                files.append(File.generated(config, in_site(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    here = page.file.src_uri

    def moved(match: re.Match[str]) -> str:
        path = target(here, match[1])
        return match[1] if path is None else posixpath.relpath(in_site(path), posixpath.dirname(here) or ".")

    return LINK.sub(moved, markdown)


class Roles(griffe.Extension):
    """Docstrings name code as Sphinx does, :func:`enable`; Markdown shows that as `enable`."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r":(?:func|class|meth|mod|attr):(?=`)", "", obj.docstring.value)
