"""Reading and answering end to end: greedy decoding against Hugging Face's own, streaming, and which models are taken."""

import copy
import json
import time
from pathlib import Path

import cognito_run as core
import eval_niah as niah
import eval_stress as stress
import pytest
import torch
from conftest import LONGROPE, TINY, read, tiny_config
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


def answer(lm, ids, config, chunk=None, policy=core.Policy(), n_new=N_NEW, n_before=0, on_text=None):
    """Read and answer under a configuration's cache and attention; the first `n_before` tokens have been read before."""
    config = core.CONFIGS[config]
    cache = core.make_cache(core.PolicyArgs(chunk_size=chunk or len(ids)), config, lm.model, len(ids) + n_new, None)
    with core.attention(lm.model, config.stock):
        if n_before:
            read(lm, cache, ids[:n_before], chunk)
        return core.generate(lm, cache, ids, n_new, chunk, policy, on_text), cache


@pytest.mark.parametrize("config, chunk", [("L1", None), ("L2", 7), ("L2", None)])
def test_greedy_tokens_are_hugging_faces(lm, ids, config, chunk):
    result, _ = answer(lm, ids, config, chunk)
    with core.attention(lm.model, stock=True):
        want = lm.model.generate(ids[None], max_new_tokens=N_NEW, do_sample=False)[0, N_PROMPT:].tolist()
    stop = want.index(2) if 2 in want else None
    assert result.token_ids == want[:stop] and len(want) > 1
    assert result.finish_reason == ("length" if stop is None else "stop") and len(result.itl_s) == len(want) - 1


def held(cache) -> list[torch.Tensor]:
    """Keys and values in use, layer by layer."""
    if not isinstance(cache, core.PagedCache):
        return [t for layer in cache.layers for t in (layer.keys, layer.values)]
    return [t for buffer in cache.buffers() for t in buffer.entries()]


@pytest.mark.parametrize("config, chunk", [("L1", 16), ("L2", 16), ("L2", 7)])
def test_what_was_read_before_is_passed_over(lm, ids, config, chunk):
    """A sequence of which the cache has the beginning is read on from there, to the same tokens and the same cache."""
    want, whole = answer(lm, ids, config, chunk)
    for n_before in (chunk, 4 * chunk):
        got, cache = answer(lm, ids, config, chunk, n_before=n_before)
        assert (got.n_prompt_tokens, got.n_read) == (N_PROMPT, N_PROMPT - n_before)
        assert got.token_ids == want.token_ids and got.finish_reason == want.finish_reason
        assert got.compression_ratio == want.compression_ratio
        assert all(torch.equal(x, y) for x, y in zip(held(cache), held(whole), strict=True))
    assert (want.n_prompt_tokens, want.n_read) == (N_PROMPT, N_PROMPT)


class Noting(core.Policy):
    """Writes down what it is called for, and how much the cache has read by then."""

    def __init__(self):
        self.calls = []

    def after_chunk(self, cache):
        self.calls.append(("chunk", cache.get_seq_length()))

    def before_decode(self, cache):
        self.calls.append(("decode", cache.get_seq_length()))

    def after_token(self, cache):
        self.calls.append(("token", cache.get_seq_length()))


@pytest.mark.parametrize("n_new", [1, 5])
@pytest.mark.parametrize("config, chunk, n_before, read_to", [
    ("L1", None, 0, [90]), ("L2", None, 0, [90]), ("L2", 90, 0, [90]), ("L2", 89, 0, [89, 90]),
    ("L2", 40, 0, [40, 80, 90]), ("L2", 40, 40, [80, 90]), ("L2", 40, 80, [90]),
])
def test_a_policy_of_ones_own(tiny, ids, config, chunk, n_before, read_to, n_new):
    """`generate` calls it after every chunk, once before decoding, and after every token that is read: not the last one."""
    tiny.model.generation_config.eos_token_id, tiny.tokenizer.eos_token = None, None
    policy = Noting()
    result, _ = answer(tiny, ids, config, chunk, policy, n_new, n_before)
    assert len(result.token_ids) == n_new and result.finish_reason == "length"
    assert policy.calls == [*(("chunk", at) for at in read_to), ("decode", N_PROMPT),
                            *(("token", N_PROMPT + i) for i in range(1, n_new))]


def test_a_policy_sees_every_token_but_the_one_that_ends_the_answer(tiny, ids):
    long, _ = answer(tiny, ids, "L2")
    end = long.token_ids[5]
    tiny.model.generation_config.eos_token_id = [end]
    policy = Noting()
    short, _ = answer(tiny, ids, "L2", policy=policy)
    assert short.finish_reason == "stop" and len(short.token_ids) == long.token_ids.index(end)
    assert policy.calls[2:] == [("token", N_PROMPT + i + 1) for i in range(len(short.token_ids))]


def test_a_policy_evicts_by_itself(tiny, ids):
    """One that drops the prompt's middle: the cache is without it, and the answer says how much is gone."""
    class Middle(core.Policy):
        def before_decode(self, cache):
            cache.evict([(30, 60)])

    result, cache = answer(tiny, ids, "L2", 16, Middle())
    assert all(30 > at or at >= 60 for buffer in cache.buffers() for row in buffer.entries()[2] for at in row.tolist())
    assert result.compression_ratio == pytest.approx(1 / 3)


def test_a_traced_policy_is_the_policy_and_tells(tiny, ids, tmp_path):
    """Bytes before and after each occasion to evict, then after every token; a file has a step and its tags in every line."""
    path = tmp_path / "some.trace.jsonl"
    policy = core.KeyNorm(20, in_flight=True)
    plain, _ = answer(tiny, ids, "L2", 40, core.KeyNorm(20, in_flight=True), n_new=3)
    result, cache = answer(tiny, ids, "L2", 40, core.Traced(policy, core.trace_to(path, case_id="a")), n_new=3)
    assert result.token_ids == plain.token_ids and core.Traced(policy, print).facts() == policy.facts() and policy.n_cuts == 3
    events = [json.loads(line) for line in path.read_text().splitlines()]
    reading = [(event, n) for n in (40, 80, 90) for event in ("prefill_chunk", "after_eviction")]
    assert [(e["event"], e["n_seen"]) for e in events] == [*reading, ("decode", 90), ("decode", 91), ("decode", 92)]
    assert [e["step"] for e in events] == list(range(9)) and {e["case_id"] for e in events} == {"a"}
    sizes = [e["kv_bytes"] for e in events]
    assert all(before > after for before, after in zip(sizes[0:6:2], sizes[1:6:2])) and sizes[-1] == core.kv_bytes(cache)
    assert core.trace_to(None) is None


@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("config", ["L3", "L4"])
def test_a_budget_of_the_whole_length_changes_nothing(lm, ids, config, in_flight):
    segments = [core.Segment(f"s{i}", "x", reserved=i in (0, 4)) for i in range(5)]
    bounds = [0, 5, 30, 31, 80, N_PROMPT]
    prompt = core.Prompt(ids, segments, list(zip(bounds, bounds[1:])))
    args = core.PolicyArgs(config=config, evict_at="chunk" if in_flight else "pre-decode")
    policy = core.make_policy(args, core.CONFIGS[config], prompt, N_PROMPT, {"s1": 0.3, "s2": 0.1, "s3": 0.2})
    got, cache = answer(lm, ids, config, 16, policy)
    want, full = answer(lm, ids, "L2", 16)
    assert got.token_ids == want.token_ids and got.compression_ratio == want.compression_ratio
    assert policy.facts() == {"evict_at": args.evict_at, "evicted_segments" if config == "L3" else "cuts": 0}
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


@pytest.fixture
def dictate(tiny, monkeypatch):
    """Has the model of `tiny` do its work and then say a given text, behind a prompt of three tokens."""
    real = core.forward

    def dictate(text: str) -> None:
        script = [*tiny.tokenizer.encode(text), tiny.tokenizer.eos_token_id]

        def forward(lm, cache, input_ids):
            one_hot = torch.zeros_like(real(lm, cache, input_ids))
            one_hot[script[cache.get_seq_length() - 3]] = 1
            return one_hot

        monkeypatch.setattr(core, "forward", forward)

    return dictate


@pytest.mark.parametrize("text, max_new_tokens", [
    ("h\u00e9llo \u20ac5 \U0001f600!", 64), ("\u65e5\u672c\u8a9e", 64), ("", 64),
    ("ab\U0001f600", 4), ("caf\u00e9", 4), ("odd \ufffd", 64), ("odd \ufffd end", 64),
])
def test_streamed_pieces_make_the_text(tiny, dictate, text, max_new_tokens):
    """Characters of several tokens come whole; what the length cuts through, or a real U+FFFD, is not lost."""
    dictate(text)
    pieces = []
    result, _ = answer(tiny, torch.tensor([5, 6, 7]), "L2", n_new=max_new_tokens, on_text=pieces.append)
    assert result.text == bytes(text, "utf-8")[:max_new_tokens].decode(errors="replace")
    assert "".join(pieces) == result.text and all(len(piece.encode()) <= 4 for piece in pieces)


def test_who_is_told_the_answer_takes_none_of_its_time(tiny, dictate):
    """A slow terminal is no slow model."""
    dictate("To be")
    pause, told = 0.2, []
    result, _ = answer(tiny, torch.tensor([5, 6, 7]), "L2", on_text=lambda piece: told.append(piece) or time.sleep(pause))
    assert told == [*"To be", ""] and len(result.itl_s) == 5
    assert max(*result.itl_s, result.ttft_s) < pause / 2


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
    config = core.fit_window(config, folder, n_positions)
    return core.load_model(core.resolve_runtime(folder, "cpu", "float32", "none"), config, core.load_tokenizer(folder))


def last_logits(lm: core.LM, ids: torch.Tensor, chunk: int) -> torch.Tensor:
    with core.attention(lm.model, stock=False):
        return read(lm, core.PagedCache(lm.model.config), ids, chunk)


@torch.inference_mode()
def test_longrope_uses_one_table(tmp_path, ids):
    """Within the original window the short table; a run that passes it has the long one from its first token."""
    folder = save_model(tmp_path, phi3(original_window=64))
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for n in (64, N_PROMPT):
        want = stock(input_ids=ids[None, :n]).logits[0, -1]  # one shot: one table
        assert (last_logits(load(folder, n), ids[:n], 16) - want).abs().max() < 1e-4
    assert (last_logits(load(folder, 64), ids, 16) - want).abs().max() > 0.1  # both tables in one cache


def test_longrope_conversation_stays_on_one_table(tmp_path, monkeypatch):
    """The first turn ends inside the original window and the last, a long question, outside it: the first must foresee that."""
    Path(tmp_path, "notes.txt").write_text("The meeting was chaired by Ada. ")
    folder, models, real = save_model(tmp_path / "phi3", phi3(original_window=300)), [], core.load_model
    monkeypatch.setattr(core, "load_model", lambda *args: models.append(real(*args)) or models[-1])
    args = core.Args(docs=(tmp_path / "notes.txt",), ask=("Who?", "When? " * 30), config="L2", model=folder, device="cpu",
                     dtype="float32", reranker="none", max_new_tokens=2, json=tmp_path / "said.json")
    assert core.main(args) == 0
    seen = [turn["n_seen"] for turn in json.loads((tmp_path / "said.json").read_text())["turns"]]
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
    assert core.fit_window(config, "m", 100).max_position_embeddings == 100
    with pytest.raises(core.Refusal, match="101 .* 100 "):
        core.fit_window(config, "m", 101)


def test_a_configuration_is_fitted_and_stretched_beside_the_one_given():
    """One configuration serves runs of several lengths, so what one of them needs must not stay in it."""
    config = phi3(original_window=64)
    before = copy.deepcopy(config.to_dict())
    long = core.fit_window(config, "m", 65)
    assert long.rope_parameters["short_factor"] == long.rope_parameters["long_factor"] == LONGROPE["long_factor"]
    assert core.fit_window(config, "m", 64).rope_parameters["short_factor"] == LONGROPE["short_factor"]
    assert config.to_dict() == before

    for config in (LlamaConfig(**TINY), tiny_config("qwen3")):
        before = copy.deepcopy(config.to_dict())
        wide = stress.stretch(config, "m", 2048, "yarn")
        assert wide.max_position_embeddings == 2048
        assert (wide.rope_parameters["rope_type"], wide.rope_parameters["factor"]) == ("yarn", 4)
        for rope in ("yarn", "none"):
            assert stress.stretch(config, "m", 512, rope).to_dict() == before
        with pytest.raises(stress.Refusal, match="--rope none"):
            stress.stretch(config, "m", 2048, "none")
        assert config.to_dict() == before
        wider = stress.stretch(config, "m", 4096, "yarn")
        assert wider.rope_parameters["factor"] == 8 and wide.rope_parameters["factor"] == 4


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
    with core.attention(smollm2.model, stock=True):
        want = smollm2.model(input_ids=tokens[None], logits_to_keep=n_last).logits[0]
    cache, positions = core.PagedCache(smollm2.model.config, capacity=2048), torch.arange(2048 - n_last, 2048)[None]
    last = dict(input_ids=tokens[None, -n_last:], position_ids=positions, cache=cache, kv_cache=cache, use_cache=True)
    with core.attention(smollm2.model, stock=False):
        read(smollm2, cache, tokens[: 2048 - n_last], 256)
        got = smollm2.model(**last).logits[0]
    assert (got - want).abs().max() < 1e-3


def test_smollm2_finds_a_needle_in_what_is_left(smollm2, monkeypatch):
    """L3 evicts half of a real prompt, keeps the needle's passage, and the answer is right."""
    monkeypatch.setattr(niah, "TOLERANCE", 0.05)  # so short a prompt has room for L5's second question
    monkeypatch.setattr(niah, "load_tokenizer", lambda name: smollm2.tokenizer)  # reading it again takes seconds

    class SecondCase(niah.NeedleRun):
        """One of three cases, with the model that is there already."""

        def __init__(self, args, task, flags, configs):
            super().__init__(args, task, flags, lambda args, *given: dict.fromkeys(args.lengths, smollm2.model.config))

        def open(self, cases, *given):
            super().open(cases[1:2], *given)

        def load(self, model_config):
            return smollm2

    args = niah.Args(model="smollm2", device="cpu", dtype="float32", config="L3", n=3, lengths=(700,), kv_budget="0.5",
                     reranker="none", out=Path("out.jsonl"))
    assert niah.main(args, SecondCase) == 0
    row = json.loads(Path("out.jsonl").read_text())
    assert row["em"] == 1 and [row["prediction"]] == row["answers"] and row["needle_kept"]
    assert row["compression_ratio"] >= 0.5 and row["evictions"] == row["evicted_segments"] >= 2
