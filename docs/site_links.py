"""Makes links that leave docs/ work on the site, and shows the version there: a hook of MkDocs, see mkdocs.yml.

The pages link to files of the repository by their paths: `../examples/adult.py`. Each file that a page links to becomes
part of the site, below `repository/`.
"""

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PAGES = ("CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")
"""Files outside docs/ that are pages; other files are only copied."""
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")


def on_config(config: Any) -> Any:
    """Shows the version at the foot of each page."""
    version = re.search(r'^__version__ = "(.+)"$', (ROOT / "src/satrap/__init__.py").read_text(), re.MULTILINE)
    config["copyright"] = f"Satrap {version[1]}" if version else ""
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages outside docs/ and every file that a page links to."""
    for name in PAGES:
        files.append(File.generated(config, _place(name), abs_src_path=str(ROOT / name)))
    for file in list(files):
        if file.src_uri.endswith(".md"):
            for match in LINK.finditer(file.content_string):
                name = _target(file.src_uri, match[1])
                place = _place(name)
                if place not in files.src_uris and (ROOT / name).is_file():
                    files.append(File.generated(config, place, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Points the links of a page to where the files are on the site."""
    here = page.file.src_uri

    def place(match: re.Match[str]) -> str:
        name = _target(here, match[1])
        found = _place(name)
        if found not in files.src_uris:
            return match[0]  # a broken link, which the build reports
        return os.path.relpath(found, os.path.dirname(here) or ".") + (match[2] or "")

    return LINK.sub(place, markdown)


def _origin(place: str) -> str:
    """The path in the repository of a file of the site."""
    return place.removeprefix("repository/") if place.startswith("repository/") else f"docs/{place}"


def _place(name: str) -> str:
    """The path on the site of a file of the repository."""
    return name.removeprefix("docs/") if name.startswith("docs/") else f"repository/{name}"


def _target(place: str, link: str) -> str:
    """The path in the repository to which a page's link leads."""
    return os.path.normpath(os.path.join(os.path.dirname(_origin(place)), link))
