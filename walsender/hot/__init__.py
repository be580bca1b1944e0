"""The code that every record and every row passes through, written so that mypyc makes good C of it.

scripts/compile_hot.py, which `make setup` runs, compiles the modules of this package if there is a C compiler.  They go
into a directory of the environment that is named for the sources' contents and all else that matters.  Without modules
compiled from these very sources the package is interpreted: the same results, slower.  WALSENDER_INTERPRETED=1 forces
that.
"""

from __future__ import annotations

import hashlib
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Final

MODULES: Final = ("walk", "rows", "catalogs")


def compiled_directory() -> Path:
    """Return the directory for the modules compiled from these sources; it need not exist."""
    parts = [sys.implementation.cache_tag or "", sys.platform, version("librt")]
    digest = hashlib.sha256("\0".join(parts).encode())
    for name in MODULES:
        digest.update((Path(__file__).parent / f"{name}.py").read_bytes())
    return Path(sys.prefix) / "walsender-hot" / digest.hexdigest()[:16]


def _use_compiled() -> bool:
    directory = compiled_directory()
    if os.environ.get("WALSENDER_INTERPRETED", "0") not in {"", "0"} or not directory.is_dir():
        return False
    __path__.insert(0, str(directory))
    return True


COMPILED: Final = _use_compiled()
"""Whether the compiled modules are in use."""
