"""A decoding process's output as a stream: frames cut anywhere, its end, its error, its sudden death."""

from __future__ import annotations

import asyncio
import sys

import pytest

from apply.gap.decoding_process import DecodingProcess
from pubsub.backend import messages
from pubsub.errors import ConnectionFailure, PublisherError, PubsubError
from pubsub.publisher.replication import StreamEnded


async def stream(output: bytes, *, piece: int = 1 << 20, code: int = 0) -> DecodingProcess:
    """Return the stream of a process that writes `output`, some bytes at a time, and exits with `code`."""
    program = (
        f"import sys\nout = {output!r}\n"
        f"for at in range(0, len(out), {piece}):\n"
        f"    sys.stdout.buffer.write(out[at : at + {piece}]); sys.stdout.buffer.flush()\n"
        f"print('last words', file=sys.stderr); sys.exit({code})"
    )
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=pipe, stderr=pipe)
    return DecodingProcess(process)


async def frames_until(one: DecodingProcess, error: type[Exception]) -> tuple[list[bytes], Exception]:
    frames: list[bytes] = []
    try:
        while True:
            frames += await one.receive()
    except error as found:
        return frames, found
    finally:
        await one.close()


@pytest.mark.parametrize("piece", [1, 3, 7, 1 << 20])
async def test_frames_come_whole_and_in_order(piece: int) -> None:
    sent = [b"k" + bytes(17), b"w" + bytes(24) + b"x" * 100, b"", b"w" + bytes(24)]
    one = await stream(b"".join(messages.message(b"d", frame) for frame in sent) + messages.message(b"c"), piece=piece)
    frames, _ = await frames_until(one, StreamEnded)
    assert frames == sent


async def test_a_read_ends_at_its_limit_and_the_next_goes_on() -> None:
    sent = [b"w" + bytes([number]) * 1000 for number in range(10)]
    one = await stream(b"".join(messages.message(b"d", frame) for frame in sent) + messages.message(b"c"))
    first = await one.receive(2500)
    assert first == sent[:3]
    frames, _ = await frames_until(one, StreamEnded)
    assert first + frames == sent


async def test_an_error_comes_after_the_frames_before_it() -> None:
    failure = PubsubError("requested WAL segment 0 is missing", sqlstate="58P01", detail="d", hint="h")
    one = await stream(messages.message(b"d", b"frame") + messages.error(failure), code=1)
    frames, error = await frames_until(one, PublisherError)
    assert frames == [b"frame"]
    assert isinstance(error, PublisherError)
    assert (error.message, error.sqlstate, error.detail, error.hint) == (failure.message, "58P01", "d", "h")


async def test_a_warning_is_handed_on() -> None:
    warned: list[PublisherError] = []
    warning = messages.error(PubsubError('skipped loading publication "p"', sqlstate="55000"), "WARNING")
    one = await stream(messages.message(b"d", b"1") + warning + messages.message(b"d", b"2") + messages.message(b"c"))
    one._on_warning = warned.append
    frames, _ = await frames_until(one, StreamEnded)
    assert frames == [b"1", b"2"]
    assert [one.message for one in warned] == ['skipped loading publication "p"']


async def test_a_process_that_dies_is_a_lost_connection_with_its_last_words() -> None:
    one = await stream(messages.message(b"d", b"frame") + b"d\0\0", code=3)
    frames, error = await frames_until(one, ConnectionFailure)
    assert frames == [b"frame"]
    assert isinstance(error, ConnectionFailure)
    assert error.detail == "exit code 3; it said: last words"
