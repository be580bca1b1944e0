"""PostgreSQL 18's key words that cannot be used as a name everywhere (parser/kwlist.h, by category)."""

from __future__ import annotations

from typing import Final


def words(text: str) -> frozenset[str]:
    """Return the set of the words in a text, separated by white space."""
    return frozenset(text.split())


#: Never a name unless quoted.
RESERVED: Final = words(
    """
    all analyse analyze and any array as asc asymmetric both case cast check collate column constraint create
    current_catalog current_date current_role current_time current_timestamp current_user default deferrable desc
    distinct do else end except false fetch for foreign from grant group having in initially intersect into lateral
    leading limit localtime localtimestamp not null offset on only or order placing primary references returning select
    session_user some symmetric system_user table then to trailing true union unique user using variadic when where
    window with
    """
)

#: Can name a function or type, but not a column or table.
TYPE_FUNC_NAME: Final = words(
    """
    authorization binary collation concurrently cross current_schema freeze full ilike inner is isnull join left like
    natural notnull outer overlaps right similar tablesample verbose
    """
)

#: Can name a column or table, but not a function or type.
COL_NAME: Final = words(
    """
    between bigint bit boolean char character coalesce dec decimal exists extract float greatest grouping inout int
    integer interval json json_array json_arrayagg json_exists json_object json_objectagg json_query json_scalar
    json_serialize json_table json_value least merge_action national nchar none normalize nullif numeric out overlay
    position precision real row setof smallint substring time timestamp treat trim values varchar xmlattributes
    xmlconcat xmlelement xmlexists xmlforest xmlnamespaces xmlparse xmlpi xmlroot xmlserialize xmltable
    """
)

#: The words that gram.y's ColId does not accept.
NOT_COLID: Final = RESERVED | TYPE_FUNC_NAME
#: The words that ruleutils.c: quote_identifier quotes: all but the unreserved ones.
QUOTED: Final = RESERVED | TYPE_FUNC_NAME | COL_NAME
