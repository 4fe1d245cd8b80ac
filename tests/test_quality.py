"""bench/quality.py on a tiny model: an 8-bit cache stays close to the unquantised one, which is exact."""

import json
from types import SimpleNamespace

import pytest
import torch

from .tiny import tiny_model

quality = pytest.importorskip("bench.quality")


def test_report(tmp_path, monkeypatch, capsys):
    token_ids = torch.randint(2, 97, (1, 120), generator=torch.Generator().manual_seed(0))
    model = tiny_model("llama", "cpu")
    monkeypatch.setattr(
        quality, "load_model", lambda *_: (model, lambda *_, **__: SimpleNamespace(input_ids=token_ids))
    )
    quality.main(["--max-tokens", "100", "--calibration", "40", "--chunk", "16", "--out", str(tmp_path)])
    record = json.loads((tmp_path / "quality.json").read_text())
    assert record["tokens"] == 100
    exact, *rows = record["rows"]
    assert (exact["cache"], exact["agreement"], exact["KL x 1000"]) == ("float32", 1.0, 0.0)
    assert len(rows) == 11
    for row in rows:
        assert 0 < row["KL x 1000"] < 20
        assert row["agreement"] > 0.5
    divergence = {(row["cache"], row["scale"]): row["KL x 1000"] for row in rows}
    assert divergence["int8", "token_head"] < divergence["float8_e5m2", "token_head"]
    table = (tmp_path / "quality.md").read_text()
    assert table.count("\n") == 2 + len(record["rows"])
    assert table in capsys.readouterr().out


def test_text_shorter_than_its_calibration(monkeypatch, capsys):
    token_ids = torch.ones(1, 50, dtype=torch.long)
    model = tiny_model("llama", "cpu")
    monkeypatch.setattr(
        quality, "load_model", lambda *_: (model, lambda *_, **__: SimpleNamespace(input_ids=token_ids))
    )
    with pytest.raises(SystemExit):
        quality.main(["--calibration", "49"])
    assert "--calibration 49" in capsys.readouterr().err


def test_magnitudes():
    """Scales come from the calibration tokens alone: what more the pool holds does not count."""
    model = tiny_model("llama", "cpu")
    quality.paged.register()
    model.set_attn_implementation("paged_attn")
    token_ids = torch.arange(2, 22)
    with torch.inference_mode():
        largest = quality.magnitudes(model, token_ids, chunk=8)
        model.set_attn_implementation("sdpa")
        cache = model(token_ids[None], use_cache=True).past_key_values
    for layer, parts in zip(cache.layers, largest):
        for states, amax in zip((layer.keys, layer.values), parts):
            torch.testing.assert_close(states[0].abs().amax(dim=(1, 2)), amax)
