"""The documents as a site of static files: README, docs/, ARCHITECTURE and CONTRIBUTING, with the reference pages from the code.

python -m scripts.site DIRECTORY writes the pages' sources into DIRECTORY/pages and the site into DIRECTORY/site.  It ends with 1 if
a link leads nowhere.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from scripts.reference import pages

ROOT = Path(__file__).resolve().parent.parent
#: Documents outside of docs/, by the names that they have in the site.
BESIDE = {"README.md": "index.md", "ARCHITECTURE.md": "architecture.md", "CONTRIBUTING.md": "contributing.md"}
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")


def write_pages(directory: Path) -> None:
    """Write the sources of all pages; a directory that is there is made anew."""
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(ROOT / "docs", directory)
    for path in directory.rglob("*.md"):
        path.write_text(_moved(path.read_text(encoding="utf-8"), Path("docs") / path.relative_to(directory), directory))
    for name, page in BESIDE.items():
        (directory / page).write_text(_moved((ROOT / name).read_text(encoding="utf-8"), Path(name), directory))
    (directory / "reference").mkdir()
    for name, text in pages().items():
        (directory / "reference" / f"{name}.md").write_text(text, encoding="utf-8")


def _moved(text: str, document: Path, directory: Path) -> str:
    """Point a document's links to where the site has what they name; files that are no pages are copied for it."""
    here = BESIDE.get(str(document), str(document.relative_to("docs") if document.parts[0] == "docs" else document))

    def place(match: re.Match[str]) -> str:
        named = (ROOT / document.parent / match[1]).resolve().relative_to(ROOT)
        if str(named) in BESIDE:
            found = BESIDE[str(named)]
        elif named.parts[0] == "docs":
            found = str(named.relative_to("docs"))
        else:
            found = str(Path("files") / named)
            if (ROOT / named).is_file():  # otherwise the site's own check says that it is missing
                (directory / found).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / named, directory / found)
        return "../" * (len(Path(here).parts) - 1) + found

    return _LINK.sub(place, text)


def main(directory: Path) -> int:
    """Write the site; return the exit code of its builder, which is 1 for a link that leads nowhere."""
    write_pages(directory / "pages")
    configuration = (ROOT / "zensical.toml").read_text(encoding="utf-8")
    file = directory / "zensical.toml"
    file.write_text(re.sub(r"\bbuild/", "", configuration), encoding="utf-8")
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "--config-file", str(file)]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
