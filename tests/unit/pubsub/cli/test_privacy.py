"""What a process that serves keeps from the machine's other users."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from pubsub.cli.privacy import warn_of_readers
from pubsub.settings import Settings


@pytest.mark.parametrize("umask", [0o000, 0o027, 0o077])
def test_no_core_and_no_file_that_others_may_write(umask: int) -> None:
    check = (
        f"import os, resource; os.umask({umask}); from pubsub.cli.privacy import harden; harden(); "
        "print(resource.getrlimit(resource.RLIMIT_CORE)[0], os.umask(0))"
    )
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    ran = subprocess.run(
        [sys.executable, "-c", check],
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CORE, (hard, hard)),
    )
    assert ran.stdout.split() == ["0", str(umask | 0o022)]


@pytest.mark.parametrize(
    ("text", "mode", "warned"),
    [
        ("[catalog]\nurl = 'postgresql://me:word@h/d'", 0o644, True),
        ("[catalog]\nurl = 'postgresql+asyncpg://me:word@h/d'", 0o640, True),
        ("[catalog]\nurl = 'postgresql://me:word@h/d'", 0o600, False),
        ("[catalog]\nurl = 'postgresql://me@h/d'", 0o644, False),
        ("[catalog]\nurl = 'sqlite:////x/catalog.db'", 0o644, False),
        ("[walsender]\nupstream = 'host=h password=word'", 0o644, True),
        ("[walsender]\nwal_source = 'host=h password=word'", 0o644, True),
        ("[walsender]\nupstream = 'host=h'", 0o644, False),
        ("[spark.conf]\n'spark.hadoop.fs.s3a.secret.key' = 'word'", 0o644, True),
        ("[spark.conf]\n'fs.azure.account.key.store' = 'word'", 0o644, True),
        ("[spark.conf]\n'spark.driver.memory' = '1g'", 0o644, False),
    ],
)
def test_secrets_that_others_may_read_are_warned_of(tmp_path: Path, text: str, mode: int, warned: bool) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "pubsub.toml").write_text(text)
    (tmp_path / "pubsub.toml").chmod(mode)
    settings = Settings.load(tmp_path)
    with capture_logs() as logs:
        warn_of_readers(settings)
    assert len(logs) == warned
    assert "word" not in str(logs).replace("passwords", "")
    tmp_path.chmod(0o700)
    with capture_logs() as logs:
        warn_of_readers(settings)
    assert logs == []


def test_without_a_file_there_is_nothing_to_read(tmp_path: Path) -> None:
    with capture_logs() as logs:
        warn_of_readers(Settings.load(tmp_path))
    assert logs == []
    assert not os.listdir(tmp_path)
