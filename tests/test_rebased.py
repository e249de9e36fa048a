"""Re-based positions against the model's own rotary code: what is kept stands together, as if it had been read there.

The reference reads without rotation, remembers the raw keys, and has the model's rotary module turn them anew for every chunk,
each head's to its own places. It shares no line with the code under test.
"""

import sys

import cognito_run as core
import pytest
import torch
from conftest import ARCHITECTURES, LONGROPE, TINY, tiny_config
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
        layer, (H, T, _) = module.layer_idx, query.shape[1:]
        self.keys[layer].append(key[0])
        self.values[layer].append(value[0])
        keys, values = torch.cat(self.keys[layer], 1), torch.cat(self.values[layer], 1)
        out, n_groups, forgotten = torch.empty_like(query[0]), H // key.shape[1], {}
        end = max(len(head) for heads in self.kept for head in heads) + T
        for head in range(H):
            own = layer, head // n_groups
            held = [at for at in self.kept[layer][head // n_groups] if at not in self.forgotten.get(own, ())]
            held += range(self.seen, self.seen + T)
            stands, asks = torch.arange(end - len(held), end), torch.arange(end - T, end)
            k, v = self.turned(layer, keys[head // n_groups, held][None], stands)[0], values[head // n_groups, held]
            scores = self.turned(layer, query[:, head], asks)[0] @ k.T * scaling
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            age = asks[:, None] - stands[None]
            blind = (age < 0) | (age >= (sliding_window or end))
            out[head] = scores.masked_fill(blind, -torch.inf).softmax(-1) @ v
            if sliding_window is not None:
                left = {at for at, stand in zip(held, stands.tolist()) if stand <= end - sliding_window}
                forgotten[own] = left | self.forgotten.get(own, set())
        self.forgotten |= forgotten
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


@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, 64, None])
@pytest.mark.parametrize("in_flight", [False, True])
def test_segments_stand_together(model, ids, prompt, chunk, in_flight, settled):
    """L3: whole segments go, before the question or after every chunk; a sliding window counts what is left."""
    if in_flight and chunk is None:
        pytest.skip("one chunk has no boundary to evict at")
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
    if settled:
        cache.settle()
    for part in ids[N_PROMPT:].split(chunk or N_MORE):
        assert (read(model, cache, part) - reference.read(part, keep_all(model, resident))).abs().max() < 1e-4
        resident += range(reference.seen - len(part), reference.seen)


@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, 64, None])
@pytest.mark.parametrize("policy", ["key-norm", "threshold"])
def test_each_heads_entries_stand_together(model, ids, policy, chunk, settled):
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
    if settled:
        cache.settle()
    got = read(model, cache, ids[N_PROMPT:])
    assert (got - reference.read(ids[N_PROMPT:], kept)).abs().max() < 1e-4


@pytest.mark.parametrize("chunk", [1, 7, 64, None])
def test_rebased_is_absolute_where_nothing_is_evicted(model, ids, chunk):
    """Bit for bit, in a sliding window's layers too."""
    long = ids.repeat(2)
    caches = core.PagedCache(model.config), rebased(model)
    for part in long.split(chunk or len(long)):
        a, b = (read(model, cache, part) for cache in caches)
        assert torch.equal(a, b)
        caches[1].settle()
    for a, b in zip(*(cache.buffers() for cache in caches)):
        assert all(torch.equal(x, y) for x, y in zip(a.entries(), b.entries()))
