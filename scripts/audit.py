"""List the known vulnerabilities of the packages in requirements.lock, with pip-audit.

    python scripts/audit.py [COMMAND …]     COMMAND: pip-audit, by default fetched and run by uv

Exit codes: 0 none is known; 1 some are, and are listed; 3 it cannot be told, because there is no pip-audit, or it reached no
database, or the database does not know a package.  pip-audit itself ends with 0 when it could not look up anything.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

NONE: Final = 0
FOUND: Final = 1
UNKNOWN: Final = 3

_LOCK: Final = Path(__file__).resolve().parents[1] / "requirements.lock"
_UV: Final = (sys.executable, "-m", "uv", "tool", "run", "pip-audit==2.10.1")
_OPTIONS: Final = (
    "--requirement",
    str(_LOCK),
    "--require-hashes",
    "--disable-pip",
    "--format",
    "json",
    "--progress-spinner",
    "off",
)


def main(command: Sequence[str]) -> int:
    """Run pip-audit and print what it found; return the exit code."""
    try:
        ran = subprocess.run([*(command or _UV), *_OPTIONS], capture_output=True, text=True, check=False)
        packages = json.loads(ran.stdout)["dependencies"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        said = ran.stderr.strip().splitlines()[-1:] if isinstance(error, ValueError) else [str(error)]
        print(
            "It cannot be told whether vulnerabilities are known: pip-audit did not run or reached no database.",
            *said,
            sep="\n",
        )
        return UNKNOWN
    skipped = [one["name"] for one in packages if "skip_reason" in one]
    found = [(one["name"], one["version"], vuln) for one in packages for vuln in one.get("vulns", ())]
    for name, version, vuln in found:
        print(f"{name} {version}: {vuln['id']}, mended in {', '.join(vuln['fix_versions']) or 'no version yet'}")
    if found:
        return FOUND
    if skipped or not packages:
        print(
            f"It cannot be told of {len(skipped)} of {len(packages)} packages: the database does not know {', '.join(skipped)}."
        )
        return UNKNOWN
    print(f"No vulnerability of the {len(packages)} packages is known.")
    return NONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
