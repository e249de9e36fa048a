"""eval_stress.py: room beyond the window by YaRN, said and recorded; memory that stays flat in flight."""

import copy
import json
from pathlib import Path

import eval_stress as stress
import pytest
import torch
from transformers import AutoModelForCausalLM

CPU = dict(model="tiny", device="cpu", dtype="float32", quant="none", reranker="none")


@pytest.fixture(autouse=True)
def offline_in_an_empty_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(stress, "hub_unreachable", lambda: True)


@pytest.fixture
def short_window(monkeypatch):
    """The tiny model with 4096 positions."""
    real = stress.load_config

    def load_config(name):
        config = real(name)
        config.max_position_embeddings = 4096
        return config

    monkeypatch.setattr(stress, "load_config", load_config)
    return load_config


def evaluate(Run=stress.EvalRun, **given) -> int:
    return stress.run_main(lambda args: stress.main(args, Run), stress.Args(**{**CPU, "n": 1, "lengths": (4096, 8192), **given}))


def read(path) -> list[dict]:
    rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
    assert not any(stress.row_fault(row) or row.keys() - stress.SCHEMA.keys() for row in rows)
    return rows


def yarn_frequencies(theta: float, dim: int, factor: float, window: int, fast: float = 32, slow: float = 1) -> torch.Tensor:
    """YaRN by its paper (section 3.2): dimensions that turn often in the window stay, slow ones are interpolated."""
    frequencies = theta ** -(torch.arange(0, dim, 2) / dim)

    def dimension(turns: float) -> float:  # that makes so many turns over the window
        return dim * torch.log(torch.tensor(window / (turns * 2 * torch.pi))).item() / (2 * torch.log(torch.tensor(theta)).item())

    low, high = int(dimension(fast)), -int(-dimension(slow) // 1)
    ramp = ((torch.arange(dim // 2) - low) / (high - low)).clamp(0, 1)
    return frequencies / factor * ramp + frequencies * (1 - ramp)


@pytest.mark.parametrize("length, factor", [(8192, 2.0), (12288, 3.0), (16384, 4.0)])
def test_yarn_gives_the_paper_s_frequencies(short_window, length, factor):
    given = short_window("tiny")
    theta, before = given.rope_parameters["rope_theta"], given.to_dict()
    config = stress.stretch(given, "tiny", length, "yarn")
    assert given.to_dict() == before and config.rope_parameters["factor"] == factor
    rotary = AutoModelForCausalLM.from_config(config).model.rotary_emb
    assert torch.allclose(rotary.inv_freq, yarn_frequencies(theta, 16, factor, 4096), rtol=1e-5)
    assert rotary.attention_scaling == pytest.approx(0.1 * torch.log(torch.tensor(factor)).item() + 1)
    assert config.max_position_embeddings == length


def test_a_length_that_fits_is_left_alone(short_window):
    config = short_window("tiny")
    before = config.to_dict()
    assert all(stress.stretch(config, "tiny", 4096, rope) is config for rope in ("yarn", "none"))
    assert config.to_dict() == before


@pytest.mark.parametrize("parameters", [{"rope_type": "llama3", "factor": 8.0}, {"full_attention": {"rope_type": "default"}}])
def test_frequencies_that_are_scaled_already_are_refused(short_window, parameters):
    config = short_window("tiny")
    config.rope_parameters, before = parameters, copy.deepcopy(parameters)
    with pytest.raises(stress.Refusal, match="8192 tokens .* 4096 positions"):
        stress.stretch(config, "tiny", 8192, "yarn")
    assert (config.rope_parameters, config.max_position_embeddings) == (before, 4096)


def test_no_rope_refuses(short_window, monkeypatch, capsys):
    monkeypatch.setattr(stress, "load_model", lambda *args: pytest.fail("weights were loaded"))
    capsys.readouterr()
    assert evaluate(rope="none") == 2 and "8192 tokens" in (error := capsys.readouterr().err) and "--rope yarn" in error
    assert evaluate(rope="ntk") == 2 and "--rope ntk" in capsys.readouterr().err


def test_each_length_has_its_own_frequencies(short_window, capsys):
    """Chunks and one shot read alike under both; the factor is said and recorded; a second run has nothing to do."""
    assert evaluate(config="all", trace=Path("run.trace.jsonl")) == 0
    out = capsys.readouterr().out
    assert "8192 tokens exceed the model's window: YaRN, factor 2\n" in out and "4096 tokens exceed" not in out
    rows = {name: read(f"results/stress/tiny/{name}-n1.jsonl") for name in ("L1", "L2", "L3", "L4", "L5")}
    for two in rows.values():
        assert [(row["context_length"], row["rope"], row["rope_factor"]) for row in two] == [(4096, "none", 1.0), (8192, "yarn", 2.0)]
        assert all(row["task"] == "stress" and row["error"] is None and row["case_id"].startswith("stress-") for row in two)
    assert [row["text"] for row in rows["L1"]] == [row["text"] for row in rows["L2"]]
    before = Path("results/stress/tiny/L2-n1.jsonl").read_bytes()
    assert evaluate(config="L2") == 0 and Path("results/stress/tiny/L2-n1.jsonl").read_bytes() == before


def test_in_flight_with_an_absolute_budget_memory_is_flat(short_window):
    assert evaluate(config="L3", kv_budget="1500", evict_at="chunk", lengths=(4096, 8192, 16384)) == 0
    short, middle, long = (row["kv_bytes_peak"] for row in read("results/stress/tiny/L3-n1-budget1500-inflight.jsonl"))
    assert long <= 1.1 * middle <= 1.21 * short


@pytest.mark.parametrize("positions", ["rebased", "ranked"])
def test_what_is_moved_together_in_flight_needs_no_window_beyond_the_model_s(short_window, capsys, positions):
    """Four windows of text at the model's own frequencies, in the same memory; the files and the rows say which positions."""
    flags = dict(config="L3", kv_budget="1500", evict_at="chunk", positions=positions, rope="none", lengths=(4096, 8192, 16384))
    assert evaluate(**flags) == 0 and "YaRN" not in capsys.readouterr().out
    rows = read(f"results/stress/tiny/L3-n1-none-budget1500-inflight-{positions}.jsonl")
    assert all((row["rope"], row["rope_factor"], row["positions"]) == ("none", 1.0, positions) for row in rows)
    short, middle, long = (row["kv_bytes_peak"] for row in rows)
    assert long <= 1.1 * middle <= 1.21 * short


def test_positions_that_need_room_are_refused_or_get_it(short_window, capsys):
    """A budget longer than the window; eviction after reading; a configuration beside L3 that would read under its YaRN."""
    moved = dict(config="L3", positions="rebased", rope="none", lengths=(8192,))
    for given in (dict(kv_budget="4096", evict_at="chunk"), dict(kv_budget="1500", evict_at="pre-decode")):
        assert evaluate(**moved, **given) == 2 and "4096 positions" in capsys.readouterr().err
    flags = dict(kv_budget="1500", evict_at="chunk", positions="rebased", lengths=(8192,))
    assert evaluate(config="all", **flags) == 2 and "name one --config at a time" in capsys.readouterr().err


def test_out_of_memory_is_a_row(short_window):
    class Full(stress.EvalRun):
        def generate(self, name, prompt, policy):
            if len(prompt.input_ids) > 5000:
                raise RuntimeError("[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: you tried")
            return super().generate(name, prompt, policy)

    assert evaluate(Full, config="L1") == 1
    fits, fails = read("results/stress/tiny/L1-n1.jsonl")
    assert fits["error"] is None and fails["error"].startswith("out of memory: ") and fails["em"] is None
