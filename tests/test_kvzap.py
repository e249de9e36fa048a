"""KVzap against naive references: what is pruned is as if hidden, scores follow the paper's formula, files are kvpress's."""

import dataclasses
import json
import math
import sys
from pathlib import Path

import cognito_run as core
import eval_niah as niah
import eval_squad as squad
import eval_stress as stress
import pytest
import torch
import train_kvzap as train
from conftest import read, tiny_config
from test_cache import oracle_attention, oracle_logits, paged_logits
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM

N_PROMPT, N_MORE = 90, 12
NOT_SLIDING = ("llama", "qwen2", "qwen3", "phi3", "gemma")


@pytest.fixture
def ids():
    return torch.randint(3, 128, (N_PROMPT + N_MORE,), generator=torch.Generator().manual_seed(1))


def random_surrogates(config, seed=0, hidden_dim=None) -> core.KVzap:
    torch.manual_seed(seed)
    return core.KVzap(config.hidden_size, config.num_key_value_heads, config.num_hidden_layers, hidden_dim).eval()


@torch.inference_mode()
def pruned_logits(model, cache, input_ids, chunk, policy) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits of a chunked reading with the policy after every chunk, and what each layer's heads could not see: (Hkv, n, n)."""
    hidden = [torch.zeros(2, len(input_ids), len(input_ids), dtype=torch.bool) for _ in cache.layers]
    out = []
    for part in input_ids.split(chunk or len(input_ids)):
        start = cache.get_seq_length()
        positions = torch.arange(start, start + len(part))[None]
        with core.attention(model, stock=False), core.hidden_states_to(cache, model):
            out.append(model(input_ids=part[None], position_ids=positions, cache=cache, kv_cache=cache, use_cache=True).logits[0])
        policy.after_chunk(cache)
        seen = cache.get_seq_length()
        for layer, hide in zip(cache.layers, hidden):
            for head, buffer in enumerate(layer.buffers):
                gone = torch.ones(seen, dtype=torch.bool)
                gone[buffer.entries()[2][0].long()] = False
                hide[head, seen:, :seen] = gone
    return torch.cat(out), hidden


@pytest.mark.parametrize("chunk", (1, 7, 64, None))
@pytest.mark.parametrize("given", [dict(threshold=0.0), dict(threshold=0.3), dict(keep=0.4), dict(keep=0.3, pooled=True)])
def test_pruned_is_hidden(tiny_model, ids, chunk, given):
    """In flight, on every architecture, by threshold and by share: logits are those of the uncut cache under a mask."""
    config = tiny_model.config
    scorers = core.make_scorers("kvzap-mlp", config, random_surrogates(config, hidden_dim=8))
    cache = core.PagedCache(config, ragged=True, scorers=scorers)
    got, hidden = pruned_logits(tiny_model, cache, ids, chunk, core.Pruner("kvzap-mlp", window=16, **given))
    want = oracle_logits(tiny_model, ids, [hide.repeat_interleave(2, 0) for hide in hidden])
    assert (got - want).abs().max() < 1e-4
    assert 0.1 < 1 - core.kv_entries(cache) / (len(ids) * 6)


@pytest.mark.parametrize("chunk", (1, 7, None))
@torch.inference_mode()
def test_the_threshold_drops_what_scores_below_it_once_it_has_left_the_window(tiny_model, ids, chunk):
    """Scores are recomputed from the attention inputs that an independent pass sees."""
    config = tiny_model.config
    if config.model_type in ("mistral", "gemma2", "gemma3_text"):
        pytest.skip("a sliding window drops entries too")
    surrogates = random_surrogates(config)
    cache = core.PagedCache(config, ragged=True, scorers=core.make_scorers("kvzap-linear", config, surrogates))
    pruner = core.Pruner("kvzap-linear", window=16, threshold=0.1)
    _, hidden = pruned_logits(tiny_model, cache, ids, chunk, pruner)
    inputs = []
    hooks = [layer.self_attn.register_forward_pre_hook(lambda m, a, k: inputs.append(k["hidden_states"][0]), with_kwargs=True)
             for layer in tiny_model.model.layers]
    oracle_logits(tiny_model, ids, [hide.repeat_interleave(2, 0) for hide in hidden])
    [hook.remove() for hook in hooks]
    n_dropped = 0
    for layer, module, h in zip(cache.layers, surrogates.layers, inputs):
        scores = torch.nn.functional.linear(h, module.weight, module.bias).T  # (Hkv, n)
        for buffer, s in zip(layer.buffers, scores):
            want = [i for i in range(len(ids)) if i >= len(ids) - 16 or s[i] >= 0.1]
            assert buffer.entries()[2][0].tolist() == want
            assert torch.allclose(buffer.scores[0, : buffer.length], s[want], atol=1e-4)
            n_dropped += len(ids) - len(want)
    assert pruner.n_evicted == n_dropped > 0


def test_share_by_a_naive_ranking():
    """Each head its best, or all heads together; the window always stays."""
    scores = torch.randn(2, 2, 50, generator=torch.Generator().manual_seed(3))

    def filled():
        config = type("C", (), {"num_hidden_layers": 2})
        scorers = [lambda hidden, keys, positions, layer=layer: scores[layer] for layer in range(2)]
        cache = core.PagedCache(config, ragged=True, scorers=scorers)
        for layer in cache.layers:
            layer.update(torch.randn(1, 2, 50, 4), torch.randn(1, 2, 50, 4))
        return cache

    forced = scores.clone()
    forced[:, :, 40:] = math.inf
    cache = filled()
    core.Pruner("random", window=10, keep=0.5).evict(cache)
    for layer, s in zip(cache.layers, forced):
        assert [b.entries()[2][0].tolist() for b in layer.buffers] == [sorted(sorted(range(50), key=lambda i: -one[i])[:25]) for one in s]
    cache = filled()
    pruner = core.Pruner("random", window=10, keep=0.3, pooled=True)
    pruner.evict(cache)
    best = sorted(((forced[la, h, i].item(), la, h, i) for la in range(2) for h in range(2) for i in range(50)), reverse=True)[:60]
    for la, layer in enumerate(cache.layers):
        for h, buffer in enumerate(layer.buffers):
            assert buffer.entries()[2][0].tolist() == sorted(i for _, a, b, i in best if (a, b) == (la, h))
    assert pruner.n_evicted == 140 and core.kv_entries(cache) == 60
    core.Pruner("random", window=64, keep=0.1).evict(whole := filled())
    assert core.kv_entries(whole) == 200
    for pooled in (False, True):  # a share smaller than the window
        core.Pruner("random", window=10, keep=0.1, pooled=pooled).evict(cache := filled())
        assert all(buffer.entries()[2][0].tolist() == list(range(40, 50)) for buffer in cache.buffers())


BOUNDS = [0, 8, 22, 37, 48, 63, 75, N_PROMPT]  # of seven segments, the first and the last reserved
SCORES = {"s1": 0.3, "s2": 0.1, "s3": 0.4, "s4": 0.2, "s5": 0.5}
N_HEADS = 6


class Holdings(core.Policy):
    """Evicts nothing: writes down which positions each head holds whenever an evictor may act."""

    def __init__(self):
        self.held: list[list[list[int]]] = []

    def after_chunk(self, cache):
        self.held.append([head.tolist() for buffer in cache.buffers() for head in buffer.entries()[2]])

    before_decode = after_chunk


class Answering(core.InTurn):
    """Has its policies take for the answer what is read behind the prompt."""

    def after_chunk(self, cache):
        if cache.get_seq_length() > N_PROMPT:
            return self.after_token(cache)
        super().after_chunk(cache)
        if cache.get_seq_length() == N_PROMPT:
            self.before_decode(cache)


def l7(ids, budget, store=None, **given) -> tuple[core.RAGAwarePager, core.Pruner]:
    """The policies of L7, in their order."""
    segments = [core.Segment(f"s{i}", "x", reserved=i in (0, 6)) for i in range(7)]
    prompt = core.Prompt(ids[:N_PROMPT], segments, list(zip(BOUNDS, BOUNDS[1:])))
    args = core.PolicyArgs(config="L7", threshold=0.0, window=16, **given)
    return core.make_policy(args, core.CONFIGS["L7"], prompt, budget, SCORES, store).policies


def scored_cache(config) -> core.PagedCache:
    scorers = core.make_scorers("kvzap-mlp", config, random_surrogates(config, hidden_dim=8))
    return core.PagedCache(config, ragged=True, scorers=scorers)


def naive_out(held: list[list[int]], seen: int, out: set[str], budget: int, scores=SCORES) -> set[str]:
    """The segments that are out when a pager has acted on these positions: the lowest go until the entries left fit."""
    spans = {f"s{i}": range(*span) for i, span in enumerate(zip(BOUNDS, BOUNDS[1:]))}
    size = {name: sum(at in spans[name] for head in held for at in head) for name in SCORES}
    rest = sum(len(head) for head in held) - sum(size.values())
    begun = {name for name in SCORES if spans[name].start < seen}
    left = begun - out
    while rest + sum(size[name] for name in left) > budget * N_HEADS:
        left.remove(min(left, key=scores.get))
    return begun - left


@pytest.mark.parametrize("chunk", (6, 30))
@pytest.mark.parametrize("evict_at", ["chunk", "pre-decode"])
def test_the_budget_of_a_pruned_cache_counts_what_survives(tiny_model, ids, chunk, evict_at):
    """Segments go, lowest first, until the entries left fit: fewer than by tokens; and what is gone is as if hidden."""
    cache, before, after = scored_cache(tiny_model.config), Holdings(), Holdings()
    budget = 34 if tiny_model.config.model_type in NOT_SLIDING else 29  # a sliding layer holds no more than its window
    pager, pruner = l7(ids, budget, evict_at=evict_at)
    got, hidden = pruned_logits(tiny_model, cache, ids, chunk, Answering(before, pager, after, pruner))
    out = set()
    for i, (were, are) in enumerate(zip(before.held, after.held, strict=True)):
        if evict_at == "chunk" or i == len(before.held) - 1:
            out = naive_out(were, min((i + 1) * chunk, N_PROMPT), out, budget)
            assert sum(map(len, are)) <= budget * N_HEADS
        else:
            assert were == are
    assert pager.out.keys() == out and pager.facts()["evicted_segments"] == len(out) and pruner.facts()["evicted_entries"] > 0

    by_tokens, _ = l7(ids, budget, evict_at=evict_at)
    paged_logits(tiny_model, whole := core.PagedCache(tiny_model.config), ids[:N_PROMPT], None)
    by_tokens.before_decode(whole)
    assert len(out) < len(by_tokens.out) and (len(out) > 0) == (tiny_model.config.model_type != "mistral")  # all of it slides
    want = oracle_logits(tiny_model, ids, [hide.repeat_interleave(2, 0) for hide in hidden])
    assert (got - want).abs().max() < 1e-4


@pytest.mark.parametrize("evict_at", ["chunk", "pre-decode"])
def test_a_pager_before_the_pruning_acts_as_if_alone(ids, evict_at):
    """Where pruning waits for the prefill, the pager has whole segments to count: those of L3 go, then entries of the rest."""
    torch.manual_seed(0)
    config = tiny_config("llama")
    config.initializer_range = 0.2
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    alone, (lone, _) = core.PagedCache(config), l7(ids, 48, evict_at=evict_at)
    with core.attention(model, stock=False):
        read(core.LM(model, None, torch.device("cpu")), alone, ids[:N_PROMPT], 30, lone)
    lone.before_decode(alone)

    cache, paged, pruned = scored_cache(config), Holdings(), Holdings()
    pager, pruner = l7(ids, 48, evict_at=evict_at, prune_at="prefill")
    got, hidden = pruned_logits(model, cache, ids, 30, Answering(pager, paged, pruner, pruned))
    assert pager.out == lone.out and 0 < pager.n_evicted == lone.n_evicted < len(SCORES)
    assert paged.held[-1] == [head.tolist() for buffer in alone.buffers() for head in buffer.entries()[2]]
    assert all(set(after) < set(before) for before, after in zip(paged.held[-1], pruned.held[-1], strict=True))
    want = oracle_logits(model, ids, [hide.repeat_interleave(2, 0) for hide in hidden])
    assert (got - want).abs().max() < 1e-4


@pytest.mark.parametrize("on_disk", [False, True])
def test_what_survived_of_a_segment_comes_back(ids, tmp_path, on_disk):
    """A page holds the entries that pruning had left, it takes that much of the budget, and comes back bit for bit."""
    torch.manual_seed(0)
    config, store = tiny_config("llama"), core.PageStore(tmp_path if on_disk else None)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    cache, (pager, pruner) = scored_cache(config), l7(ids, 34, store)
    pruned_logits(model, cache, ids[:N_PROMPT], 6, pruner)
    cache.compact()
    whole = [[tensor.clone() for tensor in buffer.tensors()] for buffer in cache.buffers()]
    at = [held[2][0].tolist() for held in whole]
    outs, upside_down = [], {name: 0.9 - score for name, score in SCORES.items()}
    for scores in (SCORES, {"s1": 0.5, "s2": 0.4, "s3": 0.3, "s4": 0.2, "s5": 0.1}, upside_down):
        pager.scores = scores
        pager.evict(cache)
        outs.append(naive_out(at, N_PROMPT, set(), 34, scores))
        assert pager.out.keys() == outs[-1] and core.kv_entries(cache) <= 34 * N_HEADS
        gone = {i for name in outs[-1] for i in range(*pager.spans[name])}
        for buffer, held, places in zip(cache.buffers(), whole, at, strict=True):
            left = [i for i, place in enumerate(places) if place not in gone]
            for now, then in zip(buffer.tensors(), held, strict=True):
                assert torch.equal(now[:, : buffer.length], then[:, left])
        assert len(list(tmp_path.iterdir())) == len(outs[-1]) * on_disk
    assert all(0 < len(out) < len(SCORES) for out in outs) and outs[0] != outs[1] != outs[2]


def test_dropping_moves_the_rest_up_and_compacting_frees():
    buffer = core.KVBuffer(torch.empty(1, 0, 4), torch.empty(1, 0, 4), 0, scored=True)
    k, v, s = torch.randn(1, 20, 4), torch.randn(1, 20, 4), torch.randn(1, 20)
    buffer.append(k, v, torch.arange(20, dtype=torch.int32), s)
    gone = torch.tensor([False, True, False, True, True, False])
    buffer.drop(gone)
    stay = [*range(15), 16, 19]
    stay = [i for i in range(20) if i < 14 or not gone[i - 14]]
    assert buffer.length == 17 and buffer.positions[0, :17].tolist() == stay
    assert all(torch.equal(t[:, :17], want[:, stay]) for t, want in zip(buffer.tensors(), (k, v, torch.arange(20)[None], s)))
    buffer.compact()
    assert buffer.keys.untyped_storage().nbytes() == 17 * 4 * 4 and buffer.positions[0].tolist() == stay


def test_long_generation_stays_bounded():
    """1024 tokens: the cache holds about the window, and every token is the masked oracle's."""
    torch.manual_seed(0)
    config = tiny_config("llama")
    config.initializer_range, config.max_position_embeddings = 0.2, 2048
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    tokenizer = type("T", (), {"eos_token_id": None, "decode": lambda self, ids, **kwargs: ""})()
    lm = core.LM(model, tokenizer, torch.device("cpu"))
    surrogates = random_surrogates(config)
    cache = core.PagedCache(config, ragged=True, scorers=core.make_scorers("kvzap-linear", config, surrogates))
    pruner, prompt = core.Pruner("kvzap-linear", window=32, threshold=0.4), torch.randint(3, 128, (60,))
    sizes, kept = [], []

    class Noting(core.Policy):
        def before_decode(self, cache):
            sizes.append(core.kv_bytes(cache))
            kept.append([[b.entries()[2][0].clone() for b in layer.buffers] for layer in cache.layers])

        after_token = before_decode

    with core.attention(model, stock=False):
        result = core.generate(lm, cache, prompt, 1024, 16, core.InTurn(pruner, Noting()))
    n = 60 + 1023
    share = core.kv_entries(cache) / (6 * n)
    assert len(result.token_ids) == 1024 and share < 0.5
    assert max(sizes) < (share + 0.12) * n * core.entry_bytes(config, torch.float32)
    hidden = [torch.ones(2, n, n, dtype=torch.bool) for _ in range(3)]
    for layer in hidden:
        layer[:, :60] = False  # the reading of the prompt is checked elsewhere: take over what it could see
    ids = torch.cat([prompt, torch.tensor(result.token_ids[:-1])])
    replay = core.PagedCache(config, ragged=True, scorers=core.make_scorers("kvzap-linear", config, surrogates))
    _, seen = pruned_logits(model, replay, prompt, 16, core.Pruner("kvzap-linear", window=32, threshold=0.4))
    for layer, mine in enumerate(seen):
        hidden[layer][:, :60, :60] = mine
    for step, layers in enumerate(kept[:-1]):  # what the token read at position 60 + step could see
        for layer, heads in enumerate(layers):
            for head, positions in enumerate(heads):
                hidden[layer][head, 60 + step, positions.long()] = False
                hidden[layer][head, 60 + step, 60 + step] = False
    want = oracle_logits(model, ids, [hide.repeat_interleave(2, 0) for hide in hidden])[59:].argmax(-1)
    assert want.tolist() == result.token_ids


@torch.inference_mode()
def naive_scores(model, ids, stop, begin, plus) -> torch.Tensor:
    """Log KVzip or KVzip+ by the formula, from attention weights over the whole sequence: (L, Hkv, stop)."""
    taken = []

    def watching(module, query, key, value, attention_mask, scaling, **kwargs):
        groups = query.shape[1] // key.shape[1]
        n = query.shape[2]
        blind = torch.triu(torch.ones(n, n, dtype=torch.bool), 1)
        a = (query @ key.repeat_interleave(groups, 1).transpose(2, 3) * scaling).masked_fill(blind, -torch.inf).softmax(-1)[0]
        taken.append((a, value[0].repeat_interleave(groups, 0)))
        return oracle_attention(module, query, key, value, None, scaling, **kwargs)

    AttentionInterface.register("watching", watching)
    AttentionMaskInterface.register("watching", lambda *args, **kwargs: None)
    model.set_attn_implementation("watching")
    inputs = []
    hooks = [layer.self_attn.register_forward_pre_hook(lambda m, a, k: inputs.append(k["hidden_states"][0]), with_kwargs=True)
             for layer in model.model.layers]
    with torch.inference_mode():
        model(input_ids=ids[None], use_cache=False)
    [hook.remove() for hook in hooks]
    out = []
    for (a, v), h, layer in zip(taken, inputs, model.model.layers):
        n_heads, _, head_dim = v.shape
        scores = torch.zeros(n_heads, stop)
        for head in range(n_heads):
            W = layer.self_attn.o_proj.weight[:, head * head_dim : (head + 1) * head_dim]  # (D, head_dim)
            for i in range(stop):
                rows = a[head, begin:, i]
                scores[head, i] = (rows * (W @ v[head, i]).norm() / h[begin:].norm(dim=-1) if plus else rows).max()
        out.append(scores.view(2, -1, stop).amax(1).clamp_min(1e-30).log())
    return torch.stack(out)


@pytest.mark.parametrize("plus", [False, True])
@pytest.mark.parametrize("chunk", [5, 64])
def test_oracle_scores_follow_the_formula_and_leave_the_cache_as_it_was(tiny_model, ids, plus, chunk):
    if tiny_model.config.model_type not in NOT_SLIDING:
        pytest.skip("refused: a sliding window forgets the prompt")
    ids, n_read, n_ask = ids[:70], 30, 8
    lm = train.LM(tiny_model, None, torch.device("cpu"))
    cache, other = (train.PagedCache(tiny_model.config, ragged=True) for _ in range(2))
    with train.attention(tiny_model, stock=False):
        for one in (cache, other):
            train.forward(lm, one, ids[:n_read])
        got = train.reconstruction_scores(lm, cache, ids[n_read : n_read + n_ask], ids[n_read + n_ask :], chunk, plus)
        assert torch.equal(train.forward(lm, cache, ids[40:50]), train.forward(lm, other, ids[40:50]))
    want = naive_scores(tiny_model, ids, n_read, n_read + n_ask, plus)
    assert got.shape == want.shape == (3, 2, n_read) and (got - want).abs().max() < 1e-4


def test_a_score_of_zero_is_clamped_before_the_logarithm():
    assert math.isfinite(math.log(train.FAINTEST)) and torch.tensor(train.FAINTEST, dtype=torch.float32) > 0


# --- files


TINY = core.resolve_runtime("tiny", "cpu", "float32", "none")
CPU = dict(model="tiny", device="cpu", dtype="float32", quant="none", reranker="none", n=1, lengths=(4096,))


@pytest.fixture
def offline_in_an_empty_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for script in (core, niah, squad, stress, train):
        monkeypatch.setattr(script, "hub_unreachable", lambda: True)


@pytest.fixture
def tiny_lm():
    return core.load_model(TINY, core.load_config("tiny"), core.load_tokenizer("tiny"))


@pytest.fixture
def checkpoint(tiny_lm, tmp_path):
    """A folder with random surrogates for the tiny model."""
    surrogates = random_surrogates(tiny_lm.model.config, hidden_dim=8)
    facts = {"model": "tiny", "threshold": 0.1, "model_fingerprint": core.model_fingerprint(tiny_lm.model)}
    train.save_surrogates(surrogates, tmp_path / "mlp", facts)
    return tmp_path / "mlp"


def test_a_checkpoint_is_kvpress_s(checkpoint, tiny_lm):
    """Names of files, fields and parameters; loading it gives the same scores."""
    from safetensors.torch import load_file

    config = json.loads((checkpoint / "config.json").read_text())
    assert config["architectures"] == ["KVzapModel"] and config["model_type"] == "kvzap"
    assert (config["input_dim"], config["hidden_dim"], config["output_dim"], config["n_modules"]) == (64, 8, 2, 2)
    assert {"dtype", "transformers_version"} <= config.keys()
    names = {f"layers.{i}.{j}.{kind}" for i in range(2) for j in (0, 2) for kind in ("weight", "bias")}
    parameters = load_file(checkpoint / "model.safetensors")
    assert parameters.keys() == names
    loaded = core.load_surrogates(checkpoint, tiny_lm.model.config)
    x = torch.randn(5, 64)
    for i, module in enumerate(loaded.layers):
        hidden = torch.nn.functional.gelu(x @ parameters[f"layers.{i}.0.weight"].T + parameters[f"layers.{i}.0.bias"])
        assert torch.allclose(module(x), hidden @ parameters[f"layers.{i}.2.weight"].T + parameters[f"layers.{i}.2.bias"], atol=1e-6)
    linear = checkpoint.parent / "linear"
    train.save_surrogates(random_surrogates(tiny_lm.model.config), linear, {})
    assert json.loads((linear / "config.json").read_text())["hidden_dim"] is None
    assert load_file(linear / "model.safetensors").keys() == {f"layers.{i}.{kind}" for i in range(2) for kind in ("weight", "bias")}


@pytest.mark.parametrize("fault, said", [
    ("no folder", "there are no kvzap-mlp surrogates"), ("no weights", "no KVzap checkpoint"), ("torn weights", "no KVzap checkpoint"),
    ("torn config", "no KVzap checkpoint"), ("other width", "input_dim"), ("other layers", "n_modules"), ("missing field", "no KVzap checkpoint"),
])
def test_checkpoints_that_do_not_fit_are_refused(checkpoint, tiny_lm, fault, said):
    path = checkpoint / "config.json"
    config = json.loads(path.read_text())
    if fault == "no folder":
        checkpoint = checkpoint / "none"
    elif fault == "no weights":
        (checkpoint / "model.safetensors").unlink()
    elif fault == "torn weights":
        (checkpoint / "model.safetensors").write_bytes((checkpoint / "model.safetensors").read_bytes()[:100])
    elif fault == "torn config":
        path.write_text("{")
    else:
        changed = {"other width": {"input_dim": 65}, "other layers": {"n_modules": 3}, "missing field": {}}[fault]
        config |= changed
        if fault == "missing field":
            del config["output_dim"]
        path.write_text(json.dumps(config))
    with pytest.raises(core.Refusal, match=said):
        core.load_surrogates(core.find_surrogates(TINY, "kvzap-mlp", str(checkpoint)), tiny_lm.model.config)


def test_another_model_of_the_same_shape_is_refused(checkpoint, tiny_lm):
    _, surrogates = core.settle_pruning(core.PolicyArgs(kvzap=str(checkpoint)), ["L6"], TINY, tiny_lm.model.config)
    core.check_fingerprint(surrogates, tiny_lm.model)
    core.check_fingerprint(surrogates, tiny_lm.model.to(torch.bfloat16))
    torch.manual_seed(7)
    other = AutoModelForCausalLM.from_config(tiny_lm.model.config)
    with pytest.raises(core.Refusal, match="another model"):
        core.check_fingerprint(surrogates, other)
    core.check_fingerprint(None, other)  # a scorer without surrogates fits any model


def test_what_is_pruned_by_is_settled_once(checkpoint, tiny_lm):
    """The surrogates bring their threshold where no flag says otherwise; what prunes nothing, or needs none, loads none."""
    given, config = core.PolicyArgs(kvzap=str(checkpoint)), tiny_lm.model.config
    args, surrogates = core.settle_pruning(given, ["L2", "L7"], TINY, config)
    assert args == dataclasses.replace(given, threshold=0.1) and len(surrogates.layers) == 2 and given.threshold is None
    for asked in (dataclasses.replace(given, keep=0.5), dataclasses.replace(given, threshold=-3.0)):
        args, surrogates = core.settle_pruning(asked, ["L6"], TINY, config)
        assert args == asked and len(surrogates.layers) == 2
    for asked, names in ((given, ["L2", "L3"]), (core.PolicyArgs(scorer="random", keep=0.5), ["L6"]),
                         (core.PolicyArgs(kvzap="nowhere"), ["L1"])):
        assert core.settle_pruning(asked, names, TINY, config) == (asked, None)


def test_the_shipped_surrogates_fit_their_model(smollm2):
    """Both kinds, each with the threshold that was chosen for it, and a fingerprint."""
    runtime = core.resolve_runtime("smollm2", "cpu", "float32", "none")
    for kind in ("linear", "mlp"):
        args, surrogates = core.settle_pruning(core.PolicyArgs(scorer=f"kvzap-{kind}"), ["L6"], runtime, smollm2.model.config)
        assert args.threshold == surrogates.training_facts["threshold"] is not None
        assert surrogates.training_facts["model_fingerprint"] and surrogates.training_facts["kind"] == kind
        core.check_fingerprint(surrogates, smollm2.model)


class NoWeights(niah.NeedleRun):
    """What is to be refused is refused before this."""

    def load(self, model_config):
        pytest.fail("weights were loaded")


@pytest.mark.parametrize("given, said", [
    (dict(scorer="magic"), "--scorer magic"), (dict(prune_at="late"), "--prune-at late"), (dict(window=0), "--window 0"),
    (dict(scorer="kvzip+", keep=0.5), "--prune-at prefill"), (dict(keep=0.0), "--keep 0.0"), (dict(keep=1.5), "--keep 1.5"),
    (dict(keep=0.5, threshold=-4.0), "two ways"), (dict(pooled=True, threshold=-4.0), "--pooled"), (dict(scorer="key-norm"), "--threshold or --keep"),
    (dict(scorer="kvzap-linear", kvzap=None), "train_kvzap.py"),
])
def test_bad_ways_of_pruning(checkpoint, offline_in_an_empty_folder, given, said):
    args = niah.Args(**CPU | dict(config="L6", kvzap=str(checkpoint)) | given)
    with pytest.raises(niah.Refusal, match=said.replace("+", r"\+")):
        niah.main(args, NoWeights)


def test_an_oracle_needs_the_window_twice(offline_in_an_empty_folder):
    """The prompt is repeated at positions of its own; beyond the window the scores would be those of a lost model."""
    asked = dict(config="L6", model="tiny", device="cpu", scorer="kvzip+", keep=0.4, prune_at="prefill", lengths=(16385,), n=1)
    with pytest.raises(niah.Refusal, match="32770 positions, but tiny has 32768"):
        niah.main(niah.Args(**asked), NoWeights)
    fitting = [(dict(), ["L6"], 16384), (dict(scorer="key-norm"), ["L6"], 32768), (dict(), ["L2"], 32768)]  # L2 asks no oracle
    for change, names, length in fitting:
        configs = niah.roomy_config(niah.Args(**asked | change | dict(lengths=(4096, length))), names, niah.resolve_runtime("tiny", "cpu", "float32", "none"))
        assert configs.keys() == {4096, length} and all(config.max_position_embeddings == 32768 for config in configs.values())
    with pytest.raises(train.Refusal, match="--max-tokens 16384 takes 32868 positions"):
        train.main(train.Args(model="tiny", device="cpu", max_tokens=16384))


@pytest.mark.parametrize("script", [core, squad, stress])
@pytest.mark.parametrize("scorer", niah.ORACLES)
def test_an_oracle_is_asked_in_the_needle_test_only(offline_in_an_empty_folder, monkeypatch, script, scorer):
    """Elsewhere it is refused for what prunes, before weights are loaded; what prunes nothing does not mind the flag."""
    monkeypatch.setattr(script, "load_model", lambda *args: pytest.fail("weights were loaded"))
    asked = dict(model="tiny", device="cpu", scorer=scorer, keep=0.4, prune_at="prefill")
    for config in ("L6", "L7"):
        with pytest.raises(script.Refusal, match="which only eval_niah.py does"):
            script.main(script.Args(**asked, config=config))
        niah.check_policy(niah.Args(**asked), [config], niah.ORACLES)
    script.check_policy(script.Args(**asked), ["L2", "L3"])


# --- the scripts


@pytest.mark.parametrize("given", [
    dict(config="L6"), dict(config="L6", prune_at="prefill"), dict(config="L7"), dict(config="L7", prune_at="prefill", evict_at="chunk"),
    dict(config="L6", keep=0.3), dict(config="L6", scorer="key-norm", keep=0.3, pooled=True), dict(config="L6", scorer="random", keep=0.4),
    dict(config="L6", scorer="streaming", keep=0.3), dict(config="L6", scorer="kvzip+", keep=0.3, prune_at="prefill"),
    dict(config="L7", scorer="kvzip", keep=0.5, prune_at="prefill"), dict(config="L6", threshold=1e9),
])
def test_pruned_memory_is_freed(checkpoint, offline_in_an_empty_folder, given):
    """KV bytes while decoding are those of what is kept; in flight the peak falls too."""
    asked = CPU | given | dict(out=Path("out.jsonl"), kvzap=str(checkpoint) if "scorer" not in given else None)
    assert niah.run_main(niah.main, niah.Args(**asked)) == 0
    row = json.loads(Path("out.jsonl").read_text())
    assert row["error"] is None and 0.1 < row["compression_ratio"] < 1
    assert row["evictions"] == row.get("evicted_segments", row["evicted_entries"])
    assert row["evictions"] + row["evicted_entries"] > 0
    if given["config"] == "L7":  # what survives pruning in flight fits the budget; from a whole prompt segments have to go
        assert (row["evicted_segments"] > 0) == (given.get("prune_at") == "prefill")
    assert row["kv_bytes_decode"] <= (1.1 * (1 - row["compression_ratio"]) + 0.02) * row["kv_bytes_full"]
    assert row["window"] == 128 and row["scorer"] == asked.get("scorer", "kvzap-mlp")
    if given.get("prune_at") != "prefill" and row["compression_ratio"] > 0.6:
        assert row["kv_bytes_peak"] <= 0.55 * row["kv_bytes_full"]
    if "keep" in given and given["config"] == "L6":
        assert row["compression_ratio"] == pytest.approx(1 - given["keep"], abs=0.01)
    if given.get("threshold"):
        assert row["compression_ratio"] == pytest.approx(1 - 128 / row["n_prompt_tokens"], abs=1e-9)
    assert 0 <= row["gold_share"] <= 1


def test_conversation_prunes_and_goes_on(checkpoint, offline_in_an_empty_folder, capsys):
    Path("notes.txt").write_text("".join(f"Fact {i} is that {i * i} is a square. " for i in range(60)))
    for config in ("L6", "L7"):
        args = core.Args(docs=(Path("notes.txt"),), ask=("What is fact 7?", "And fact 30?"), config=config, model="tiny", device="cpu",
                         dtype="float32", reranker="none", kvzap=str(checkpoint), max_new_tokens=4, json=Path("-"))
        assert core.run_main(core.main, args) == 0
        turns = json.loads(capsys.readouterr().out)["turns"]
        assert len(turns) == 2 and all(turn["compression_ratio"] > 0.1 for turn in turns)


def test_training(offline_in_an_empty_folder, monkeypatch, capsys):
    """From text to surrogates that L6 uses; interrupted, it goes on with the pairs that it has."""
    Path("notes.txt").write_text("".join(f"Fact {i} of the list is that {i * i} is a square, and {i**3} a cube. " for i in range(400)))
    given = dict(model="tiny", device="cpu", dtype="float32", corpus="notes.txt", n_train=4, n_heldout=2, n_tokens=60, min_tokens=150,
                 max_tokens=300, epochs=3, batch_size=64, threshold=-9.5)
    real, scored = train.score_prompt, []

    def interrupted(*args):
        if len(scored) == 3:
            raise KeyboardInterrupt
        scored.append(args[1])
        return real(*args)

    monkeypatch.setattr(train, "score_prompt", interrupted)
    assert train.run_main(train.main, train.Args(**given)) == 130
    monkeypatch.setattr(train, "score_prompt", lambda *args: scored.append(args[1]) or real(*args))
    assert train.run_main(train.main, train.Args(**given)) == 0
    assert len(scored) == len(set(scored)) == 6
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["n_pairs_per_head"] == 240 and Path("results/surrogates/tiny/r2.png").stat().st_size > 1000
    for kind in ("linear", "mlp"):
        facts = json.loads(Path(f"results/surrogates/tiny/{kind}/training.json").read_text())
        assert facts["threshold"] == -9.5 and len(facts["r2_pearson"]) == 2 and facts["model"] == "tiny"
        assert facts["r2_pearson_mean"] == pytest.approx(sum(facts["r2_pearson"]) / 2) == said["r2"][kind]
    assert train.run_main(train.main, train.Args(**{**given, "seed": 5})) == 2 and "--fresh" in capsys.readouterr().err
    out = Path("out.jsonl")
    args = niah.Args(**CPU, config="L6", kvzap="results/surrogates/tiny/linear", scorer="kvzap-linear", out=out)
    assert niah.run_main(niah.main, args) == 0
    assert json.loads(out.read_text())["threshold"] == -9.5


def test_held_out_prompts_are_no_training_prompts(offline_in_an_empty_folder):
    Path("notes.txt").write_text("".join(f"Fact {i} is that {i * i} is a square. " for i in range(2000)))
    args = train.Args(corpus="notes.txt", n_train=20, n_heldout=5, n_tokens=100, min_tokens=200, max_tokens=300)
    chosen, heldout = train.cut_prompts(args, train.read_corpus(args), core.load_tokenizer("tiny"))
    assert len(chosen) == 20 and len(heldout) == 5 and not set(chosen) & set(heldout)
    assert all(200 <= len(text.encode()) <= 300 for text in chosen + heldout)
    with pytest.raises(train.Refusal, match="give more text"):
        train.cut_prompts(train.Args(corpus="notes.txt", n_train=2000), train.read_corpus(args), core.load_tokenizer("tiny"))


@pytest.mark.parametrize("given, said", [
    (dict(n_train=0), "--n-train 0"), (dict(recipe="mine"), "--recipe mine"), (dict(n_tokens=2000), "--n-tokens 2000"),
    (dict(corpus="nobody/nothing"), "nobody/nothing"), (dict(recipe="paper"), "Nemotron"), (dict(corpus="empty"), "empty"),
])
def test_training_on_bad_input(offline_in_an_empty_folder, monkeypatch, capsys, given, said):
    Path("empty").mkdir()
    monkeypatch.setattr(train, "load_model", lambda *args: pytest.fail("weights were loaded"))
    assert train.run_main(train.main, train.Args(**{"model": "tiny", "device": "cpu", **given})) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and said in error


def test_ridge_is_scikit_learn_s():
    from sklearn.linear_model import Ridge

    torch.manual_seed(0)
    h = torch.randn(300, 12) * torch.linspace(0.01, 3, 12) + 2
    target = h @ torch.randn(12, 3) + torch.randn(300, 3) - 7
    module = torch.nn.Linear(12, 3)
    train.fit_linear(module, h, target)
    want = Ridge(alpha=1.0).fit(h.numpy(), target.numpy())
    assert torch.allclose(module.weight, torch.tensor(want.coef_, dtype=torch.float32), atol=1e-4)
    assert torch.allclose(module.bias, torch.tensor(want.intercept_, dtype=torch.float32), atol=1e-4)


def test_mlp_learns_what_a_line_cannot():
    torch.manual_seed(0)
    h = torch.randn(4000, 6)
    target = torch.stack([h[:, 0] * h[:, 1], h[:, 2].abs()], dim=1) - 5
    module = torch.nn.Sequential(torch.nn.Linear(6, 32), torch.nn.GELU(), torch.nn.Linear(32, 2))
    train.fit_mlp(module, h, target, train.Args(epochs=15), seed=0)
    line = torch.nn.Linear(6, 2)
    train.fit_linear(line, h, target)
    with torch.inference_mode():
        assert train.r_squared(module(h), target)[0] > 0.9 > 0.1 > train.r_squared(line(h), target)[0]


def test_the_paper_s_recipe():
    """Its numbers, whatever the flags say, and an MLP that begins as torch has it; ours begins at the mean target."""
    args = train.check_args(train.Args(recipe="paper", n_train=3, n_heldout=2, n_tokens=10))
    assert (args.n_train, args.n_heldout, args.n_tokens) == (4500, 45, 500)
    ours = train.Args(n_train=3, n_heldout=2, n_tokens=10)
    assert train.check_args(ours) == ours
    torch.manual_seed(0)
    h, target = torch.randn(50, 6), torch.randn(50, 2) - 7
    for recipe in ("default", "paper"):
        module = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Linear(8, 2))
        begun = target.mean(0) if recipe == "default" else module[-1].bias.detach().clone()
        train.fit_mlp(module, h, target, train.Args(recipe=recipe, epochs=1, lr=0.0), seed=0)  # no step goes anywhere
        assert torch.equal(module[-1].bias, begun)


def test_r_squared_is_numpy_s():
    import numpy as np

    torch.manual_seed(0)
    true = torch.randn(200, 3)
    predicted = 0.5 * true + 0.3 * torch.randn(200, 3) + 1
    pearson, sse = train.r_squared(predicted, true)
    p, t = predicted.double().numpy(), true.double().numpy()
    assert pearson == pytest.approx(np.mean([np.corrcoef(p[:, i], t[:, i])[0, 1] ** 2 for i in range(3)]))
    assert sse == pytest.approx(np.mean([1 - ((p[:, i] - t[:, i]) ** 2).sum() / ((t[:, i] - t[:, i].mean()) ** 2).sum() for i in range(3)]))


@pytest.mark.parametrize("shape, mlp, linear", [
    (dict(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, head_dim=128), 0.96, 0.02),  # Llama 3.1 8B
    (dict(hidden_size=4096, intermediate_size=12288, num_attention_heads=32, num_key_value_heads=8, head_dim=128), 1.09, 0.02),  # Qwen3 8B
])
def test_overhead_is_the_paper_s(shape, mlp, linear):
    config = type("C", (), shape)
    assert round(100 * train.overhead(config, 512), 2) == mlp and round(100 * train.overhead(config, None), 2) == linear


def test_the_corpus_of_the_standard_library():
    parts = train.stdlib_texts()
    assert parts.keys() == {"topics", "docstrings", "sources"} and all(len(texts) > 50 for texts in parts.values())
    assert "json" in sys.modules and any("JSON" in text for text in parts["docstrings"])
