"""Run `pubsub verify` in a process of its own, as the daemon does for scheduled verifications."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from pubsub.errors import PubsubError

#: How long the process may take to end once it is told to, in seconds: it drops its pin.
_PATIENCE: Final = 30.0


async def run(home: Path, subscription: str, tables: Sequence[str], sample: bool) -> Mapping[str, Any]:
    """Verify tables of a subscription of the node at `home` (none: all); return the document.

    Raises PubsubError with the command's error.
    """
    arguments = ["-m", "pubsub.cli", "--home", str(home), "verify", "--json", "--show", "0"]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *arguments,
        *(["--sample"] if sample else []),
        "--",
        subscription,
        *tables,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        output, errors = await process.communicate()
    except asyncio.CancelledError:
        await _end(process)
        raise
    try:
        found: Mapping[str, Any] = json.loads(output)
    except ValueError:
        said = errors.decode("utf-8", "replace").strip().splitlines()
        message = next((line.partition(":  ")[2] for line in said if line.startswith("ERROR:")), "")
        hint = next((line.partition(":  ")[2] for line in said if line.startswith("HINT:")), None)
        raise PubsubError(message or f"pubsub verify ended with {process.returncode}", hint=hint) from None
    return found


async def _end(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        process.terminate()
        try:
            async with asyncio.timeout(_PATIENCE):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
