"""Eviction against the masked oracle: what is evicted must be as if it were hidden, and nothing else must change.

The oracle is a naive attention over the whole sequence, without a cache: KV repeated, an explicit mask, softmax in
fp32. It shares no line with the code under test.
"""

import math

import cognito_run as core
import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface

N_PROMPT, N_MORE = 90, 12
CHUNKS = (1, 7, 64, None)


def oracle_attention(module, query, key, value, attention_mask, scaling, sliding_window=None, softcap=None, hidden=None, **kwargs):
    """Explicit attention; hidden: per layer (H or 1, T, T) bool, true where a query must not see a key."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = (query @ key.transpose(2, 3)).float() * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    n = scores.shape[-1]
    age = torch.arange(n)[:, None] - torch.arange(n)[None]
    blind = (age < 0) | (age >= (sliding_window or n))
    if hidden is not None:
        blind = blind | hidden[module.layer_idx]
    weights = scores.masked_fill(blind, -torch.inf).softmax(-1).to(value.dtype)
    return (weights @ value).transpose(1, 2), None


@torch.inference_mode()
def oracle_logits(model, input_ids, hidden=None):
    AttentionInterface.register("oracle", oracle_attention)
    AttentionMaskInterface.register("oracle", lambda *args, **kwargs: None)
    model.set_attn_implementation("oracle")
    return model(input_ids=input_ids[None], use_cache=False, hidden=hidden).logits[0]


@torch.inference_mode()
def paged_logits(model, cache, input_ids, chunk, after_chunk=None):
    """All logits of a chunked reading, position by position."""
    out = []
    with core.attention(model, stock=False):
        for part in input_ids.split(chunk or len(input_ids)):
            start = cache.get_seq_length()
            positions = torch.arange(start, start + len(part))[None]
            out.append(model(input_ids=part[None], position_ids=positions, cache=cache, kv_cache=cache, use_cache=True).logits[0])
            if after_chunk is not None:
                after_chunk()
    return torch.cat(out)


@pytest.fixture
def ids():
    return torch.randint(3, 128, (N_PROMPT + N_MORE,), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_chunked_reading_equals_one_shot(tiny_model, ids, chunk, ragged):
    cache = core.PagedCache(tiny_model.config, ragged=ragged)
    got = paged_logits(tiny_model, cache, ids, chunk)
    assert (got - oracle_logits(tiny_model, ids)).abs().max() < 1e-4


@pytest.mark.parametrize("chunk", CHUNKS)
def test_stock_and_paged_agree(tiny_model, ids, chunk):
    """L2's logits are L1's."""
    with torch.inference_mode(), core.attention(tiny_model, stock=True):
        stock = tiny_model(input_ids=ids[None]).logits[0]
    got = paged_logits(tiny_model, core.PagedCache(tiny_model.config), ids, chunk)
    assert (got - stock).abs().max() < 1e-4


@torch.inference_mode()
def test_attention_is_lent(ids):
    """What a model ran before `attention` it runs after it, also after an error in it, and after one within another."""
    from conftest import tiny_config
    from transformers import AutoModelForCausalLM

    model, calls = AutoModelForCausalLM.from_config(tiny_config("llama"), dtype=torch.float32).eval(), []
    AttentionInterface.register("counted", lambda *args, **kwargs: calls.append(1) or oracle_attention(*args, **kwargs))
    AttentionMaskInterface.register("counted", lambda *args, **kwargs: None)
    model.set_attn_implementation("counted")

    def runs() -> str:
        calls.clear()
        try:
            model(input_ids=ids[None], use_cache=False)
        except TypeError:  # ours asks for the cache, which it is not given here
            return "ours"
        return "counted" if calls else "stock"

    assert runs() == "counted"
    for stock, inner, outer in ((True, "ours", "stock"), (False, "stock", "ours")):
        with core.attention(model, stock):
            assert runs() == outer
            with core.attention(model, not stock):
                assert runs() == inner
            with pytest.raises(ZeroDivisionError), core.attention(model, not stock):
                1 / 0
            assert runs() == outer
        assert runs() == "counted"
        with pytest.raises(ZeroDivisionError), core.attention(model, stock), core.attention(model, not stock):
            1 / 0
        assert runs() == "counted"


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_segments_evicted_before_decode(tiny_model, ids, chunk, ragged):
    spans = [(10, 25), (40, 41), (60, 77)]
    cache = core.PagedCache(tiny_model.config, ragged=ragged)
    paged_logits(tiny_model, cache, ids[:N_PROMPT], chunk)
    cache.evict(spans)
    got = paged_logits(tiny_model, cache, ids[N_PROMPT:], chunk)

    hidden = torch.zeros(len(ids), len(ids), dtype=torch.bool)
    for a, b in spans:
        hidden[N_PROMPT:, a:b] = True
    want = oracle_logits(tiny_model, ids, [hidden[None]] * 3)[N_PROMPT:]
    assert (got - want).abs().max() < 1e-4


@pytest.mark.parametrize("chunk", (1, 7, 64))
def test_segments_evicted_in_flight(tiny_model, ids, chunk):
    """The pager after every chunk: a query sees exactly the segments that were resident when its chunk was read."""
    segments = [core.Segment(f"s{i}", "x", reserved=i in (0, 5)) for i in range(6)]
    bounds = [0, 8, 25, 44, 60, 80, N_PROMPT]
    prompt = core.Prompt(ids[:N_PROMPT], segments, list(zip(bounds, bounds[1:])))
    pager = core.RAGAwarePager(prompt, budget=50)
    pager.retrieve({"s1": 0.1, "s2": 0.4, "s3": 0.2, "s4": 0.3})
    cache = core.PagedCache(tiny_model.config)
    hidden = torch.zeros(len(ids), len(ids), dtype=torch.bool)
    boundary = []

    def evict():
        pager.evict(cache)
        for spans in pager.out.values():
            for a, b in spans:
                hidden[cache.get_seq_length() :, a:b] = True
        boundary.append(cache.get_seq_length())

    got = torch.cat([paged_logits(tiny_model, cache, ids[:N_PROMPT], chunk, evict), paged_logits(tiny_model, cache, ids[N_PROMPT:], chunk)])
    assert pager.out.keys() == {"s1", "s3", "s4"} or pager.out.keys() == {"s1", "s3"}
    want = oracle_logits(tiny_model, ids, [hidden[None]] * 3)
    assert (got - want).abs().max() < 1e-4


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_key_norm_evicts_per_head(tiny_model, ids, chunk, ragged):
    """L4: every head keeps its own entries; a multi-token step after it is causal within itself."""
    cache = core.PagedCache(tiny_model.config, ragged=ragged)
    paged_logits(tiny_model, cache, ids[:N_PROMPT], chunk)
    core.KeyNorm(budget=20).evict(cache)
    kept = [torch.cat([b.entries()[2] for b in layer.buffers]) for layer in cache.layers]
    assert all(k.shape == (2, 20) for k in kept)
    hidden = []
    for positions in kept:
        hide = torch.zeros(2, len(ids), len(ids), dtype=torch.bool)
        hide[:, N_PROMPT:, :N_PROMPT] = True
        for head in range(2):
            hide[head, N_PROMPT:, positions[head].long()] = False
        hidden.append(hide.repeat_interleave(2, 0))
    got = paged_logits(tiny_model, cache, ids[N_PROMPT:], chunk)
    assert (got - oracle_logits(tiny_model, ids, hidden)[N_PROMPT:]).abs().max() < 1e-4


def test_ragged_heads_of_different_lengths(tiny_model, ids):
    """Each head loses another number of entries; the storages shrink to what is left."""
    cache = core.PagedCache(tiny_model.config, ragged=True)
    paged_logits(tiny_model, cache, ids[:N_PROMPT], 16)
    generator, hidden = torch.Generator().manual_seed(2), []
    for layer in cache.layers:
        hide = torch.zeros(2, len(ids), len(ids), dtype=torch.bool)
        for head, buffer in enumerate(layer.buffers):
            keep = torch.rand(buffer.length, generator=generator) < (0.3, 0.8)[head]
            keep[-3:] = True
            hide[head, N_PROMPT:, buffer.entries()[2][0][~keep].long()] = True
            buffer.keep(keep.nonzero().T)
            assert buffer.keys.untyped_storage().nbytes() == int(keep.sum()) * buffer.keys.shape[-1] * 4
        hidden.append(hide.repeat_interleave(2, 0))
    got = paged_logits(tiny_model, cache, ids[N_PROMPT:], None)
    assert (got - oracle_logits(tiny_model, ids, hidden)[N_PROMPT:]).abs().max() < 1e-4


@pytest.mark.parametrize("chunk", (7, 64))
def test_causal_within_a_chunk(tiny_model, ids, chunk):
    """Changing the last token of a chunk moves no earlier logit, and does move its own."""
    other = ids[: chunk * 1].clone()
    other[-1] = (other[-1] + 1) % 128
    a, b = (paged_logits(tiny_model, core.PagedCache(tiny_model.config), x, chunk) for x in (ids[:chunk], other))
    assert torch.equal(a[:-1], b[:-1]) and not torch.allclose(a[-1], b[-1])


@pytest.mark.parametrize("ragged", [False, True])
def test_pages_come_back_bit_identical(tiny_model, ids, ragged, tmp_path):
    """Out to memory or to disk and in again: every storage and every later logit is what it was."""
    for folder in (None, tmp_path):
        store = core.PageStore(folder)
        kept, paged = (core.PagedCache(tiny_model.config, ragged=ragged) for _ in range(2))
        for cache in (kept, paged):
            paged_logits(tiny_model, cache, ids[:N_PROMPT], 16)
        before = core.kv_bytes(paged)
        for span in ((5, 30), (50, 70)):
            store.put(str(span), paged.read_page(*span))
        paged.evict([(5, 30), (50, 70)])
        assert core.kv_bytes(paged) < before
        assert folder is None or len(list(folder.iterdir())) == 2
        for span in ((50, 70), (5, 30)):
            paged.page_in(store.take(str(span)))
        assert folder is None or not list(folder.iterdir())
        for a, b in zip(kept.buffers(), paged.buffers()):
            assert all(torch.equal(x, y) for x, y in zip(a.entries(), b.entries()))
        assert torch.equal(paged_logits(tiny_model, kept, ids[N_PROMPT:], 5), paged_logits(tiny_model, paged, ids[N_PROMPT:], 5))


def test_rope_drift(ids):
    """The thesis's RoPE drift: positions taken from the shrunken cache break the logits, absolute ones do not."""
    from conftest import tiny_config
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = tiny_config("llama")
    config.initializer_range = 0.2
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    hidden = torch.zeros(len(ids), len(ids), dtype=torch.bool)
    hidden[N_PROMPT:, 10:60] = True
    want = oracle_logits(model, ids, [hidden[None]] * 3)[N_PROMPT:]

    def after_eviction(first_position):
        cache = core.PagedCache(config)
        paged_logits(model, cache, ids[:N_PROMPT], 32)
        cache.evict([(10, 60)])
        positions = torch.arange(first_position, first_position + N_MORE)[None]
        with torch.inference_mode(), core.attention(model, stock=False):
            return model(input_ids=ids[None, N_PROMPT:], position_ids=positions, cache=cache, kv_cache=cache, use_cache=True).logits[0]

    assert (after_eviction(N_PROMPT) - want).abs().max() < 1e-4
    assert (after_eviction(N_PROMPT - 50) - want).abs().max() > 0.1 * want.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("T,S", [(1, 0), (1, 33), (5, 0), (64, 1), (64, 300)])
def test_merged_attention_equals_masked(T, S, dtype):
    """The fast path (past + own corner, merged) against the masked one, per KV head."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, S + T, 16).to(dtype)[:, :, -T:] if n == 3 else torch.randn(2, S + T, 16).to(dtype) for n in (3, 1, 1))
    positions = torch.arange(100, 100 + S + T, dtype=torch.int32).expand(2, -1)
    args = (q, k, v, positions, 100 + S + T, 1 / math.sqrt(16), None, None)
    assert (core.chunk_attention(*args)[0] - core.masked_attention(*args)).abs().max() < (1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_and_its_log_sum_exp_are_those_of_the_definition(causal):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 3, 40, 16), torch.randn(2, 3, 40, 16), torch.randn(2, 3, 40, 16)
    scores = torch.einsum("bhtd,bhsd->bhts", q, k) / 4
    if causal:
        scores += torch.full((40, 40), -torch.inf).triu(1)
    want = torch.einsum("bhts,bhsd->bhtd", scores.softmax(dim=-1), v), scores.logsumexp(dim=-1)
    got = core.attention_with_lse(q, k, v, 1 / 4, causal)
    assert all((g - w).abs().max() < 1e-5 for g, w in zip(got, want))


def test_growth_and_bytes():
    """kv_bytes is what the storages hold, slack included, and slack stays under a sixteenth once a buffer is large."""
    cache = core.PagedCache(type("C", (), {"num_hidden_layers": 1}))
    for _ in range(3000):
        cache.update(torch.ones(1, 2, 1, 8), torch.ones(1, 2, 1, 8), 0)
    per_entry = 2 * (8 * 4 * 2 + 4)
    assert 3000 * per_entry <= core.kv_bytes(cache) <= 3000 * per_entry * 17 / 16
    assert core.kv_entries(cache) == 6000
    cache.evict([(0, 2000)])
    assert core.kv_bytes(cache) == 1000 * per_entry


def test_sliding_window_frees_what_it_cannot_see(ids):
    from conftest import tiny_config
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(tiny_config("mistral"), dtype=torch.float32).eval()
    cache = core.PagedCache(model.config)
    long = ids.repeat(4)
    got = paged_logits(model, cache, long, 32)
    assert max(b.length for b in cache.buffers()) <= 24 + 64
    assert (got - oracle_logits(model, long)).abs().max() < 1e-4
