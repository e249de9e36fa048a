"""Re-based positions against the model's own rotary code: what is kept stands together, as if it had been read there.

The reference reads without rotation, remembers the raw keys, and has the model's rotary module turn them anew for every chunk,
each head's to its own places. It shares no line with the code under test.
"""

import sys

import cognito_run as core
import numpy as np
import pytest
import torch
from conftest import ARCHITECTURES, LONGROPE, TINY
from test_conversation import LIBRARY, N_NEW, TOPICS, Witness, ask, passages, start, states  # noqa: F401
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM

N_PROMPT, N_MORE = 90, 12
BOUNDS = [0, 6, 20, 37, 50, 71, 84, N_PROMPT]  # of a prompt's segments; the first and the last are reserved
SCORES = {"s1": 0.2, "s2": 0.5, "s3": 0.1, "s4": 0.3, "s5": 0.4}
SCALED = {  # rotary types beside the eight architectures' own
    "llama3": ("llama", dict(rope_parameters={"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
                                             "high_freq_factor": 4.0, "original_max_position_embeddings": 64})),
    "yarn": ("qwen2", dict(rope_parameters={"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0,
                                            "original_max_position_embeddings": 128})),
    "partial": ("phi3", dict(rope_parameters=LONGROPE | {"partial_rotary_factor": 0.5, "short_factor": [2.0, 3.0],
                                                         "long_factor": [2.0, 3.0]}, original_max_position_embeddings=32)),
}


@pytest.fixture(params=[*ARCHITECTURES, *SCALED])
def model(request):
    torch.manual_seed(0)
    architecture, change = SCALED.get(request.param, (request.param, {}))
    config = AutoConfig.for_model(architecture, **{**TINY, **ARCHITECTURES[architecture], **change})
    config.initializer_range = 0.2
    if request.param == "phi3":
        config.rope_parameters = {**config.rope_parameters, "short_factor": config.rope_parameters["long_factor"]}
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.fixture
def ids():
    return torch.randint(3, 128, (N_PROMPT + N_MORE,), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def prompt(ids):
    segments = [core.Segment(f"s{i}", "x", reserved=i in (0, 6)) for i in range(7)]
    return core.Prompt(ids[:N_PROMPT], segments, list(zip(BOUNDS, BOUNDS[1:])))


class Reference:
    """Reads a text chunk by chunk; `kept` gives, by layer and head, the earlier tokens that a chunk may look at, in order."""

    def __init__(self, model):
        self.model, self.code = model, sys.modules[type(model).__module__]
        self.kinds = getattr(model.config, "layer_types", None) or [None] * model.config.num_hidden_layers
        self.keys, self.values = [[] for _ in self.kinds], [[] for _ in self.kinds]
        self.seen, self.kept = 0, None
        self.forgotten = {}  # by layer and KV head: tokens that have left the sliding window
        AttentionInterface.register("reference", lambda module, *args, **kwargs: self.attend(module, *args, **kwargs))
        AttentionMaskInterface.register("reference", lambda *args, **kwargs: None)

    def turned(self, layer: int, raw, at):
        """Raw queries or keys (heads, T, D) at positions (T,), by the model's own code; raw ones bear its scale once already."""
        kind = {"layer_type": self.kinds[layer]} if hasattr(self.model.get_decoder().rotary_emb, "layer_types") else {}
        rotary = self.model.get_decoder().rotary_emb
        cos, sin = rotary(raw, at[None], **kind)
        scale = rotary(raw, torch.zeros(1, 1, dtype=torch.long), **kind)[0].max()
        return self.code.apply_rotary_pos_emb(raw[None], raw[None], cos / scale, sin / scale)[0][0]

    def attend(self, module, query, key, value, attention_mask, scaling, sliding_window=None, softcap=None, **kwargs):
        layer, T = module.layer_idx, query.shape[2]
        self.keys[layer].append(key[0])
        self.values[layer].append(value[0])
        keys, values = torch.cat(self.keys[layer], 1), torch.cat(self.values[layer], 1)
        out, groups, forgotten = [], query[0].unflatten(0, (key.shape[1], -1)), {}
        end = max(len(head) for heads in self.kept for head in heads) + T
        for head, q in enumerate(groups):  # (G, T, D)
            gone = self.forgotten.get((layer, head), set())
            held = [at for at in self.kept[layer][head] if at not in gone] + list(range(self.seen, self.seen + T))
            stands, asks = torch.arange(end - len(held), end), torch.arange(end - T, end)
            k, v = self.turned(layer, keys[head, held][None], stands)[0], values[head, held]
            scores = self.turned(layer, q, asks) @ k.T * scaling
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            age = asks[:, None] - stands[None]
            blind = (age < 0) | (age >= (sliding_window or end))
            out.append(scores.masked_fill(blind, -torch.inf).softmax(-1) @ v)
            if sliding_window is not None:
                forgotten[layer, head] = gone | {at for at, stand in zip(held, stands.tolist()) if stand <= end - sliding_window}
        self.forgotten |= forgotten
        out = torch.cat(out)
        return out.transpose(0, 1)[None], None

    @torch.inference_mode()
    def read(self, ids, kept):
        """All logits of a chunk (T, V)."""
        self.kept = kept
        self.model.set_attn_implementation("reference")
        nowhere = torch.zeros(1, len(ids), dtype=torch.long)  # RoPE turns nothing at position 0
        logits = self.model(input_ids=ids[None], position_ids=nowhere, use_cache=False).logits[0]
        self.seen += len(ids)
        return logits


@torch.inference_mode()
def read(model, cache, ids):
    """All logits of a chunk (T, V), by the code under test."""
    with core.attention(model, stock=False):
        at = cache.next_position()
        positions = torch.arange(at, at + len(ids))[None]
        return model(input_ids=ids[None], position_ids=positions, cache=cache, kv_cache=cache, use_cache=True).logits[0]


def rebased(model, **kwargs):
    return core.PagedCache(model.config, inv_freqs=core.rotary_frequencies(model), **kwargs)


def held(cache, n_layers: int):
    """The tokens whose entries each head holds, by layer and head."""
    rows = [row.tolist() for buffer in cache.buffers() for row in buffer.entries()[2]]
    return [rows[i * len(rows) // n_layers : (i + 1) * len(rows) // n_layers] for i in range(n_layers)]


def keep_all(model, tokens):
    return [[tokens] * model.config.num_key_value_heads] * model.config.num_hidden_layers


@pytest.mark.parametrize("in_flight, chunk", [
    (False, 1), (False, 7), (False, 64), (False, None), (True, 1), (True, 7), (True, 64)])
def test_segments_stand_together(model, ids, prompt, in_flight, chunk):
    """L3: whole segments go, before the question or after every chunk; a sliding window counts what is left."""
    pager = core.RAGAwarePager(prompt, budget=45, in_flight=in_flight)
    pager.retrieve(SCORES)
    cache, reference, resident = rebased(model), Reference(model), list(range(0))
    for part in ids[:N_PROMPT].split(chunk or N_PROMPT):
        want = reference.read(part, keep_all(model, resident))
        assert (read(model, cache, part) - want).abs().max() < 1e-4
        pager.after_chunk(cache)
        gone = {at for spans in pager.out.values() for a, b in spans for at in range(a, b)}
        resident = [at for at in range(reference.seen) if at not in gone]
    pager.before_decode(cache)
    gone = {at for spans in pager.out.values() for a, b in spans for at in range(a, b)}
    resident = [at for at in range(N_PROMPT) if at not in gone]
    assert 12 < len(resident) <= 45
    for part in ids[N_PROMPT:].split(N_MORE // 3):
        assert (read(model, cache, part) - reference.read(part, keep_all(model, resident))).abs().max() < 1e-4
        resident += range(reference.seen - len(part), reference.seen)
        cache.settle()  # keys turned as they are looked at, then for good


@pytest.mark.parametrize("chunk", [1, 7, 64, None])
@pytest.mark.parametrize("policy", ["key-norm", "threshold"])
def test_each_heads_entries_stand_together(model, ids, policy, chunk):
    """L4 and L6: every head keeps its own, and the last of each stands right before the query."""
    low = torch.Generator().manual_seed(3)
    scorers = [lambda hidden, keys, positions: torch.rand(keys.shape[:2], generator=low)] * 3
    ragged = policy == "threshold"
    cache, reference = rebased(model, ragged=ragged, scorers=scorers if ragged else None), Reference(model)
    acts = core.Pruner("random", 10, threshold=0.5, in_flight=True) if ragged else core.KeyNorm(20, in_flight=True)
    kept = keep_all(model, [])
    for part in ids[:N_PROMPT].split(chunk or N_PROMPT):
        assert (read(model, cache, part) - reference.read(part, kept)).abs().max() < 1e-4
        acts.after_chunk(cache)
        kept = held(cache, 3)
    acts.before_decode(cache)
    kept = held(cache, 3)
    assert sum(len(head) for heads in kept for head in heads) < 0.75 * N_PROMPT * 6
    for part in ids[N_PROMPT:].split(N_MORE // 3):
        assert (read(model, cache, part) - reference.read(part, kept)).abs().max() < 1e-4
        kept = held(cache, 3)
        cache.settle()


@pytest.mark.parametrize("chunk", [1, 7, 64, None])
def test_rebased_is_absolute_where_nothing_is_evicted(model, ids, chunk):
    """Bit for bit, in a sliding window's layers too."""
    long = ids.repeat(2)[: 103 if chunk == 1 else None]
    caches = core.PagedCache(model.config), rebased(model)
    for part in long.split(chunk or len(long)):
        a, b = (read(model, cache, part) for cache in caches)
        assert torch.equal(a, b)
        caches[1].settle()
    for a, b in zip(*(cache.buffers() for cache in caches)):
        assert all(torch.equal(x, y) for x, y in zip(a.entries(), b.entries()))


def test_a_thousand_moves_are_one_move():
    """In bf16, where each rounding would show: pages out and in, places changing all the time, then the keys of one move."""
    torch.manual_seed(0)
    keys, values = (torch.randn(1, 2, 60, 8).bfloat16() for _ in range(2))
    spans, rng = [(5, 20), (20, 33), (33, 41), (41, 58)], np.random.default_rng(0)

    def read():
        config = type("Config", (), {"num_hidden_layers": 1})
        cache = core.PagedCache(config, inv_freqs=[torch.tensor([1.0, 0.3, 0.1, 0.01])])
        cache.update(keys, values, 0)
        return cache

    moved, once, out = read(), read(), {}
    before = moved.read_page(0, 60)
    for i in rng.integers(len(spans), size=1000):
        if spans[i] in out:
            moved.page_in(out.pop(spans[i]))
        else:
            out[spans[i]] = moved.read_page(*spans[i])
            moved.evict([spans[i]])
        moved.next_position()
        moved.layers[0].attended(moved.layers[0].buffers[0])
    moved.page_in(*out.values())
    assert all(torch.equal(tensor, before[name]) for name, tensor in moved.read_page(0, 60).items())
    for cache in (moved, once):
        cache.evict([spans[0], spans[2]])
        cache.settle()
    (a,), (b,) = moved.buffers(), once.buffers()
    assert all(torch.equal(x, y) for x, y in zip(a.tensors(), b.tensors()))
    assert a.read_at[0].tolist() == list(range(37)) and not torch.equal(a.keys[:, 5:], keys[0][:, a.positions[0].long()][:, 5:])


@pytest.mark.parametrize("by", [0, 1, -37, 5000])
def test_turning_is_the_models_own(model, by):
    """A key that was read at one place and turned is the key that would have been read at the other."""
    rotary, kinds = model.get_decoder().rotary_emb, getattr(model.config, "layer_types", None) or [None] * 3
    for kind, inv_freq in zip(kinds, core.rotary_frequencies(model)):
        given = {"layer_type": kind} if hasattr(rotary, "layer_types") else {}
        raw, at = torch.randn(1, 2, 40, getattr(model.config, "head_dim", None) or 8), torch.arange(40, 80)[None]
        code = sys.modules[type(model).__module__]
        here, there = (code.apply_rotary_pos_emb(raw, raw, *rotary(raw, places, **given))[1][0] for places in (at, at + by))
        got = core.turn(here, torch.full((1, 40), by, dtype=torch.int32), inv_freq)
        assert (got - there).abs().max() < 2e-3 * max(1, abs(by) / 1000)
        assert by or torch.equal(got, here)


def check_answer(conversation, witness, facts) -> None:
    """Every logit is the reference's, and every answer follows from them."""
    reference, model = Reference(conversation.lm.model), conversation.lm.model
    before = model.config._attn_implementation
    for start_at, (chunk, kept) in witness.chunks.items():
        logits = reference.read(chunk, [[head.tolist() for head in heads] or [[]] * 2 for heads in kept])
        assert (logits[-1] - witness.logits[start_at + len(chunk) - 1]).abs().max() < 1e-4
    model.set_attn_implementation(before)
    said = [witness.logits[at].argmax() for at in range(facts["n_seen"] - N_NEW, facts["n_seen"])]
    said = conversation.lm.tokenizer.decode(said, skip_special_tokens=True).strip()
    assert facts["finish_reason"] == "stop" or said == facts["answer"]


def test_questions_about_documents_of_four_windows(start, monkeypatch):  # noqa: F811
    """In flight all of it is read once, at positions of the window; answers are the reference's, what is out is a page."""
    monkeypatch.setattr(core, "QUESTION_TOKENS", 130)
    asked = [f"What says note {i % 6} on {topic}?" for i, topic in enumerate(TOPICS[:8])]
    conversation = start(window=900, passages=LIBRARY, evict_at="chunk", chunk_size=64, kv_budget="0.08", positions="rebased",
                         ask=tuple(asked[:3]))
    witness, places, real = Witness(monkeypatch), [], core.PagedCache.next_position
    monkeypatch.setattr(core.PagedCache, "next_position", lambda cache: places.append(real(cache)) or places[-1])
    n_documents, pages, events = sum(map(len, LIBRARY.values())), {}, []
    assert n_documents > 4 * 900
    for i, question in enumerate(asked):
        facts, note = ask(conversation, question, events.append), f"{TOPICS[i]} {i % 6}"
        check_answer(conversation, witness, facts)
        assert facts["n_read"] > n_documents if i == 0 else facts["n_read"] < 130
        assert states(facts)[note] in ("resident", "paged in") and "unread" not in states(facts).values()
        n_held = max(buffer.length for buffer in conversation.cache.buffers())
        assert n_held <= 0.08 * n_documents + conversation.n_head + 2
        for name, spans in conversation.pager.out.items():  # in pieces where it left while it was read
            pieces = [conversation.store.pages[f"{name}@{start}"] for start, _ in spans]
            page = {part: torch.cat([piece[part] for piece in pieces], dim=1) for part in pieces[0]}
            assert all(torch.equal(tensor, page[part]) for part, tensor in pages.setdefault(name, page).items())
    assert max(places) + 64 <= 900 and conversation.cache.get_seq_length() > 4 * 900
    left_at = {event["segment"]: event["n_seen"] for event in reversed(events) if event["event"] == "evict"}  # for the first time
    assert min(left_at.values()) < conversation.n_first
    for i in range(3):  # of these it was known that they would be asked
        assert left_at.get(f"{TOPICS[i]} {i}", conversation.n_first) == conversation.n_first


def test_a_budget_beyond_the_window_is_lowered(start, capsys):  # noqa: F811
    conversation = start(window=900, passages=LIBRARY, evict_at="chunk", chunk_size=64, positions="rebased")
    facts = ask(conversation, "What says note 2 on otters?")
    assert "lowered to" in capsys.readouterr().err and "unread" not in states(facts).values()
    assert conversation._place() + 64 <= 900 and states(facts)["otters 2"] == "resident"


def in_line(tokens: list[int]) -> list[int]:
    """Tokens of `prompt` by the score of their segments, the best last, between the reserved ones."""
    def key(token):
        segment = max(i for i, start in enumerate(BOUNDS) if start <= token)
        return (segment > 0) + (segment > 5), SCORES.get(f"s{segment}", 0), token
    return sorted(tokens, key=key)


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("in_flight", [False, True])
def test_ranked_segments_stand_in_order(model, ids, prompt, in_flight, ragged):
    """The best right before the question; also where a pruner has left each head its own."""
    scorers = [lambda hidden, keys, positions: torch.rand(keys.shape[:2], generator=torch.Generator().manual_seed(4))] * 3
    pager = core.RAGAwarePager(prompt, budget=45, in_flight=in_flight)
    pager.retrieve(SCORES)
    policies = [pager, *([core.Pruner("random", 10, threshold=0.3)] if ragged else []), core.MoveTogether(pager)]
    cache, reference = rebased(model, ragged=ragged, scorers=scorers if ragged else None), Reference(model)
    for part in ids[:N_PROMPT].split(16):
        reference.read(part, held(cache, 3) if cache.layers[0].buffers else keep_all(model, []))
        read(model, cache, part)
        core.InTurn(*policies).after_chunk(cache)
    core.InTurn(*policies).before_decode(cache)
    kept = [[in_line(head) for head in heads] for heads in held(cache, 3)]
    assert any(head != sorted(head) for heads in kept for head in heads) or model.config.model_type == "mistral"  # a small window
    for part in ids[N_PROMPT:].split(N_MORE // 3):
        assert (read(model, cache, part) - reference.read(part, kept)).abs().max() < 1e-4
        kept = [[[*head, *range(reference.seen - len(part), reference.seen)] for head in heads] for heads in kept]


def test_a_line_goes_around_what_is_reserved():
    segments = [core.Segment(name, "x", name[0] == "r") for name in ("r0", "a", "r1", "b", "c", "r2")]
    pager = core.RAGAwarePager(core.Prompt(torch.arange(12), segments, [(0, 2), (2, 5), (5, 6), (6, 8), (8, 10), (10, 12)]), 9)
    pager.retrieve({"a": 0.3, "b": 0.1, "c": 0.2})
    assert pager.line(12).argsort().tolist() == [0, 1, 6, 7, 8, 9, 2, 3, 4, 5, 10, 11]
    assert pager.line(9).argsort().tolist() == [0, 1, 6, 7, 8, 2, 3, 4, 5]  # of c one token has been read


@pytest.mark.parametrize("script", ["cognito_run", "eval_niah", "eval_squad", "eval_stress"])
@pytest.mark.parametrize("config, positions, words", [
    ("L3", "nowhere", "--positions nowhere is unknown"), ("L4", "ranked", "L4 keeps single entries"), ("L6", "ranked", "L6 keeps")])
def test_refusals(script, config, positions, words):
    module = __import__(script)
    check, args = getattr(module, "check_run", None), module.Args(config=config, positions=positions)
    if script == "cognito_run" and positions == "ranked":
        return module.check_args(args)  # its default: L4 and L6 have no passages to put in order
    with pytest.raises(module.Refusal, match=words):
        (check or module.check_args)(args)
