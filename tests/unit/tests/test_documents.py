"""What the documents say of the source: the files that they name are there, and so are the rooms that ARCHITECTURE.md shows."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TREE = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
DOCUMENTS = [name for name in TREE if name.endswith(".md") and not name.startswith(("tests/", "docs/mutants"))]
_FILE = re.compile(r"`([\w./-]+\.(?:py|java|js|yml|json|toml|sql))`")
# Files of a user's own, of a node, or made by the commands that the document shows.
ELSEWHERE = {
    "pubsub.toml",
    "conftest.py",
    "test_orders.py",
    "test_outage.py",
    "test_upgrade.py",
    "test_library.py",
    "publications.json",
    "status.json",
    "spark-pipeline.yml",
    "payments.py",
}


def _is_there(name: str) -> bool:
    return any(f"/{path}".endswith(f"/{name}") for path in TREE)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_that_a_document_names_are_there(document: str) -> None:
    named = [name for name in _FILE.findall((ROOT / document).read_text()) if name.split("/")[-1] not in ELSEWHERE]
    assert not [name for name in named if not re.search("NAME|NNN", name) and not _is_there(name)]


def test_the_rooms_are_there() -> None:
    """Each line of "The rooms" that begins with a name and a slash is a directory, inside the one that it is indented under."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    rooms = text[text.index("## The rooms") : text.index("Imports go one way")]
    above: list[tuple[int, str]] = []
    found = set()
    for indent, name in re.findall(r"^( {4,16})([a-z_]+)/ ", rooms, re.MULTILINE):
        while above and above[-1][0] >= len(indent):
            above.pop()
        path = "/".join([*(each for _, each in above), name])
        assert any(one.startswith(f"{path}/") for one in TREE), path
        above.append((len(indent), name))
        found.add(path)
    packages = {
        str(Path(one).parent)
        for one in TREE
        if one.endswith("/__init__.py") and not one.startswith(("tests/", "bench/"))
    }
    roots = {one.split("/")[0] for one in packages}
    assert roots <= found
    assert {one for one in packages if one.startswith("pubsub/delta/")} <= found


@pytest.mark.parametrize("document", DOCUMENTS)
def test_prose_has_one_width(document: str) -> None:
    """120 characters; tables, code and what cannot be broken may be longer."""
    code, long = False, []
    for line in (ROOT / document).read_text().split("\n"):
        code ^= line.startswith("```")
        if (
            not code
            and not line.startswith(("|", "    ", "#", "<"))
            and len(line) > 120
            and " " in line.strip("- ").rstrip()
        ):
            long.append(line)
    assert not [line for line in long if not re.fullmatch(r"\s*([-*]|\d+\.)?\s*(`[^`]*`|\S+)", line)]
