"""The sweep: arms that share a prefill write the rows that each would write by itself."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import eval_niah as niah  # noqa: E402
import sweep  # noqa: E402
import train_kvzap as train  # noqa: E402

MEASURED = {"ttft_s", "prefill_tokens_per_s", "itl_ms_mean", "itl_ms_p95", "retrieval_s", "peak_memory_bytes", "created",
            "shared_prefill"}
COMMON = niah.Args(model="tiny", device="cpu", lengths=(4096,), n=1, chunk_size=256, max_new_tokens=4,
                   reranker="none", prune_at="prefill")


def rows_of(path: Path) -> list[dict]:
    return [{key: value for key, value in json.loads(line).items() if key not in MEASURED}
            for line in path.read_text().splitlines()]


@pytest.fixture(autouse=True)
def empty_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def surrogates(tmp_path) -> dict[str, str]:
    """Random ones for the tiny model, by scorer."""
    config = niah.load_config("tiny")
    for kind, hidden_dim in (("linear", None), ("mlp", 8)):
        torch.manual_seed(0)
        train.save_surrogates(niah.KVzap(config.hidden_size, config.num_key_value_heads, config.num_hidden_layers, hidden_dim),
                              tmp_path / kind, {})
    return {f"kvzap-{kind}": str(tmp_path / kind) for kind in ("linear", "mlp")}


def test_same_rows(surrogates):
    arms = [replace(COMMON, config=config) for config in ("L2", "L3", "L4", "L5")]
    arms += [replace(COMMON, config="L6", scorer=scorer, keep=keep, pooled=pooled, kvzap=surrogates.get(scorer)) for scorer, keep, pooled in
             (("kvzap-mlp", 0.5, True), ("kvzap-mlp", 0.3, False), ("kvzap-linear", 0.5, False), ("random", 0.5, False),
              ("random", 0.3, True), ("key-norm", 0.5, False), ("streaming", 0.3, False), ("kvzip+", 0.5, True),
              ("kvzip+", 0.3, False))]
    alone = [replace(arm, out=Path(f"alone/{i}.jsonl")) for i, arm in enumerate(arms)]
    swept = [replace(arm, out=Path(f"swept/{i}.jsonl")) for i, arm in enumerate(arms)]
    for arm in alone:
        assert niah.main(arm) == 0
    assert sweep.sweep(niah, swept) == 0
    for one, other in zip(alone, swept):
        assert rows_of(one.out) == rows_of(other.out)
    shared = [json.loads(line).get("shared_prefill", False) for arm in swept for line in arm.out.read_text().splitlines()]
    first = {0, 4, 6}  # no paging, then each kind of surrogate, reads the prompts for those after it
    assert shared == [i not in first for i in range(len(arms)) for _ in range(COMMON.n)]


def test_borrowed_prefill_tells_no_times():
    assert sweep.sweep(niah, [replace(COMMON, config="L2"), replace(COMMON, config="L4")]) == 0
    (own, borrowed) = (json.loads(next(Path("results").rglob(f"{name}-*.jsonl")).read_text().splitlines()[0]) for name in ("L2", "L4"))
    for key in ("ttft_s", "prefill_tokens_per_s"):
        assert own[key] > 0 and borrowed[key] is None
    assert borrowed["itl_ms_mean"] > 0
    assert own["peak_memory_bytes"] is borrowed["peak_memory_bytes"] is None  # saving what was read would count


def test_cases_with_the_same_instruction_share_nothing():
    """In chunks so short the first ones of every case are equal; their rows still tell times, and later arms begin with them."""
    arms = [replace(COMMON, config=config, n=2, chunk_size=32, out=Path(f"{config}.jsonl")) for config in ("L2", "L4")]
    assert sweep.sweep(niah, arms) == 0
    shared = [[json.loads(line).get("shared_prefill", False) for line in arm.out.read_text().splitlines()] for arm in arms]
    assert shared == [[False, False], [True, True]]


def test_other_weights_share_nothing():
    arms = [replace(COMMON, config="L2", dtype=dtype, out=Path(f"{dtype}.jsonl")) for dtype in ("bfloat16", "float32")]
    assert sweep.sweep(niah, arms) == 0
    assert not any("shared_prefill" in json.loads(arm.out.read_text()) for arm in arms)


def test_arms():
    assert sweep.split_arms("--n 3 -- --config L2 -- --config L4 --seed 1".split()) == [
        ["--n", "3", "--config", "L2"], ["--n", "3", "--config", "L4", "--seed", "1"]]
    assert sweep.split_arms(["--"]) == [[]]


@pytest.mark.parametrize("given", [
    dict(config="L1"), dict(config="all"), dict(config="L3", evict_at="chunk"), dict(config="L6", prune_at="chunk"),
    dict(config="L2", trace=Path("trace.jsonl")),
])
def test_arms_that_share_nothing(given):
    with pytest.raises(niah.Refusal, match="shares no prefill"):
        sweep.sweep(niah, [replace(COMMON, config="L2"), replace(COMMON, **given)])
