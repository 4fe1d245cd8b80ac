"""Every example runs and does what it says."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield importlib.import_module
    for name in [name for name, module in sys.modules.items() if str(EXAMPLES) in str(getattr(module, "__file__", ""))]:
        del sys.modules[name]


def test_readme():
    """Its example runs as it stands."""
    code = (EXAMPLES.parent / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    names: dict = {}
    exec(code, names)
    assert names["out"].shape == (40, 8, 64)
    assert names["step"].seq_lens.tolist() == [41, 41]
    names["cache"].check()


def test_all_examples_are_tested():
    names = {path.stem for path in EXAMPLES.glob("[a-z]*.py")}
    assert names == {"attention_layer", "transformers_generate", "speculative", "parallel_sampling", "server_loop"}


def test_attention_layer(example, device, capsys):
    output = example("attention_layer").main(device)
    assert torch.isfinite(output).all()
    assert "lengths [8, 13]" in capsys.readouterr().out


def test_transformers_generate(example, device, capsys):
    outputs = example("transformers_generate").main(device)
    assert torch.equal(outputs[0], outputs[1])
    assert "0 of them shared" not in capsys.readouterr().out


def test_speculative(example, device):
    module, tiny = example("speculative"), example("_tiny_llama")
    prompt = list(range(30, 45))
    target = tiny.tiny_llama(device)
    ids = torch.tensor([prompt], device=device)
    expected = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False)
    tokens, passes = module.main(device)
    assert tokens == expected[0, 15:].tolist()
    assert passes <= 10  # the draft is the target: all of its proposals are right
    tokens, passes = module.speculate(tiny.tiny_llama(device), tiny.tiny_llama(device, seed=1), prompt, count=40)
    assert tokens == expected[0, 15:].tolist()
    assert passes > 10  # another draft: most are rejected, and the text is the same


def test_parallel_sampling(example, device):
    engine = example("parallel_sampling").main(device)
    assert engine.cache.stats().copies == 7
    assert engine.cache.num_free_blocks == 128


def test_server_loop_outlives_a_refused_request(example, device):
    module, tiny = example("server_loop"), example("_tiny_llama")
    server = module.Server(module.Engine(tiny.tiny_llama(device), num_blocks=8, block_size=8))
    with pytest.raises(ValueError, match="the cache holds 64"):
        list(server.stream(list(range(100)), module.SamplingParams(max_tokens=4)))
    assert len(list(server.stream([1, 2, 3], module.SamplingParams(max_tokens=4)))) == 4
    server.close()


def test_server_loop(example, device):
    answers = example("server_loop").main(device)
    assert {i: len(tokens) for i, tokens in answers.items()} == {0: 10, 1: 11, 2: 12, 3: 4, 4: 14, 5: 15}
