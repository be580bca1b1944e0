"""Find a subscription's apply worker, or wait for it: one that has failed, or has to look at its tables again, starts again soon."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

from apply.worker import ApplyWorker
from launcher.runner import Runner
from pubsub.errors import NotInPrerequisiteState

#: For how long a worker that does not stream is waited for, and how often it is looked at, in seconds.
_PATIENCE: Final = 60.0
_LOOK: Final = 0.2


async def streaming(
    runners: Mapping[int, Runner], subid: int, *, other_than: ApplyWorker | None = None
) -> tuple[Runner, ApplyWorker]:
    """Return the subscription's runner, and its apply worker once that streams.

    Raises NotInPrerequisiteState if none does within a minute, and at once for a subscription that is not run.
    """
    now = asyncio.get_running_loop().time
    deadline = now() + _PATIENCE
    while (runner := runners.get(subid)) is not None:
        worker = runner.apply
        if worker is not None and worker is not other_than and worker.streaming:
            return runner, worker
        if now() > deadline:
            break
        await asyncio.sleep(_LOOK)
    raise NotInPrerequisiteState(
        "the subscription has no apply worker that runs",
        detail="It is disabled, or a command has paused it."
        if runner is None
        else f"None has begun to stream within {_PATIENCE:.0f} s.",
        hint="pubsub status says why.",
    )
