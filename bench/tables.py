"""The tables of README.md and docs/, filled from bench/results: ``python -m bench.tables [--check]``.

A table stands between ``<!-- table NAME -->`` and ``<!-- end -->``, NAME being a key of TABLES.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tabulate import tabulate

from bench import common

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
REGION = re.compile(r"(?<=<!-- table )([\w ]+)( -->\n).*?(?=<!-- end -->)", re.DOTALL)

Row = Mapping[str, object]


def number(value: object) -> str:
    """Three significant digits; a timing is its median, a string itself, None empty."""
    if isinstance(value, Mapping):
        value = value["us"]
    if value is None:
        return ""
    if isinstance(value, str | int):
        return str(value)
    return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"


def with_rate(us: str, rate: str) -> Callable[[Row], str]:
    """``microseconds (rate)``."""
    return lambda row: f"{number(row[us])} ({number(row[rate])})" if us in row else ""


@dataclass(frozen=True)
class Table:
    """Rows of ``section`` in ``bench/results/RESULTS.json``.

    A column is a key of the row or a function of it; one that is empty in every row is left out.
    """

    results: str
    columns: Mapping[str, str | Callable[[Row], str]]
    cases: Sequence[str] | None = None  # these rows alone, in this order
    having: str | None = None  # rows with this key alone
    section: str = "rows"

    def render(self) -> str:
        rows = json.loads((common.RESULTS / f"{self.results}.json").read_text())[self.section]
        if self.having is not None:
            rows = [row for row in rows if self.having in row]
        if self.cases is not None:
            by_case = {row["case"]: row for row in rows}
            rows = [by_case[case] for case in self.cases]
        columns = {
            heading: [column(row) if callable(column) else number(row.get(column)) for row in rows]
            for heading, column in self.columns.items()
        }
        filled = {heading: cells for heading, cells in columns.items() if any(cells)}
        return tabulate(filled, headers="keys", tablefmt="github", disable_numparse=True) + "\n"


def decode_table(results: str, *columns: str, cases: Sequence[str] | None = None) -> Table:
    names = {"ready": "`metadata_ready`", "mma": "path for 8.0", "torch SDPA": "torch SDPA, contiguous"}
    return Table(results, {names.get(c, c): c for c in ("case", *columns)}, cases, having="ceiling")


PREFILL = ("4 x 4096 on 4096", "1 x 16384 on 16384", "1 x 2048 on 8192", "1 x 2048 on 32768", "8 x 512 on 8192")
DECODE = ("1 x 1k", "1 x 8k", "1 x 32k", "1 x 128k", "8 x 1k", "8 x 8k", "8 x 32k", "64 x 1k", "64 x 8k", "256 x 1k")
DECODE += ("256 x 4k", "64 x 64..8k", "63 x 1k + 64k", "15 x 512 + 128k")
DECODE_IN_SHORT = ("1 x 1k", "1 x 8k", "1 x 128k", "8 x 8k", "64 x 1k", "256 x 4k", "64 x 64..8k", "63 x 1k + 64k")
FLASHINFER = tuple(f"FI {kind}" for kind in ("cores", "tensor", "xqa", "persistent"))
TIMES = ("ceiling", "ready", "default", "no PDL", "batch invariant", "mma", "torch SDPA", *FLASHINFER, "GB/s")
QUANTISED_TIMES = ("ceiling", "ready", "default", "batch invariant", "mma", *FLASHINFER, "GB/s")

TABLES = {
    "decode in short": decode_table(
        "decode", "ceiling", "ready", "default", "torch SDPA", *FLASHINFER, cases=DECODE_IN_SHORT
    ),
    "decode": decode_table("decode", *TIMES, cases=DECODE),
    "decode fp8": decode_table("decode_fp8", *QUANTISED_TIMES, cases=DECODE),
    "prefill in short": Table(
        "prefill",
        {
            "case": "case",
            "paged": with_rate("us", "TFLOP/s"),
            "torch cuDNN, contiguous": with_rate("torch cuDNN us", "torch cuDNN TFLOP/s"),
            "torch flash, contiguous": with_rate("torch flash us", "torch flash TFLOP/s"),
        },
        PREFILL,
        having="torch flash us",
    ),
    "cache ops": Table("cache_ops", {key: key for key in ("case", "us", "GB/s", "of ceiling", "torch us")}),
}


def filled(text: str) -> str:
    """``text`` with every table as the results have it."""
    return REGION.sub(lambda match: f"{match[1]}{match[2]}\n{TABLES[match[1]].render()}\n", text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; fail where a table is out of date")
    arguments = parser.parse_args()
    stale = []
    for path in DOCUMENTS:
        text = path.read_text()
        if filled(text) != text:
            stale.append(str(path.relative_to(ROOT)))
            if not arguments.check:
                path.write_text(filled(text))
    if stale:
        print(("out of date: " if arguments.check else "filled: ") + ", ".join(stale), file=sys.stderr)
    return int(arguments.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
