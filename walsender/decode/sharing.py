"""Which outputs of one pass over the WAL share what is assembled of its transactions.

Outputs with the same rules share an assembly of the transactions that begin after the last of them has come (assembly.py).  When a
pass takes over another's outputs, what was assembled there of transactions in progress comes along, in assemblies of its own;
these are closed, and dropped with the last of those transactions.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace

from walsender.decode.assembly import Assembly, Rules
from walsender.decode.output import Output
from walsender.decode.relations import Registry
from walsender.decode.transactions import Part, Transactions, Txn


class Sharing:
    """The outputs of one pass, and their assemblies.

    `make_assembly` makes one; `adopt` has one that came from another pass go on in this one.  `here()`: an LSN from which on
    transactions have not begun.
    """

    def __init__(
        self,
        registry: Registry,
        transactions: Transactions,
        make_assembly: Callable[[Rules], Assembly],
        adopt: Callable[[Assembly], None],
        here: Callable[[], int],
    ) -> None:
        self.outputs: list[Output] = []
        self.assemblies: list[Assembly] = []
        self._registry = registry
        self._transactions = transactions
        self._make_assembly = make_assembly
        self._adopt = adopt
        self._here = here

    def add(self, output: Output) -> None:
        """Feed an output from here on: transactions that have not begun yet."""
        since = self._here()
        self.outputs.append(output)
        self._registry.add(output, since)
        assembly = self._open(output.rules.key)
        if assembly is None:
            assembly = self._make_assembly(output.rules)
            self.assemblies.append(assembly)
        assembly.outputs[output] = since

    def remove(self, output: Output) -> None:
        """Stop feeding an output, and leave its work undone."""
        output.discard()
        self.outputs.remove(output)
        self._registry.remove(output, self._here())
        for assembly in list(self.assemblies):
            if assembly.outputs.pop(output, None) is not None and not assembly.outputs:
                self.drop(assembly)

    def parts(self, txn: Txn) -> list[Part]:
        """Make the parts of a transaction that begins."""
        return [assembly.add(txn) for assembly in self.assemblies if not assembly.closed]

    def drop(self, assembly: Assembly) -> None:
        """Forget an assembly that no output needs, with what it holds."""
        self.assemblies.remove(assembly)
        for txn in {part.txn for part in assembly.parts}:
            txn.parts = [part for part in txn.parts if part.assembly is not assembly]
        assembly.close()

    def absorb(self, other: Sharing) -> None:
        """Take over the outputs of another pass, which has read as far as this one, to the byte.

        What the other has assembled of transactions in progress comes with them.  Transactions that begin from now on are
        assembled once for outputs with the same rules.
        """
        here = self._here()
        self._registry.take_over(other._registry, here)
        for txn in other._transactions.all():
            own = self._transactions.by_xid.get(txn.xid) or self._transactions.begin(txn.xid, txn.first_lsn)
            for xid in txn.subxids:
                if xid in txn.xids:
                    self._transactions.assign(txn.xid, xid, txn.first_lsn)
            own.has_base |= txn.has_base
            own.messages |= txn.messages
            own.aborted |= txn.aborted
            own.catalog_xids |= txn.catalog_xids
            own.invalidations = max(own.invalidations, txn.invalidations)
            if own.cache is None and txn.cache is not None:
                own.cache = {}
            for part in txn.parts:
                part.txn = own
                own.parts.append(part)
        for txn in self._transactions.all():
            if txn.cache:
                self._registry.retire(txn.cache, here)
                txn.cache = {}
        for assembly in other.assemblies:
            self._adopt(assembly)
            self.assemblies.append(assembly)
            # All of them or none: an output in two open assemblies would be sent everything twice.
            if not assembly.closed and all(output.start <= here for output in assembly.outputs):
                for output in list(assembly.outputs):
                    self._settle(output, assembly, here)
        for output in other.outputs:
            # Generations are counted by each tracker.
            output.plugin.forget(definitions=False)
        self.outputs += other.outputs
        other.outputs.clear()

    def fold(self, output: Output, other: Output) -> bool:
        """Return whether `other` sends the same as `output` from now on, and may be removed."""
        if (
            output.alike is None
            or output.alike != other.alike
            or output.waits
            or other.waits
            or output.joining
            or other.joining
            or max(output.start, other.start) > self._here()
        ):
            return False
        together = [one for one in self.assemblies if output in one.outputs or other in one.outputs]
        if len(together) != 1 or {output, other} - together[0].outputs.keys():
            return False
        since = max(together[0].outputs[output], together[0].outputs[other])
        return all(txn.first_lsn >= since for txn in self._transactions.all())

    def is_between(self, output: Output) -> bool:
        """Return whether the output has sent all of each transaction of which it has sent anything."""
        return not output.waits and not any(
            part.streamed for one in self.assemblies if output in one.outputs for part in one.parts
        )

    def _settle(self, output: Output, assembly: Assembly, here: int) -> None:
        """Have transactions that begin from here on come from the assembly that all outputs with the same rules share."""
        key = output.rules.settled
        shared = self._open(key)
        if shared is assembly:
            return
        if shared is None:
            assembly.rules = replace(assembly.rules, key=key)
            return
        shared.outputs[output] = here
        if all(one in shared.outputs for one in assembly.outputs):
            assembly.closed = True

    def _open(self, key: Hashable) -> Assembly | None:
        return next((one for one in self.assemblies if one.rules.key == key and not one.closed), None)
