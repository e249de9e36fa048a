"""Reading and answering end to end: greedy decoding against Hugging Face's own, streaming, and which models are taken."""

import json
from pathlib import Path

import cognito_run as core
import eval_niah as niah
import pytest
import torch
from conftest import LONGROPE, TINY, tiny_config
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, LlamaConfig, MambaConfig, Phi3Config

N_PROMPT, N_NEW = 90, 16


@pytest.fixture(autouse=True)
def offline_in_an_empty_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for script in (core, niah):
        monkeypatch.setattr(script, "hub_unreachable", lambda: True)


@pytest.fixture
def ids():
    return torch.randint(3, 128, (N_PROMPT,), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def lm(tiny_model):
    return core.LM(tiny_model, core.tiny_tokenizer(), torch.device("cpu"))


@pytest.fixture
def tiny():
    """The model of `--model tiny`, in fp32."""
    return core.load_model(core.resolve_runtime("tiny", "cpu", "float32", "none"), core.load_config("tiny"), core.load_tokenizer("tiny"))


def answer(lm, ids, config, chunk=None, policy=None, in_flight=False, n_new=N_NEW):
    cache = core.new_cache(lm, core.CONFIGS[config], len(ids) + n_new, None, chunk or len(ids), False)
    result = core.generate(lm, cache, ids, n_new, chunk, on_chunk=policy if in_flight else None, before_decode=policy)
    return result, cache


@pytest.mark.parametrize("config, chunk", [("L1", None), ("L2", 7), ("L2", None)])
def test_greedy_tokens_are_hugging_faces(lm, ids, config, chunk):
    result, _ = answer(lm, ids, config, chunk)
    core.use_attention(lm.model, stock=True)
    want = lm.model.generate(ids[None], max_new_tokens=N_NEW, do_sample=False)[0, N_PROMPT:].tolist()
    stop = want.index(2) if 2 in want else None
    assert result.token_ids == want[:stop] and len(want) > 1
    assert result.finish_reason == ("length" if stop is None else "stop") and len(result.itl_s) == len(want) - 1


@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("config", ["L3", "L4"])
def test_a_budget_of_the_whole_length_changes_nothing(lm, ids, config, in_flight):
    segments = [core.Segment(f"s{i}", "x", reserved=i in (0, 4)) for i in range(5)]
    bounds = [0, 5, 30, 31, 80, N_PROMPT]
    prompt = core.Prompt(ids, segments, list(zip(bounds, bounds[1:])))
    policy = core.eviction_policy(core.CONFIGS[config], prompt, N_PROMPT, {"s1": 0.3, "s2": 0.1, "s3": 0.2})
    got, cache = answer(lm, ids, config, 16, policy, in_flight)
    want, full = answer(lm, ids, "L2", 16)
    assert got.token_ids == want.token_ids and got.compression_ratio == want.compression_ratio and policy.n_evicted == 0
    for a, b in zip(cache.buffers(), full.buffers(), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a.entries(), b.entries()))


def test_finish_reason(tiny):
    """The end token ends the answer and is no part of it; else the length does."""
    prompt = torch.tensor(tiny.tokenizer.encode("To be, or not to be"))
    long, _ = answer(tiny, prompt, "L2")
    assert long.finish_reason == "length" and len(long.token_ids) == N_NEW and len(long.itl_s) == N_NEW - 1
    for end in long.token_ids:
        tiny.model.generation_config.eos_token_id = [end]
        short, cache = answer(tiny, prompt, "L2")
        before = long.token_ids[: long.token_ids.index(end)]
        assert short.finish_reason == "stop" and short.token_ids == before and short.text == tiny.tokenizer.decode(before)
        assert cache.get_seq_length() == len(prompt) + len(before)


@pytest.mark.parametrize("text, max_new_tokens", [
    ("h\u00e9llo \u20ac5 \U0001f600!", 64), ("\u65e5\u672c\u8a9e", 64), ("", 64),
    ("ab\U0001f600", 4), ("caf\u00e9", 4), ("odd \ufffd", 64), ("odd \ufffd end", 64),
])
def test_streamed_pieces_make_the_text(tiny, monkeypatch, text, max_new_tokens):
    """Characters of several tokens come whole; what the length cuts through, or a real U+FFFD, is not lost."""
    script = [*tiny.tokenizer.encode(text), tiny.tokenizer.eos_token_id]
    real, pieces = core.forward, []

    def forward(lm, cache, input_ids):
        one_hot = torch.zeros_like(real(lm, cache, input_ids))
        one_hot[script[cache.get_seq_length() - 3]] = 1
        return one_hot

    monkeypatch.setattr(core, "forward", forward)
    cache = core.new_cache(tiny, core.CONFIGS["L2"], 8, None, 3, False)
    result = core.generate(tiny, cache, torch.tensor([5, 6, 7]), max_new_tokens, on_text=pieces.append)
    assert result.text == bytes(text, "utf-8")[:max_new_tokens].decode(errors="replace")
    assert "".join(pieces) == result.text and all(len(piece.encode()) <= 4 for piece in pieces)


def save_model(folder: Path, config) -> str:
    """A model folder as `save_pretrained` writes it, with the tiny tokenizer: one token per byte."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    core.tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def phi3(original_window: int):
    sizes = {**TINY, "vocab_size": 260, "max_position_embeddings": 4096, "bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 257}
    rope = {**LONGROPE, "original_max_position_embeddings": original_window}
    return Phi3Config(**sizes, rope_parameters=rope, original_max_position_embeddings=original_window, initializer_range=0.2)


def load(folder: str, n_positions: int) -> core.LM:
    config = core.load_config(folder)
    core.fit_window(config, folder, n_positions)
    return core.load_model(core.resolve_runtime(folder, "cpu", "float32", "none"), config, core.load_tokenizer(folder))


@torch.inference_mode()
def test_longrope_uses_one_table(tmp_path, ids):
    """Within the original window the short table; a run that passes it has the long one from its first token."""
    folder = save_model(tmp_path, phi3(original_window=64))
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for n in (64, N_PROMPT):
        want = stock(input_ids=ids[None, :n]).logits[0, -1]  # one shot: one table
        lm = load(folder, n)
        cache = core.new_cache(lm, core.CONFIGS["L2"], n, None, 16, False)
        got = core.prefill(lm, cache, ids[:n], 16, after_chunk=lambda: None)
        assert (got - want).abs().max() < 1e-4
    other = load(folder, 64)
    cache = core.new_cache(other, core.CONFIGS["L2"], N_PROMPT, None, 16, False)
    assert (core.prefill(other, cache, ids, 16, after_chunk=lambda: None) - want).abs().max() > 0.1  # both tables in one cache


def test_longrope_conversation_stays_on_one_table(tmp_path, monkeypatch, capsys):
    """The first turn ends inside the original window and the last outside it: the first must foresee that."""
    Path(tmp_path, "notes.txt").write_text("The meeting was chaired by Ada. ")
    folder, models, real = save_model(tmp_path / "phi3", phi3(original_window=300)), [], core.load_model
    monkeypatch.setattr(core, "load_model", lambda *args: models.append(real(*args)) or models[-1])
    args = core.Args(docs=(tmp_path / "notes.txt",), ask=("Who?", "When?", "Where?"), config="L2", model=folder, device="cpu",
                     dtype="float32", reranker="none", max_new_tokens=2)
    assert core.main(args) == 0
    seen = [turn["n_seen"] for turn in json.loads(capsys.readouterr().out.splitlines()[-1])["turns"]]
    assert seen[0] < 300 < seen[-1]
    rope = models[0].model.config.rope_parameters
    assert rope["short_factor"] == rope["long_factor"]


def test_a_folder_as_model(tmp_path):
    """`--model FOLDER` from the command line's arguments to the record."""
    save_model(tmp_path / "my.model", phi3(original_window=64))
    args = niah.Args(config="L2", model="my.model", device="cpu", dtype="float32", n=1, lengths=(4096,))
    assert niah.main(args) == 0
    assert len(Path("results/niah/my.model/L2-n1.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize("config, said", [
    (GPT2Config(), "gpt2"), (MambaConfig(), "mamba"),
    (LlamaConfig(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}), "dynamic"),
    (AutoConfig.for_model("gemma3_text", rope_parameters={
        "full_attention": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}), "dynamic"),
])
def test_models_refused_by_name(tmp_path, monkeypatch, capsys, config, said):
    """From the configuration alone: the folder holds no weights."""
    config.save_pretrained(tmp_path)
    core.tiny_tokenizer().save_pretrained(tmp_path)
    monkeypatch.setattr(niah, "load_model", lambda *args: pytest.fail("weights were loaded"))
    assert niah.run_main(niah.main, niah.Args(model=str(tmp_path), device="cpu", config="L2", n=1)) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and said in error and str(tmp_path) in error and error.count("\n") == 1


@pytest.mark.parametrize("architecture", core.SUPPORTED)
def test_models_taken(tmp_path, architecture):
    tiny_config(architecture).save_pretrained(tmp_path)
    assert core.load_config(str(tmp_path)).model_type == architecture


def test_fit_window():
    config = LlamaConfig(max_position_embeddings=100)
    core.fit_window(config, "m", 100)
    with pytest.raises(core.Refusal, match="101 .* 100 "):
        core.fit_window(config, "m", 101)


@pytest.mark.parametrize("capability, want", [((7, 5), torch.float16), ((8, 0), torch.bfloat16), ((9, 0), torch.bfloat16)])
def test_dtype_on_a_gpu(monkeypatch, capability, want):
    """A T4 (7.5) claims bf16 and emulates it."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert core.pick_dtype("auto", torch.device("cuda")) == want
    assert core.pick_dtype("float32", torch.device("cuda")) == torch.float32


@pytest.mark.parametrize("has_bf16, want", [(True, torch.bfloat16), (False, torch.float32)])
def test_dtype_on_a_cpu(monkeypatch, has_bf16, want):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_bf16)
    assert core.pick_dtype("auto", torch.device("cpu")) == want
    assert core.pick_dtype("bfloat16", torch.device("cpu")) == torch.bfloat16


@pytest.mark.parametrize("n_gpus, driver, device, want", [
    (0, False, "auto", ("smollm2", "cpu", "none")), (2, True, "auto", ("mistral", "cuda", "nf4")),
    (2, True, "cpu", ("smollm2", "cpu", "none")),
    (2, True, "cuda:1", ("mistral", "cuda:1", "nf4")), (0, True, "cpu", ("smollm2", "cpu", "none")),
    (2, True, "cuda:2", "cuda:2"), (0, False, "cuda", "cuda"), (0, True, "auto", "driver"),
    (0, False, "mps", "mps"), (0, False, "gpu", "gpu"),
])
def test_device_and_default_model(monkeypatch, n_gpus, driver, device, want):
    """A GPU that is there and cannot be used is said, never passed over."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: n_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: n_gpus)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_120", "compute_120"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    real = Path.exists
    monkeypatch.setattr(Path, "exists", lambda path: driver if str(path) == "/dev/nvidiactl" else real(path))
    if isinstance(want, str):
        with pytest.raises(core.Refusal, match=want):
            core.resolve_runtime("auto", device, "auto", "auto")
    else:
        got = core.resolve_runtime("auto", device, "auto", "auto")
        assert (got.name, str(got.device), got.quant) == want
        assert core.resolve_runtime("auto", device, "auto", "none").quant == "none"
        assert core.resolve_runtime("qwen", device, "auto", "auto").quant == "none"


def test_a_hidden_gpu_is_no_unusable_one(monkeypatch):
    """Who hides the GPUs wants the CPU: no word of drivers."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(Path, "exists", lambda path: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert core.pick_device("auto").type == "cpu"


@pytest.mark.parametrize("capability, taken", [((6, 1), False), ((7, 0), False), ((7, 5), True), ((10, 0), True)])
def test_a_gpu_older_than_the_build(monkeypatch, capability, taken):
    """The driver sees such a GPU, but torch has no kernels for it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_120", "compute_120"])
    if taken:
        assert core.pick_device("auto").type == "cuda"
    else:
        with pytest.raises(core.Refusal, match=rf"{capability[0]}\.{capability[1]}.*7\.5"):
            core.pick_device("auto")


@torch.inference_mode()
def test_smollm2_reads_in_chunks_as_in_one_shot(smollm2):
    """L2's logits are L1's, on 2048 tokens of real text."""
    tokens, n_last = torch.tensor(core.tokenise(smollm2.tokenizer, niah.read_haystack("prose")[:20_000])[0][:2048]), 128
    assert len(tokens) == 2048
    core.use_attention(smollm2.model, stock=True)
    want = smollm2.model(input_ids=tokens[None], logits_to_keep=n_last).logits[0]
    cache = core.new_cache(smollm2, core.CONFIGS["L2"], 2048, None, 256, False)
    core.prefill(smollm2, cache, tokens[: 2048 - n_last], 256, after_chunk=lambda: None)
    positions = torch.arange(2048 - n_last, 2048)[None]
    got = smollm2.model(input_ids=tokens[None, -n_last:], position_ids=positions, cache=cache, kv_cache=cache, use_cache=True).logits[0]
    assert (got - want).abs().max() < 1e-3


def test_smollm2_finds_a_needle_in_what_is_left(smollm2, monkeypatch):
    """L3 evicts half of a real prompt, keeps the needle's passage, and the answer is right."""
    monkeypatch.setattr(niah, "TOLERANCE", 0.05)  # so short a prompt has room for L5's second question
    args = niah.Args(n=3, kv_budget="0.5", reranker="none")
    case = niah.make_case(args, niah.TASK, smollm2.tokenizer, niah.cut_sentences(niah.read_haystack("noise")), 700, 1)
    row = niah.find_needle(args, smollm2, niah.MemoryMeter(smollm2.device), "L3", case, niah.Rankers(niah.load_embedder("minilm")), None, None)
    assert row["em"] == 1 and row["prediction"] == case.value and row["needle_kept"]
    assert row["compression_ratio"] >= 0.5 and row["evictions"] >= 2
