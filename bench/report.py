"""Printing the results as tables, and writing them as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.results import OURS, THEIRS, Comparison, Limit, Results


def show(console: Console, results: Results, machine: dict[str, Any]) -> None:
    """Print ratios and limits, and the machine they were measured on."""
    cores = f"{machine['cores']} cores, {machine['memory_bytes'] / (1 << 30):.0f} GB"
    console.print(
        f"\n{cores}, {machine['cpu']}; {machine['postgresql']}; Python {machine['python']}; {machine['java']}"
    )
    if results.comparisons:
        console.print(_comparisons(results.comparisons))
    if results.limits:
        console.print(_limits(results.limits))
    for failure in results.failures:
        console.print(f"FAILED  {failure}", style="bold red", markup=False, highlight=False)


def write(path: Path, document: dict[str, Any]) -> None:
    """Write the results as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2, default=str) + "\n")


def _comparisons(comparisons: list[Comparison]) -> Table:
    table = Table(title="rates beside PostgreSQL's own; medians", title_justify="left")
    table.add_column("what")
    for name in ("changes", "theirs", "changes/s", "ours", "changes/s", "ratio", "goal", ""):
        table.add_column(name, justify="right")
    for one in comparisons:
        table.add_row(
            one.title,
            f"{one.changes:,}",
            f"{one.seconds(THEIRS):.2f} s",
            f"{one.rate(THEIRS):,.0f}",
            f"{one.seconds(OURS):.2f} s",
            f"{one.rate(OURS):,.0f}",
            f"{one.ratio:.2f}",
            "" if one.goal is None else f"{one.goal:.1f}",
            _verdict(one.met),
        )
    return table


def _limits(limits: list[Limit]) -> Table:
    table = Table(title="lag, memory, fields", title_justify="left")
    table.add_column("what")
    for name in ("theirs", "ours", "goal", ""):
        table.add_column(name, justify="right")
    for one in limits:
        goal = "" if one.goal is None else f"< {_amount(one.goal, one.unit)}"
        table.add_row(one.title, _amount(one.theirs, one.unit), _amount(one.ours, one.unit), goal, _verdict(one.met))
    return table


def _amount(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    match unit:
        case "bytes":
            return f"{value / (1 << 20):,.0f} MB"
        case "rate":
            return f"{value:,.0f}"
        case "times":
            return f"{value:.2f} times"
        case _:
            return f"{value:.2f} s"


def _verdict(met: bool | None) -> str:
    if met is None:
        return ""
    return "[green]met[/green]" if met else "[red]missed[/red]"
