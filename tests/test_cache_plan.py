"""``python -m paged_attn plan``: what fits into a budget, and what each block size wastes."""

import numpy as np
import pytest

from paged_attn import capacity
from paged_attn.__main__ import main
from paged_attn.cli.plan import memory_size

LLAMA = ["plan", "--layers", "32", "--kv-heads", "8", "--head-dim", "128"]


@pytest.mark.parametrize("block_size", [1, 3, 16, 64])
def test_averages_over_decode_steps(block_size):
    inputs, outputs = np.array([5, 16, 100]), np.array([3, 40, 1])
    lengths = [length for a, b in zip(inputs, outputs) for length in range(a + 1, a + b + 1)]
    use = capacity.paged_use(inputs, outputs, block_size)
    assert use.filled == pytest.approx(np.mean(lengths))
    assert use.reserved == pytest.approx(np.mean([-(-n // block_size) * block_size for n in lengths]))
    assert use.waste == pytest.approx(1 - use.filled / use.reserved)


def test_contiguous_reservations():
    use = capacity.contiguous_use(np.array([10, 90]), np.array([2, 20]), 100)
    assert use.reserved == 100
    assert use.filled == pytest.approx(11.5)
    assert use.refused == 0.5


@pytest.mark.parametrize(
    ("text", "expected"),
    [("40GiB", 40 << 30), ("80GB", 80 * 10**9), ("1.5 GiB", 3 << 29), ("100", 100), ("2g", 2 * 10**9), ("7kib", 7168)],
)
def test_memory_sizes(text, expected):
    assert memory_size(text) == expected


def test_a_trace(capsys, tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text("input_len,output_len\n1000,24\n4090,100\n")
    assert main([*LLAMA, "--memory", "10GiB", "--trace", str(trace)]) == 0
    lines = capsys.readouterr().out.splitlines()
    blocks_of_16 = next(line.split() for line in lines if "blocks of 16 " in line)
    assert blocks_of_16[3:6] == ["2", "MiB", "5,120"]
    contiguous = next(line.split() for line in lines if "contiguous, 4,096 " in line)
    assert contiguous[-1] == "50.0%"


def test_one_kind_of_request(capsys):
    assert main([*LLAMA, "--memory", "1GiB", "--input-len", "100", "--output-len", "8", "--block-sizes", "32"]) == 0
    assert "108 tokens on average" in capsys.readouterr().out


HEADER = "input_len,output_len\n"


@pytest.mark.parametrize("content", ["", "a,b\n1,2\n", HEADER + "1,x\n", HEADER + "0,0\n", HEADER + "9,-1\n"])
def test_bad_traces_stop_with_one_line(tmp_path, content):
    trace = tmp_path / "trace.csv"
    trace.write_text(content)
    with pytest.raises(SystemExit, match="--trace"):
        main([*LLAMA, "--memory", "1GiB", "--trace", str(trace)])


@pytest.mark.parametrize(
    "options",
    [["--memory", "much"], ["--memory", "1GiB", "--block-sizes", "0"], ["--memory", "1GiB", "--head-dim", "100"], []],
)
def test_bad_options_are_refused(options):
    with pytest.raises(SystemExit):
        main([*LLAMA, *options])
