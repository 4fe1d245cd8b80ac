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

from tabulate import tabulate

from bench import common

DOCUMENTS = [common.ROOT / "README.md", *sorted((common.ROOT / "docs").glob("*.md"))]
REGION = re.compile(r"(?<=<!-- table )([\w ]+)( -->\n).*?(?=<!-- end -->)", re.DOTALL)

Row = Mapping[str, object]


def with_rate(us: str, rate: str) -> Callable[[Row], str]:
    """``microseconds (rate)``."""
    return lambda row: f"{common.cell(row[us])} ({common.cell(row[rate])})" if us in row else ""


@dataclass(frozen=True)
class Table:
    """Rows of ``section`` in ``bench/results/RESULTS.json``.

    A column is a key of the row or a function of it; one that is empty in every row is left out.
    """

    results: str
    columns: Mapping[str, str | Callable[[Row], str]]
    cases: Sequence[str] | None = None  # these rows alone, in this order
    where: Callable[[Row], bool] = lambda row: True  # these alone
    section: str = "rows"

    def render(self) -> str:
        rows = json.loads((common.RESULTS / f"{self.results}.json").read_text())[self.section]
        rows = [row for row in rows if self.where(row)]
        if self.cases is not None:
            by_case = {row["case"]: row for row in rows}
            rows = [by_case[case] for case in self.cases]
        columns = {
            heading: [column(row) if callable(column) else common.cell(row.get(column)) for row in rows]
            for heading, column in self.columns.items()
        }
        filled = {heading: cells for heading, cells in columns.items() if any(cells)}
        return tabulate(filled, headers="keys", tablefmt="github", disable_numparse=True) + "\n"


def has(*keys: str, but: str = "") -> Callable[[Row], bool]:
    return lambda row: all(key in row for key in keys) and but not in row


NAMES = {"ready": "`metadata_ready`", "mma": "path for 8.0", "torch SDPA": "torch SDPA, contiguous"}
FLASHINFER = tuple(f"FI {kind}" for kind in ("cores", "tensor", "xqa", "persistent"))
SHORT = ("1 x 1k", "1 x 8k", "1 x 128k", "8 x 8k", "64 x 1k", "256 x 4k", "64 x 64..8k", "63 x 1k + 64k")
LONG = ("1 x 1k", "1 x 8k", "1 x 32k", "1 x 128k", "8 x 1k", "8 x 8k", "8 x 32k", "64 x 1k", "64 x 8k", "256 x 1k")
LONG += ("256 x 4k", "64 x 64..8k", "63 x 1k + 64k", "15 x 512 + 128k")
TIMES = ("ceiling", "ready", "default", "no PDL", "batch invariant", "mma", "torch SDPA", *FLASHINFER, "GB/s")
PREFILL_PEERS = ("torch cuDNN", "torch flash", "FlashInfer fa2", "FlashInfer fa3")
CHUNKS = ("4 x 4096 on 4096", "1 x 16384 on 16384", "1 x 2048 on 8192", "1 x 2048 on 32768", "8 x 512 on 8192")


def columns(*keys: str) -> dict[str, str]:
    return {NAMES.get(key, key): key for key in keys}


def prefill_columns(*peers: str) -> dict[str, str | Callable[[Row], str]]:
    ours: dict[str, str | Callable[[Row], str]] = {"case": "case", "paged": with_rate("us", "TFLOP/s")}
    return ours | {peer: with_rate(f"{peer} us", f"{peer} TFLOP/s") for peer in peers}


def head_dim_columns() -> dict[str, str | Callable[[Row], str]]:
    columns: dict[str, str | Callable[[Row], str]] = {"head_dim": "head_dim"}
    for heading, name in (("paged", "ours"), ("torch cuDNN", "torch cuDNN"), ("torch flash", "torch flash")):
        columns |= {heading: with_rate(f"{name} us", f"{name} TFLOP/s"), f"{heading} of 128": f"{name} of 128"}
    return columns


SCALES = ("tensor", "head", "token_head", "token_head / tensor")
EIGHT_BIT = ("unquantised us", "e4m3 us", "e5m2 us", "int8 us", "e4m3, scales a token us")

TABLES = {
    "decode in short": Table(
        "decode", columns("case", "ceiling", "ready", "default", "torch SDPA", *FLASHINFER), SHORT, has("ceiling")
    ),
    "decode": Table("decode", columns("case", *TIMES), LONG, has("ceiling")),
    "decode verify": Table(
        "decode", columns("case", "ready", "default", "mma", "GB/s"), where=has("mma", but="ceiling")
    ),
    "decode variants": Table("decode", columns("case", "ready", "default", "GB/s"), where=has("ready", but="mma")),
    "decode fp8": Table("decode_fp8", columns("case", *TIMES), LONG, has("ceiling")),
    "decode scales": Table("decode_fp8", columns("case", *SCALES), where=has("token_head")),
    "prefill in short": Table("prefill", prefill_columns(*PREFILL_PEERS), CHUNKS, has("torch flash us")),
    "prefill": Table("prefill", {**prefill_columns(*PREFILL_PEERS), "MHz": "MHz"}, where=has("torch flash us")),
    "prefill variants": Table("prefill", prefill_columns(), where=has("MHz", but="torch flash us")),
    "prefill head dims": Table("prefill", head_dim_columns(), section="head_dims"),
    "prefill 8 bit": Table("prefill", columns("case", *EIGHT_BIT), where=has("unquantised us")),
    "mixed": Table("prefill", columns("case", "us", "of the sum"), section="mixed"),
    "cache ops": Table("cache_ops", columns("case", "us", "GB/s", "of ceiling", "torch us", "FlashInfer us")),
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
            stale.append(str(path.relative_to(common.ROOT)))
            if not arguments.check:
                path.write_text(filled(text))
    if stale:
        print(("out of date: " if arguments.check else "filled: ") + ", ".join(stale), file=sys.stderr)
    return int(arguments.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
