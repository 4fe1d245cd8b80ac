"""The tables of README.md and docs/ are those of bench/results, which keep a row in a line."""

import json

import pytest

pytest.importorskip("tabulate")

from bench import common, tables


@pytest.mark.parametrize("path", tables.DOCUMENTS, ids=lambda path: path.name)
def test_tables_are_up_to_date(path):
    text = path.read_text()
    assert tables.filled(text) == text, "run python -m bench.tables"


@pytest.mark.parametrize("path", sorted(common.RESULTS.glob("*.json")), ids=lambda path: path.name)
def test_results_keep_a_row_in_a_line(path):
    text = path.read_text()
    assert common.to_json(json.loads(text)) == text
