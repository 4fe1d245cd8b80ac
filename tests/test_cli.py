"""Command lines that make no sense are refused under the option's name, before anything is loaded or run."""

import importlib
import shutil
import subprocess
import sys

import pytest

from paged_attn.__main__ import main

PLAN = ["plan", "--layers", "2", "--kv-heads", "2", "--head-dim", "64", "--memory", "1GiB"]


@pytest.mark.parametrize(
    ("command", "option", "value"),
    [
        (["serve-bench"], "--num-requests", "0"),
        (["serve-bench"], "--rate", "0"),
        (["serve-bench"], "--rate", "nan"),
        (["serve-bench"], "--scale", "-1"),
        (["serve-bench"], "--shared-prefix", "-1"),
        (["serve-bench"], "--num-blocks", "0"),
        (["serve-bench"], "--block-size", "0"),
        (["serve-bench"], "--warmup", "-1"),
        (["serve-bench"], "--seed", "-1"),
        (["serve-bench"], "--device", "nowhere"),
        (["serve-bench"], "--model", "/nowhere"),
        (["generate"], "--samples", "0"),
        (["generate"], "--max-tokens", "many"),
        (["generate"], "--temperature", "-1"),
        (["generate"], "--top-p", "0"),
        (["generate"], "--device", "cuda:99"),
        (PLAN, "--head-dim", "12"),
        (PLAN, "--block-sizes", "0"),
    ],
)
def test_commands(command, option, value, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([*command, option, value])
    assert stopped.value.code == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"argument {option}: expected" in error
    assert repr(value) in error


@pytest.mark.parametrize(
    ("bench", "option", "value"),
    [
        ("decode", "--rounds", "0"),
        ("prefill", "--rounds", "-1"),
        ("host", "--rounds", "0"),
        ("cpu", "--threads", "0"),
        ("cache_ops", "--only", "nothing"),
        ("serving", "--max-batch-tokens", "0"),
        ("serving", "--max-batch-tokens", "8"),
        ("serving", "--live", "97"),
        ("quality", "--chunk", "0"),
    ],
)
def test_benchmarks(bench, option, value, capsys, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setattr(sys, "argv", [bench, option, value])
    with pytest.raises(SystemExit) as stopped:
        importlib.import_module(f"bench.{bench}").main()
    assert stopped.value.code == 2
    assert f"argument {option}: " in capsys.readouterr().err


def test_options_that_do_not_fit_together():
    pytest.importorskip("transformers")
    with pytest.raises(SystemExit, match="max_batch_tokens: expected at least max_num_seqs"):
        main(["serve-bench", "--device", "cpu", "--max-batch-tokens", "8", "--num-blocks", "64"])


def test_commit_of_a_result(tmp_path, monkeypatch):
    common = importlib.import_module("bench.common")
    monkeypatch.setattr(common, "ROOT", tmp_path)
    monkeypatch.delenv("COMMIT", raising=False)
    assert common.source_commit() == "unknown"
    if shutil.which("git") is None:
        pytest.skip("git is missing")

    def git(*command: str) -> None:
        identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
        subprocess.run(["git", "-C", tmp_path, *identity, *command], check=True, capture_output=True)

    for folder in ("csrc", "bench"):
        (tmp_path / folder).mkdir()
    source = tmp_path / "csrc" / "a.h"
    source.write_text("1")
    git("init")
    git("add", ".")
    git("commit", "-m", "x")
    commit = common.source_commit()
    assert len(commit) == 12
    (tmp_path / "bench" / "result.json").write_text("{}")
    assert common.source_commit() == commit
    source.write_text("2")
    assert common.source_commit() == f"{commit}-dirty"
    monkeypatch.setenv("COMMIT", "abc")
    assert common.source_commit() == "abc"
