"""The table of a stream's states: each message has its steps, and none is legal that PostgreSQL would not send."""

import pytest

from apply.pipeline.stream_states import Inside, after
from pubsub.errors import ProtocolViolation

# By message: the states in which it may come; those in which nothing changes are marked by None.
STEPS = {
    "B": {Inside.OUTSIDE: Inside.TRANSACTION},
    "C": {Inside.TRANSACTION: Inside.OUTSIDE},
    "b": {Inside.OUTSIDE: Inside.PREPARED},
    "P": {Inside.PREPARED: Inside.OUTSIDE, Inside.OUTSIDE: None},
    "S": {Inside.OUTSIDE: Inside.BLOCK},
    "E": {Inside.BLOCK: Inside.OUTSIDE},
    "T": dict.fromkeys((Inside.TRANSACTION, Inside.PREPARED, Inside.BLOCK)),
    **{kind: {Inside.OUTSIDE: None} for kind in "AcpKr"},
    **{kind: dict.fromkeys(Inside) for kind in "RYMO"},
}


@pytest.mark.parametrize("inside", Inside)
@pytest.mark.parametrize("kind", STEPS)
def test_steps(kind: str, inside: Inside) -> None:
    if inside in STEPS[kind]:
        assert after(ord(kind), inside) is (STEPS[kind][inside] or inside)
        return
    with pytest.raises(ProtocolViolation):
        after(ord(kind), inside)
