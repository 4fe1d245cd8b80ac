"""The tables of README.md and docs/ are those of bench/results."""

import pytest

pytest.importorskip("tabulate")

from bench import tables


@pytest.mark.parametrize("path", tables.DOCUMENTS, ids=lambda path: path.name)
def test_tables_are_up_to_date(path):
    text = path.read_text()
    assert tables.filled(text) == text, "run python -m bench.tables"
