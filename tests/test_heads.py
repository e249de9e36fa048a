"""The benchmark of which heads a scorer feeds."""

import json
import sys

import numpy as np
import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import eval_niah as niah  # noqa: E402
import heads  # noqa: E402


def test_what_heads_keep_is_what_the_evaluation_keeps(tmp_path, capsys, monkeypatch):
    """The table's figures follow from the maps, and what they leave out is what the evaluation's own row says is removed."""
    maps = {}
    draw = heads.draw
    monkeypatch.setattr(heads, "draw", lambda shares, keep, path: maps.update(shares) or draw(shares, keep, path))
    args = heads.Args(model="tiny", device="cpu", scorers=("key-norm", "streaming"), haystacks=("noise",), n=1,
                      out=tmp_path / "heads.png")
    assert heads.main(args) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert args.out.read_bytes().startswith(b"\x89PNG")
    for fact in said["scorers"]:
        share = maps["noise", fact["scorer"]]
        assert share.shape == (2, 2) and 1 - share.mean() == pytest.approx(0.6, abs=1e-3)
        run = niah.Args(model="tiny", device="cpu", config="L6", scorer=fact["scorer"], keep=0.4, pooled=True, n=1,
                        prune_at="prefill", lengths=(4096,), out=tmp_path / f"{fact['scorer']}.jsonl")
        assert niah.main(run) == 0
        row = json.loads(run.out.read_text())
        assert row["compression_ratio"] == pytest.approx(1 - share.mean())
    assert json.loads(args.out.with_suffix(".json").read_text())["scorers"] == said["scorers"]
    oracle, key_norm, streaming = said["scorers"]
    assert oracle["spearman"] == pytest.approx(1) and oracle["r2"] == pytest.approx(1)
    assert streaming["spearman"] is None and streaming["r2"] is None
    assert 0 <= key_norm["r2"] <= 1
    order = [np.argsort(np.argsort(maps["noise", scorer].ravel())) for scorer in ("kvzip+", "key-norm")]
    assert key_norm["spearman"] == pytest.approx(np.corrcoef(*order)[0, 1])


def test_starved_heads():
    share, oracle = np.array([[0.05, 0.5], [0.09, 0.9]]), np.array([[0.4, 0.1], [0.2, 0.9]])
    fact = heads.compare(share, oracle)
    assert fact["starved"] == 2 and fact["oracle_of_starved"] == pytest.approx(0.3)
    assert heads.compare(oracle, share)["oracle_of_starved"] is None


def test_r2_is_the_mean_of_each_heads():
    rng = np.random.default_rng(0)
    scores, oracle = rng.normal(size=(2, 3, 2, 50))
    naive = [np.corrcoef(scores[i, j], oracle[i, j])[0, 1] ** 2 for i in range(3) for j in range(2)]
    assert heads.mean_r2(scores, oracle) == pytest.approx(np.mean(naive))
    scores[0, 0] = 1.0
    assert heads.mean_r2(scores, oracle) is None
