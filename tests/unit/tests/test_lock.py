"""requirements.lock pins every package by hash, and `make audit` says so when it cannot tell."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


def test_every_package_is_pinned_by_hash() -> None:
    text = (ROOT / "requirements.lock").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    assert len(lines) > 50
    for line in lines:
        assert re.match(r"[a-z0-9][a-z0-9._-]*==\S+ ", line), line
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", line), line


def test_set_up_installs_by_hash_alone() -> None:
    script = (ROOT / "scripts" / "setup.sh").read_text().replace("\\\n", " ")
    installs = [line for line in script.splitlines() if "--requirement" in line]
    assert installs
    for line in installs:
        assert "--require-hashes" in line, line


@pytest.mark.parametrize(
    ("answer", "code", "says"),
    [
        ({"dependencies": [{"name": "a", "version": "1", "vulns": []}]}, 0, "No vulnerability"),
        (
            {"dependencies": [{"name": "a", "version": "1", "vulns": [{"id": "X-1", "fix_versions": ["2"]}]}]},
            1,
            "a 1: X-1, mended in 2",
        ),
        ({"dependencies": [{"name": "a", "skip_reason": "not found"}]}, 3, "cannot be told"),
        ({"dependencies": []}, 3, "cannot be told"),
        ("no database", 3, "cannot be told"),
        (None, 3, "cannot be told"),
    ],
)
def test_an_audit_that_looked_up_nothing_is_not_a_clean_one(tmp_path: Path, answer: Any, code: int, says: str) -> None:
    fake = tmp_path / "pip-audit"
    text = answer if isinstance(answer, str) else json.dumps(answer)
    fake.write_text(f"#!{sys.executable}\nprint({text!r})\n")
    if answer is not None:
        fake.chmod(0o700)
    ran = subprocess.run(
        [sys.executable, ROOT / "scripts" / "audit.py", fake], capture_output=True, text=True, check=False
    )
    assert (ran.returncode, says in ran.stdout) == (code, True), ran
