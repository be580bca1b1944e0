"""Show the rows of an answer as a table, or in expanded form, a line for each column, if they are too wide."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from pubsub.cli.output import Format, render, render_expanded, width_of


@dataclass(slots=True)
class Display:
    """How to show rows.  `expanded` is psql's \\x: on, off or auto.

    auto has an effect only on a terminal, so that the output for programs always has the same form.
    """

    output: Format
    expanded: str = "auto"

    def text(
        self, columns: Sequence[str], rows: Sequence[Sequence[object]], columns_of_terminal: int | None = None
    ) -> str:
        """Format the rows, with a newline at the end; `columns_of_terminal` None: the width of the terminal, if any."""
        if self.output is not Format.TABLE or self.expanded == "off":
            return render(columns, rows, self.output)
        if self.expanded == "on":
            return render_expanded(columns, rows)
        if columns_of_terminal is None:
            if not sys.stdout.isatty():
                return render(columns, rows, self.output)
            columns_of_terminal = shutil.get_terminal_size().columns
        plain = render(columns, rows, self.output)
        return render_expanded(columns, rows) if rows and width_of(plain) > columns_of_terminal else plain
