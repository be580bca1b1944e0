"""promtool, Prometheus's own evaluator of rules: from the machine, or from Debian's package without installing it."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from pubsub import jars


def program() -> Path | None:
    """Return $PUBSUB_PROMTOOL, the first on the path, or one that is kept with the tests' servers; None if none can be had."""
    kept = jars.share_directory() / "bin" / "promtool"
    found = os.environ.get("PUBSUB_PROMTOOL") or shutil.which("promtool")
    if found is not None:
        return Path(found)
    return kept if kept.is_file() or _fetch(kept) else None


def _fetch(target: Path) -> bool:
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        return False
    with tempfile.TemporaryDirectory(prefix="pubsub-promtool-") as directory:
        got = subprocess.run(["apt-get", "download", "prometheus"], cwd=directory, capture_output=True, check=False)
        packages = list(Path(directory).glob("*.deb"))
        if got.returncode != 0 or not packages:
            return False
        subprocess.run(["dpkg", "-x", str(packages[0]), directory], check=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(f".{os.getpid()}")
        shutil.copy(Path(directory) / "usr" / "bin" / "promtool", partial)
        partial.replace(target)
    return True
