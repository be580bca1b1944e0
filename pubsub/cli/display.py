"""How the rows of an answer are shown on a terminal: as they are, or a line for each column where they are too wide."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pubsub.cli.output import Format, render, render_expanded, width_of


@dataclass(slots=True)
class Display:
    """`expanded` is on, off or auto: psql's \\x.  auto counts on a terminal alone: what is read by programs has one form."""

    output: Format
    expanded: str = "auto"

    def text(
        self, columns: Sequence[str], rows: Sequence[Sequence[Any]], columns_of_terminal: int | None = None
    ) -> str:
        """The rows, with a newline at the end; `columns_of_terminal` None: the terminal's, if there is one."""
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
