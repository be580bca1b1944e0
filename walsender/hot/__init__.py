"""What every record and every row goes through: written so that mypyc makes good C of it.

scripts/compile_hot.py, which `make setup` runs, compiles the modules of this package where there is a C compiler, into a
directory of the environment that is named for the sources' contents and all else that matters.  Where there is none that was
made from these very sources they are run as the Python that they are: the same results, slower.  WALSENDER_INTERPRETED=1
asks for that.
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
    """Where the compiled modules made from these sources are, or would be."""
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
