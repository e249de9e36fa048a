"""The budget, the pager's choice and its paging, and the key-norm keep-set, against naive references and hand tables."""

import math
import random

import cognito_run as core
import eval_niah as niah
import pytest
import torch
from conftest import read


@pytest.mark.parametrize("text,seen,bytes_per_token,want", [
    ("0.4", 1000, 7, 400), ("0.3", 10, 7, 3), ("0.29", 100, 7, 29), ("0.57", 100, 7, 57),
    ("0.07", 100, 7, 7), ("0.1", 30, 7, 3), (".5", 9, 7, 4),
    ("0.999", 1000, 7, 999), ("0.6", 8190, 7, 4914), ("1.0", 77, 7, 77), ("0.001", 10, 7, 0),
    ("4096", 10, 7, 4096), ("1", 10, 7, 1),
    ("1KiB", 10, 1024, 1), ("512MiB", 10, 46080, 11650), ("1.5GiB", 10, 2**20, 1536), ("1KiB", 10, 1000, 1), ("1KiB", 10, 1025, 0),
    ("none", 10, 7, None),
])
def test_budget_in_entries(text, seen, bytes_per_token, want):
    assert core.parse_budget(text)(seen, bytes_per_token) == want


def test_a_fraction_loses_no_token():
    for percent in range(1, 100):
        budget = core.parse_budget(f"0.{percent:02d}")
        assert [budget(seen, 1) for seen in range(1, 500)] == [seen * percent // 100 for seen in range(1, 500)]


@pytest.mark.parametrize("text", [
    "", " ", "0", "0.0", "0.", "5.", "-1", "-0.4", "+4", "1.1", "2.0", "40%", "1e3",
    "nan", "inf", "None", "all", "0MiB", "512MB", "512 MiB", "MiB",
    "512mib", "512B", "-1GiB", "0.4 ", "0,4", "4096\n",
])
def test_bad_budget_is_refused(text):
    with pytest.raises(core.Refusal, match="budget"):
        core.parse_budget(text)


def make_prompt(sizes: dict[str, int], reserved=("head", "tail")) -> core.Prompt:
    """A prompt of segments of these sizes in tokens."""
    bounds = [0]
    for size in sizes.values():
        bounds.append(bounds[-1] + size)
    segments = [core.Segment(name, "", name in reserved) for name in sizes]
    return core.Prompt(torch.arange(bounds[-1]), segments, list(zip(bounds, bounds[1:])))


def fill(cache: core.PagedCache, n: int) -> None:
    """Append n random entries of two heads to both layers."""
    for layer in range(2):
        cache.update(torch.randn(1, 2, n, 4), torch.randn(1, 2, n, 4), layer)


@pytest.fixture
def cache():
    torch.manual_seed(0)
    return core.PagedCache(type("Config", (), {"num_hidden_layers": 2}))


def positions(cache: core.PagedCache) -> list[int]:
    """The positions held, which must be the same everywhere."""
    held = [row.tolist() for buffer in cache.buffers() for row in buffer.entries()[2]]
    assert all(row == held[0] for row in held)
    return held[0]


def naive_resident(sizes: dict[str, int], retention: dict[str, float], room: int) -> set[str]:
    """Drop the segment of lowest retention until the rest fits; of equals, the first in the prompt."""
    left = list(sizes)
    while sum(sizes[name] for name in left) > room:
        left.remove(min(left, key=lambda name: retention[name]))
    return set(left)


def test_retention_over_turns(monkeypatch):
    """The best one of each question is retrieved; a lag counts the turns since then, or since the first reading."""
    monkeypatch.setattr(core, "N_RETRIEVED", 1)
    pager = core.RAGAwarePager(make_prompt({"head": 3, "a": 5, "b": 5, "c": 5, "tail": 2}), 10)
    faded = [1, 0.6703200460, 0.4493289641, 0.3011942119]  # e^(-0.4 lag)
    turns = [  # score, lag
        {"a": (0.03, 0), "b": (0.02, 0), "c": (0.01, 0)},
        {"a": (0.01, 1), "b": (0.02, 1), "c": (0.03, 0)},
        {"a": (0.02, 2), "b": (0.01, 2), "c": (0.03, 0)},
        {"a": (0.02, 3), "b": (0.03, 0), "c": (0.01, 1)},
        {"a": (0.03, 0), "b": (0.02, 1), "c": (0.01, 2)},
    ]
    for turn in turns:
        pager.retrieve({name: score for name, (score, _) in turn.items()})
        assert pager.lags == {name: lag for name, (_, lag) in turn.items()}
        for name, (score, lag) in turn.items():
            assert pager.retention(name) == pytest.approx(score * faded[lag], rel=1e-9)
    assert pager.spans.keys() == {"a", "b", "c"}


def test_defaults_are_the_thesis_ones():
    pager = core.RAGAwarePager(make_prompt({name: 1 for name in "abcdefg"}), 7)
    for _ in range(3):
        pager.retrieve({name: float(score) for score, name in enumerate("abcdefg")})
    assert pager.lags == {"a": 2, "b": 2, "c": 0, "d": 0, "e": 0, "f": 0, "g": 0}
    assert pager.retention("b") == pytest.approx(math.exp(-0.8))


@pytest.mark.parametrize("seed", range(12))
def test_lowest_go_first_and_whole(cache, seed):
    rng = random.Random(seed)
    sizes = {"head": rng.randrange(1, 9), **{f"s{i}": rng.randrange(1, 20) for i in range(8)}, "tail": rng.randrange(1, 9)}
    prompt = make_prompt(sizes)
    reserved = sizes["head"] + sizes["tail"]
    budget = reserved + rng.randrange(0, sum(sizes.values()) - reserved + 10)
    pager = core.RAGAwarePager(prompt, budget)
    evictable = {name: size for name, size in sizes.items() if name[0] == "s"}
    scores = {name: rng.random() for name in evictable}
    pager.retrieve(scores)
    fill(cache, sum(sizes.values()))
    pager.evict(cache)
    want = naive_resident(evictable, scores, budget - reserved) | {"head", "tail"}
    assert positions(cache) == [p for s, (a, b) in zip(prompt.segments, prompt.spans) if s.name in want for p in range(a, b)]
    assert pager.out.keys() == sizes.keys() - want and pager.n_evicted == len(sizes) - len(want)
    assert len(positions(cache)) <= budget


def test_budget_is_met_exactly_or_not_used(cache):
    """A budget that the best two fill to the last entry keeps them; one entry less and the lower one goes."""
    sizes, scores = {"head": 2, "a": 5, "b": 7, "c": 4, "tail": 3}, {"a": 0.1, "b": 0.3, "c": 0.2}
    fill(cache, 21)
    for budget, want in ((21, {"a", "b", "c"}), (20, {"b", "c"}), (16, {"b", "c"}), (15, {"b"}), (12, {"b"}), (11, set()), (5, set())):
        pager = core.RAGAwarePager(make_prompt(sizes), budget)
        pager.retrieve(scores)
        assert pager.wanted(cache) == want


def test_a_budget_below_the_reserved_tokens_is_refused(cache):
    pager = core.RAGAwarePager(make_prompt({"head": 2, "a": 5, "tail": 3}), 4)
    pager.retrieve({"a": 1.0})
    fill(cache, 10)
    with pytest.raises(core.Refusal, match="budget of 4 .* 5 reserved"):
        pager.evict(cache)
    with pytest.raises(niah.Refusal, match="budget of 4 .* 5 reserved"):
        niah.check_budget(core.CONFIGS["L3"], make_prompt({"head": 2, "a": 5, "tail": 3}), 4)
    niah.check_budget(core.CONFIGS["L3"], make_prompt({"head": 2, "a": 5, "tail": 3}), 5)
    assert positions(cache) == list(range(10))


def test_ties_are_broken_by_place(cache):
    """Whatever order the scores come in, the earlier of two equals goes."""
    fill(cache, 9)
    for order in ("abcd", "dcba", "bdac"):
        pager = core.RAGAwarePager(make_prompt({"head": 1, "a": 2, "b": 2, "c": 2, "d": 2}), 5)
        pager.retrieve(dict.fromkeys(order, 0.5))
        assert pager.wanted(cache) == {"c", "d"}


def test_in_flight_eviction_of_a_partly_read_segment(cache):
    """A segment evicted in the middle of being read leaves in parts, which are one eviction, and comes back whole."""
    prompt, events = make_prompt({"head": 2, "a": 12, "b": 4, "tail": 2}), []
    pager = core.RAGAwarePager(prompt, 8, store=core.PageStore(), trace=events.append)
    pager.retrieve({"a": 0.1, "b": 0.2})
    whole = core.PagedCache(type("Config", (), {"num_hidden_layers": 2}))
    for held in ([0, 1, 2, 3, 4], [0, 1], [0, 1, 14], [0, 1, 14, 15, 16, 17, 18, 19]):
        keys, values = torch.randn(2, 1, 2, 5, 4)
        for layer in range(2):
            whole.update(keys, values, layer)
            cache.update(keys, values, layer)
        pager.evict(cache)
        assert positions(cache) == held
    assert pager.n_evicted == 1 and pager.out == {"a": [(2, 10), (10, 14)]}
    assert [(e["segment"], e["start"], e["stop"]) for e in events] == [("a", 2, 10), ("a", 10, 14)]
    pager.budget = 20
    pager.evict(cache)
    assert pager.out == {} and not pager.store.pages
    for a, b in zip(cache.buffers(), whole.buffers()):
        assert all(torch.equal(x, y) for x, y in zip(a.entries(), b.entries()))


QUESTIONS = ["Which came first?", "And then?", "Who was it?", "Why?"]


@pytest.mark.parametrize("on_disk", [False, True])
def test_four_turns_of_questions(monkeypatch, tmp_path, on_disk):
    """After each question exactly the wanted segments are there, bit for bit as a cache that never evicts holds them."""
    lm = core.load_model(core.resolve_runtime("tiny", "cpu", "float32", "none"), core.load_config("tiny"), core.tiny_tokenizer())
    monkeypatch.setattr(core, "N_RETRIEVED", 2)
    rng = random.Random(0)
    texts = {f"p{i}": "".join(rng.choices("abcdefgh ", k=rng.randrange(20, 60))) for i in range(8)}
    segments = [core.Segment(name, text) for name, text in texts.items()]
    prompt = core.build_prompt(lm.tokenizer, [*segments, core.Segment("question", "\nWhat?", True)])
    spans = {s.name: span for s, span in zip(prompt.segments, prompt.spans) if not s.reserved}
    sizes = {name: b - a for name, (a, b) in spans.items()}
    n_prompt = len(prompt.input_ids)
    full, cache = core.PagedCache(lm.model.config), core.PagedCache(lm.model.config)
    events, store = [], core.PageStore(tmp_path if on_disk else None)
    pager = core.RAGAwarePager(prompt, 200, store=store, trace=events.append)
    for c in (full, cache):
        with core.attention(lm.model, stock=False):
            read(lm, c, prompt.input_ids, 32)

    lags, was_in, n_events = dict.fromkeys(spans, -1), set(spans), 0
    for question in QUESTIONS:
        scores = {name: rng.random() for name in spans}
        best = sorted(scores, key=lambda name: -scores[name])[:2]
        lags = {name: 0 if name in best else lags[name] + 1 for name in spans}
        pager.retrieve(scores)
        pager.evict(cache)
        with core.attention(lm.model, stock=False):
            read(lm, cache, torch.tensor(core.tokenise(lm.tokenizer, question)[0]), 32)
        pager.evict(cache)

        seen = cache.get_seq_length()
        retention = {name: scores[name] * math.exp(-0.4 * lags[name]) for name in spans}
        resident = naive_resident(sizes, retention, 200 - (seen - sum(sizes.values())))
        gone = {p for name, (a, b) in spans.items() if name not in resident for p in range(a, b)}
        held = positions(cache)
        assert held == [p for p in range(seen) if p not in gone] and 0 < len(resident) < 8 and len(held) <= 200
        for mine, whole in zip(cache.buffers(), full.buffers()):
            n = sum(p < n_prompt for p in held)
            for got, want in zip(mine.entries(), whole.entries()):
                assert torch.equal(got[:, :n], want[:, held[:n]])
        assert len(list(tmp_path.iterdir())) == (8 - len(resident) if on_disk else 0)

        new, n_events = events[n_events:], len(events)
        left, came = ({e["segment"] for e in new if e["event"] == event} for event in ("evict", "page_in"))
        assert (was_in | came) - left == resident and came.isdisjoint(was_in)
        for e in new:
            assert (e["start"], e["stop"]) == spans[e["segment"]]
            assert e["score"] == scores[e["segment"]] and e["lag"] == lags[e["segment"]]
            assert e["retention"] == pytest.approx(retention[e["segment"]])
        was_in = resident
    assert any(e["event"] == "page_in" for e in events)
    assert pager.facts()["evicted_segments"] == sum(e["event"] == "evict" for e in events) > len(pager.out)
    store.close()
    assert not list(tmp_path.iterdir())


def test_eviction_events_come_lowest_first(cache):
    events = []
    pager = core.RAGAwarePager(make_prompt({"head": 1, "a": 4, "b": 4, "c": 4, "d": 4}), 5, trace=events.append)
    pager.retrieve({"a": 0.3, "b": 0.1, "c": 0.4, "d": 0.2})
    fill(cache, 17)
    pager.evict(cache)
    assert [(e["event"], e["segment"], e["score"], e["lag"], e["n_seen"]) for e in events] == [
        ("evict", "b", 0.1, 0, 17), ("evict", "d", 0.2, 0, 17), ("evict", "a", 0.3, 0, 17)]


def test_a_folder_that_cannot_hold_pages_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(core.Refusal, match="file"):
        core.PageStore(tmp_path / "file" / "pages").put("a", {"keys": torch.ones(2)})


def naive_heavy_hitters(scores: list[list[float]], budget: int, n_sink: int, n_recent: int) -> list[list[int]]:
    kept = []
    for head in scores:
        S = len(head)
        chosen = [i for i in range(S) if i < n_sink or i >= S - n_recent]
        between = sorted((i for i in range(S) if i not in chosen), key=lambda i: -head[i])
        kept.append(sorted(chosen + between[: budget - len(chosen)]))
    return kept


@pytest.mark.parametrize("S,budget,n_sink,n_recent", [
    (30, 1, 1, 0), (30, 2, 2, 0), (30, 3, 2, 1), (30, 4, 3, 1), (30, 5, 4, 1), (30, 6, 4, 2),
    (30, 12, 4, 3), (30, 20, 4, 5), (30, 29, 4, 7), (100, 40, 4, 10),
    (30, 30, 4, 8), (30, 31, 4, 8), (30, 1000, 4, 8), (5, 5, 4, 1), (5, 4, 3, 1), (2, 1, 1, 0), (1, 1, 1, 0), (1, 9, 1, 0),
])
def test_heavy_hitters(S, budget, n_sink, n_recent):
    """Sinks and a recent quarter, both inside the budget, then the best of the rest, per head."""
    scores = torch.randn(3, S, generator=torch.Generator().manual_seed(S * 1000 + budget))
    before = scores.clone()
    got = core.heavy_hitters(scores, budget)
    assert got.shape == (3, min(budget, S))
    assert got.tolist() == naive_heavy_hitters(scores.tolist(), min(budget, S), n_sink, n_recent)
    assert torch.equal(scores, before)


def test_key_norm_keeps_the_smallest_keys_of_each_head(cache):
    """Exactly the budget in every layer and head, cut once; a cache within its budget is left alone."""
    fill(cache, 50)
    keys = [buffer.entries()[0].clone() for buffer in cache.buffers()]
    evictor = core.KeyNorm(20)
    evictor.evict(cache)
    for buffer, before in zip(cache.buffers(), keys):
        norms = [[-math.sqrt(sum(x * x for x in key)) for key in head] for head in before.tolist()]
        assert buffer.entries()[2].tolist() == naive_heavy_hitters(norms, 20, 4, 5)
        assert buffer.length == 20
    assert evictor.n_cuts == 1
    evictor.evict(cache)
    assert evictor.n_cuts == 1 and all(buffer.length == 20 for buffer in cache.buffers())


class Noting(core.Policy):
    """Writes down what it is called for."""

    def __init__(self, name: str, calls: list[tuple]):
        self.name, self.calls = name, calls

    def after_chunk(self, cache) -> None:
        self.calls.append((self.name, "chunk", cache))

    def before_decode(self, cache) -> None:
        self.calls.append((self.name, "decode", cache))

    def after_token(self, cache) -> None:
        self.calls.append((self.name, "token", cache))

    def facts(self) -> dict:
        return {self.name: len(self.calls)}


def test_in_turn_hands_every_event_to_each_in_order(cache):
    calls = []
    policy = core.InTurn(Noting("a", calls), core.Policy(), core.InTurn(Noting("b", calls)))
    policy.after_chunk(cache)
    policy.before_decode(cache)
    policy.after_token(cache)
    assert calls == [(name, event, cache) for event in ("chunk", "decode", "token") for name in "ab"]
    assert policy.facts() == {"a": 6, "b": 6} and core.InTurn().facts() == core.Policy().facts() == {}


@pytest.mark.parametrize("in_flight", [False, True])
def test_in_flight_says_whether_a_chunk_is_an_occasion(cache, in_flight):
    """Before decoding an evictor acts in any case, and after a token in none."""
    pager = core.RAGAwarePager(make_prompt({"head": 2, "a": 15, "b": 15, "tail": 3}), 25, in_flight)
    pager.retrieve({"a": 0.2, "b": 0.1})
    key_norm = core.KeyNorm(10, in_flight)
    for policy, n_left in ((pager, 20), (key_norm, 10)):
        fill(cache, 35 - cache.get_seq_length())
        policy.after_chunk(cache)
        assert all((buffer.length == n_left) == in_flight for buffer in cache.buffers())
        policy.before_decode(cache)
        assert all(buffer.length == n_left for buffer in cache.buffers())
    fill(cache, 7)
    key_norm.after_token(cache)
    pager.after_token(cache)
    assert all(buffer.length == 17 for buffer in cache.buffers())


def test_facts_name_the_unit_of_what_was_evicted():
    """Segments, cuts through all layers or entries of single heads: never one word for three; and settings as they were set."""
    config = type("Config", (), {"num_hidden_layers": 2})

    def scored() -> core.PagedCache:
        """30 entries in each of four heads, the first 20 of which score below zero."""
        low = torch.arange(30.0) - 20
        cache = core.PagedCache(config, ragged=True, scorers=[lambda hidden, keys, positions: low.expand(2, -1)] * 2)
        fill(cache, 30)
        return cache

    key_norm = core.KeyNorm(12)
    assert key_norm.facts() == {"evict_at": "pre-decode", "cuts": 0}
    key_norm.before_decode(scored())
    assert key_norm.facts() == {"evict_at": "pre-decode", "cuts": 1}
    assert core.KeyNorm(12, in_flight=True).facts() == {"evict_at": "chunk", "cuts": 0}

    pager = core.RAGAwarePager(make_prompt({"head": 1, "a": 8, "b": 9, "c": 10, "tail": 2}), 13, in_flight=True)
    pager.retrieve({"a": 0.1, "b": 0.2, "c": 0.3})
    assert pager.facts() == {"evict_at": "chunk", "evicted_segments": 0}
    pager.before_decode(scored())
    assert pager.facts() == {"evict_at": "chunk", "evicted_segments": 2}
    assert core.RAGAwarePager(make_prompt({"head": 1}), 13).facts() == {"evict_at": "pre-decode", "evicted_segments": 0}

    by_threshold = core.Pruner("streaming", window=5, threshold=0.0)
    settings = {"scorer": "streaming", "threshold": 0.0, "keep": None, "pooled": False, "window": 5, "prune_at": "chunk"}
    assert by_threshold.facts() == settings | {"evicted_entries": 0}
    by_threshold.after_chunk(scored())
    assert by_threshold.facts() == settings | {"evicted_entries": 80}
    by_share = core.Pruner("random", window=3, keep=0.5, pooled=True, in_flight=False)
    settings = {"scorer": "random", "threshold": None, "keep": 0.5, "pooled": True, "window": 3, "prune_at": "prefill"}
    by_share.after_chunk(scored())
    assert by_share.facts() == settings | {"evicted_entries": 0}
    by_share.before_decode(scored())
    assert by_share.facts() == settings | {"evicted_entries": 60}

    both = core.InTurn(pager, by_threshold).facts()
    assert both == pager.facts() | by_threshold.facts() and {"evicted_segments", "evicted_entries"} < both.keys()


PRUNING = {"scorer", "threshold", "keep", "pooled", "window", "prune_at"}


@pytest.mark.parametrize("given, unit", [
    (dict(config="L1"), set()), (dict(config="L2"), set()), (dict(config="L5"), set()),
    (dict(config="L3"), {"evicted_segments"}), (dict(config="L3", evict_at="chunk"), {"evicted_segments"}),
    (dict(config="L4"), {"cuts"}), (dict(config="L6"), {"evicted_entries"}),
    (dict(config="L6", prune_at="prefill"), {"evicted_entries"}),
    (dict(config="L7", evict_at="chunk"), {"evicted_segments", "evicted_entries"}),
])
def test_flags_become_a_policy(given, unit):
    """The settings come out as they went in, and only the units of what the configuration evicts."""
    args = core.PolicyArgs(**given, scorer="key-norm", threshold=-2.5, window=7)
    config = core.CONFIGS[args.config]
    prompt = make_prompt({"head": 1, "a": 8, "tail": 2})
    facts = core.make_policy(args, config, prompt, 9, {"a": 0.1}).facts()
    assert {name for name in facts if name in ("evicted_segments", "cuts", "evicted_entries")} == unit
    assert all(facts[name] == 0 for name in unit)
    settings = facts.keys() - unit
    assert settings == ({"evict_at"} if config.evict != "nothing" else set()) | (PRUNING if config.prune else set())
    assert all(facts[name] == getattr(args, name) for name in settings)
    unlimited = core.make_policy(args, config, prompt, None, {"a": 0.1}).facts()
    assert "evict_at" not in unlimited and ("evicted_entries" in unlimited) == config.prune
