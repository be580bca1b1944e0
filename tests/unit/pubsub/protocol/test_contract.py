"""The type contract: its page is current, and the option `types` chooses within it."""

from __future__ import annotations

import pyarrow as pa
import pytest

from pubsub.errors import PubsubError
from pubsub.protocol.column_types import delta_type
from pubsub.protocol.type_contract import BY_NAME, RULES
from pubsub.sql.typechoices import TypeChoices
from scripts.reference import TYPES_PAGE, types_page


def test_page_is_current() -> None:
    """`make docs` regenerates it."""
    assert TYPES_PAGE.read_text(encoding="utf-8") == types_page()


def test_each_type_once() -> None:
    assert len({rule.oid for rule in RULES}) == len(RULES) == len({rule.name for rule in RULES})


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_delta_type_follows_the_contract(rule: object) -> None:
    found = BY_NAME[rule.name]  # type: ignore[attr-defined]
    natural = delta_type(found.oid, (38 << 16) + 4 if found.name == "numeric" else -1)
    assert natural == (pa.string() if found.natural is None else found.natural)
    assert delta_type(found.oid, -1, choice="text") == pa.string()


def test_choices() -> None:
    choices = TypeChoices.parse(
        'timestamptz text, timestamp  WITHOUT time zone text, "S".t."a.b" text, public.t.c natural'
    )
    assert choices.of_type(("timestamptz", "timestamp with time zone")) == "text"
    assert choices.of_type(("timestamp", "timestamp without time zone")) == "text"
    assert choices.of_column("S", "t", "a.b") == "text"
    assert choices.of_column("public", "t", "c") == "natural"
    assert choices.of_column("x", "t", "c") is None is choices.of_type(("date",))
    assert TypeChoices.parse("") == TypeChoices()


def test_choices_of_arrays_and_composites() -> None:
    choices = TypeChoices.parse(
        'arrays natural, integer [] text, double precision[] natural, public."My Type" natural, "S".m[] text, "char"[] text'
    )
    assert choices.types == {
        "arrays": "natural",
        "integer[]": "text",
        "double precision[]": "natural",
        'public."My Type"': "natural",
        '"S".m[]': "text",
        '"char"[]': "text",
    }


@pytest.mark.parametrize(
    "text",
    [
        "date",
        "date exact",
        "t.c.d.e text",
        "numeric(3) text",
        "[] natural",
        "a. text",
        "int4[3] text",
        "text",
        "date text,",
        ", date text",
    ],
)
def test_invalid_choices_are_refused(text: str) -> None:
    with pytest.raises(PubsubError) as caught:
        TypeChoices.parse(text)
    assert caught.value.sqlstate == "22023"
