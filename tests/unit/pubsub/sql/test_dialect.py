"""The sqlglot dialect that includes our statements."""

from __future__ import annotations

import sqlglot

from pubsub.sql.dialect import PubsubDialect, SubscriptionNode
from pubsub.sql.statements import DropSubscription


def test_a_script_of_both_kinds() -> None:
    script = "SELECT 1; CREATE SUBSCRIPTION a CONNECTION 'x;' PUBLICATION p; ALTER TABLE t ADD COLUMN c INT; drop subscription b"
    trees = sqlglot.parse(script, read=PubsubDialect)
    assert [isinstance(tree, SubscriptionNode) for tree in trees] == [False, True, False, True]
    assert isinstance(trees[3], SubscriptionNode)
    assert trees[3].statement == DropSubscription("b")
    assert [tree.sql(PubsubDialect) for tree in trees if tree] == [
        "SELECT 1",
        "CREATE SUBSCRIPTION a CONNECTION 'x;' PUBLICATION p",
        "ALTER TABLE t ADD COLUMN c INT",
        "DROP SUBSCRIPTION b",
    ]


def test_a_password_is_not_in_the_repr() -> None:
    (tree,) = sqlglot.parse("CREATE SUBSCRIPTION a CONNECTION 'password=secret' PUBLICATION p", read=PubsubDialect)
    assert "secret" not in repr(tree)
