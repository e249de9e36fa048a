"""Several questions about documents that are read once: what returns, what is left out, and that the transcript is right."""

import itertools
import json
import zlib

import cognito_run as core
import numpy as np
import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig

TOPICS = ("otters", "comets", "violins", "glaciers", "lanterns", "beehives", "harbours", "magnets", "orchids", "pistons", "quarries",
          "saffron")
N_NEW = 8
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
         "bos_token_id", "eos_token_id", "pad_token_id")


class BagOfWords:
    """A dense embedder of hashed words, without weights."""

    def encode(self, texts, **kwargs):
        vectors = np.zeros((len(texts), 256), np.float32)
        for vector, text in zip(vectors, texts):
            for word in core.words(text):
                vector[zlib.crc32(word.encode()) % 256] += 1
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.fixture
def passages():
    return {topic: f"About {topic}. " + f"Every word on {topic} stands in this passage on {topic}. " * 4 + "\n\n" for topic in TOPICS}


@pytest.fixture
def start(passages):
    """A function that begins a conversation with a tiny model in fp32."""
    def start(window=32768, architecture=None, passages=passages, tokenizer=core.load_tokenizer("tiny"), **given):
        config = core.load_config("tiny")
        config.vocab_size = max(config.vocab_size, len(tokenizer))
        if architecture is not None:
            sizes = {name: getattr(config, name) for name in SIZES}
            config = AutoConfig.for_model(architecture, **sizes, sliding_window=100, head_dim=16)
        config.max_position_embeddings, config.initializer_range = window, 0.2
        lm = core.load_model(core.resolve_runtime("tiny", "cpu", "float32", "none"), config, tokenizer)
        retriever = core.HybridRetriever(list(passages.values()), BagOfWords())
        args = core.Args(**dict(max_new_tokens=N_NEW, scorer="streaming", threshold=1800.0, window=64, positions="absolute") | given)
        return core.Conversation(args, lm, passages, retriever, core.PageStore(args.page_dir))

    return start


def ask(conversation, question, trace=None, on_text=lambda piece: None) -> dict:
    with core.attention(conversation.lm.model, conversation.config.stock):
        facts = conversation.ask(question, on_text=on_text, trace=trace)
    json.dumps(facts)
    return facts


def states(facts) -> dict[str, str]:
    return {row["passage"]: row["state"] for row in facts["passages"]}


def resident(facts) -> set[str]:
    return {name for name, state in states(facts).items() if state != "evicted"}


def entries(cache) -> list[torch.Tensor]:
    return [tensor.clone() for buffer in cache.buffers() for tensor in buffer.entries()]


WAYS = [
    *((config, {}) for config in core.CONFIGS), ("L3", dict(evict_at="chunk")), ("L6", dict(keep=0.4, threshold=None)),
    ("L6", dict(keep=0.4, threshold=None, pooled=True, prune_at="prefill")),
    ("L7", dict(keep=0.4, threshold=None, evict_at="chunk", kv_budget="0.2")),
    ("L3", dict(positions="rebased")), ("L3", dict(positions="rebased", evict_at="chunk")), ("L4", dict(positions="rebased")),
    ("L6", dict(keep=0.4, threshold=None, positions="rebased")), ("L7", dict(positions="rebased")),
    ("L3", dict(positions="ranked")), ("L7", dict(positions="ranked", evict_at="chunk")),
]


@pytest.mark.parametrize("config, given", WAYS)
def test_documents_are_read_once(start, config, given):
    """A later question reads itself alone, and leaves the cache as it was at the documents' end."""
    conversation = start(config=config, **given)
    facts = ask(conversation, "What of otters?")
    assert facts["n_read"] > sum(map(len, conversation.passages.values()))
    for question in ("And comets?", "And saffron, at last?"):
        cache = conversation.cache
        facts = ask(conversation, question)
        asked = core.ask_prompt(conversation.lm.tokenizer, {}, question, conversation.config)
        n_asked = sum(b - a for segment, (a, b) in zip(asked.segments[2:], asked.spans[2:]))
        assert conversation.cache is cache and facts["n_read"] == n_asked < 300
        assert cache.get_seq_length() == len(conversation.documents)
        n_new = facts["n_seen"] - len(conversation.documents) - n_asked
        assert n_new == N_NEW - 1 if facts["finish_reason"] == "length" else 0 <= n_new < N_NEW
        assert facts["n_beside"] == facts["n_seen"] - sum(b - a for a, b in conversation.spans.values())
        assert facts["question"] == question and (facts["compression_ratio"] > 0.4) == (config in ("L3", "L4", "L6", "L7"))


@pytest.mark.parametrize("config, given", [way for way in WAYS if way[1].get("evict_at") != "chunk"])
def test_every_question_is_answered_as_if_it_were_the_first(start, monkeypatch, config, given):
    """Token for token, with the same passages resident; lags would bring in others, so they count for nothing here."""
    monkeypatch.setattr(core, "DECAY", 0.0)
    conversation = start(config=config, **given)
    for question in ("What of otters?", "And what of the comets and of magnets, then?", "Saffron?", "What of otters?"):
        facts, fresh = ask(conversation, question), ask(start(config=config, **given), question)
        assert facts["answer"] == fresh["answer"] and facts["compression_ratio"] == fresh["compression_ratio"]
        assert resident(facts) == resident(fresh) and facts["n_seen"] == fresh["n_seen"]


@pytest.mark.parametrize("architecture", ["mistral", "gemma2", "gemma3_text"])
@pytest.mark.parametrize("config", ["L1", "L2", "L3", "L6"])
def test_what_a_sliding_window_forgets_while_answering_comes_back(start, monkeypatch, architecture, config):
    monkeypatch.setattr(core, "DECAY", 0.0)
    conversation = start(config=config, architecture=architecture, max_new_tokens=90)
    for question in ("What of otters?", "And comets?"):
        facts, fresh = ask(conversation, question), ask(start(config=config, architecture=architecture, max_new_tokens=90), question)
        assert facts["answer"] == fresh["answer"] and facts["n_seen"] - len(conversation.documents) > core.STALE


@pytest.mark.parametrize("config, positions", [
    *itertools.product(("L1", "L3", "L6", "L7"), ("absolute", "rebased")), ("L3", "ranked"), ("L7", "ranked")])
def test_an_answer_that_breaks_off_leaves_no_trace(start, monkeypatch, config, positions):
    """Interrupted in the middle, the next question is answered as if nothing had been asked."""
    monkeypatch.setattr(core, "DECAY", 0.0)
    conversation = start(config=config, positions=positions)

    def interrupt(piece):
        raise KeyboardInterrupt

    ask(conversation, "What of otters?")
    before = entries(conversation.cache) if config != "L1" else []
    with pytest.raises(KeyboardInterrupt):
        ask(conversation, "What of otters?", on_text=interrupt)
    if config != "L1":
        assert all(torch.equal(a, b) for a, b in zip(before, entries(conversation.cache), strict=True))
    fresh = start(config=config, positions=positions)
    assert ask(conversation, "And comets?")["answer"] == ask(fresh, "And comets?")["answer"]


@pytest.mark.parametrize("positions", ["absolute", "rebased"])
@pytest.mark.parametrize("on_disk", [False, True])
def test_an_evicted_passage_returns(start, tmp_path, on_disk, positions):
    """Evicted for the first question, paged in for the third with the very keys and values of its reading."""
    conversation, full = start(page_dir=tmp_path if on_disk else None, positions=positions), start(config="L2")
    events = []
    first = ask(conversation, "What of otters?", events.append)
    ask(full, "What of otters?")
    assert states(first)["otters"] == "resident" and on_disk == bool(list(tmp_path.iterdir()))
    out = [topic for topic in TOPICS if states(first)[topic] == "evicted"]
    second = ask(conversation, f"And {out[0]}?", events.append)
    assert states(second)[out[0]] == "paged in"
    wanted = next(topic for topic in out if states(second)[topic] == "evicted")
    third = ask(conversation, f"What of {wanted}?", events.append)
    assert states(third)[wanted] == "paged in"
    assert conversation.spans == full.spans
    for topic, state in states(third).items():
        kept, want = (c.cache.read_page(*conversation.spans[topic]) for c in (conversation, full))
        want = {name: tensor[:, :0] if state == "evicted" else tensor for name, tensor in want.items()}
        assert all(torch.equal(kept[name], want[name]) for name in want)
    assert [event["event"] for event in events if event.get("segment") == wanted] == ["evict", "page_in"]
    returned = next(event for event in events if event["event"] == "page_in" and event["segment"] == wanted)
    assert returned["n_seen"] == len(conversation.documents)  # it is there already when the question that wants it is read
    assert third["kv_bytes_decode"] < 0.5 * third["kv_bytes_full"]


def test_the_budget_counts_passages(start):
    """Instruction, question and answer come on top."""
    for config in ("L3", "L4"):
        conversation = start(config=config, evict_at="chunk")
        for question in ("What of otters?", "And comets?", "And violins?"):
            facts = ask(conversation, question)
            n_passages = sum(row["tokens"] for row in facts["passages"])
            n_head = len(conversation.documents) - n_passages
            kept = core.kv_entries(conversation.cache) / core.kv_heads(conversation.lm.model.config)
            assert kept <= 0.4 * n_passages + n_head and (kept >= 0.4 * n_passages + n_head - 1 or config == "L3")
            assert facts["kv_bytes_peak"] < 0.6 * facts["kv_bytes_full"]


def test_documents_longer_than_the_window(start, passages, capsys):
    """The best-ranked that fit, in document order; the others are named; a question on one of those has it read in behind them."""
    conversation = start(window=2600, config="L2")
    facts = ask(conversation, "What of saffron, and of otters?")
    read = list(conversation.spans)
    assert {"saffron", "otters"} <= set(read) and 2 < len(read) < 12 and read == [topic for topic in TOPICS if topic in read]
    left_out = [topic for topic in TOPICS if topic not in read]
    said = capsys.readouterr().err
    assert f"{len(left_out)} of 12" in said and all(topic in said for topic in left_out[:8]) and not any(topic in said for topic in read)
    ranked = sorted(TOPICS, key=dict(zip(TOPICS, conversation.retriever.rank(facts["question"]))).get, reverse=True)
    assert set(ranked[: len(read)]) == set(read)

    cache, wanted, end = conversation.cache, left_out[0], len(conversation.documents)
    facts = ask(conversation, f"What of {wanted}? Is there a passage on {wanted}?")
    assert conversation.cache is cache and conversation.spans[wanted][0] >= end
    new = list(conversation.spans)[len(read) :]
    assert facts["n_read"] < 300 + sum(len(passages[name]) for name in new) and facts["n_seen"] <= 2600
    assert f"{len(left_out) - len(new)} of 12 passages have never been read" in capsys.readouterr().err

    follow_up = ask(conversation, f"More of {wanted}: the passage on {wanted}?")
    assert conversation.cache is cache and follow_up["n_read"] < 300 and not capsys.readouterr().err


def naive_attention(module, query, key, value, attention_mask, scaling, sliding_window=None, softcap=None, hidden=None, paid=None,
                    **kwargs):
    """Explicit softmax attention, whose weights are put into `paid`; hidden: per layer (H or 1, n, n), what a query must not see."""
    groups = query.shape[1] // key.shape[1]
    scores = (query @ key.repeat_interleave(groups, 1).mT).float() * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    age = torch.arange(scores.shape[-1])[:, None] - torch.arange(scores.shape[-1])
    blind = (age < 0) | (age >= (sliding_window or len(age))) | hidden[module.layer_idx]
    weights = scores.masked_fill(blind, -torch.inf).softmax(-1)
    if softcap is None and (sliding_window is None or sliding_window >= len(age)):
        paid.append(weights[0])
    return (weights @ value.repeat_interleave(groups, 1)).transpose(1, 2), None


@torch.inference_mode()
def naive_reading(model, ids, hidden) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One forward over all tokens without a cache: logits (n, V), and the attention weights summed over layers and heads, (n, n)."""
    AttentionInterface.register("naive", naive_attention)
    AttentionMaskInterface.register("naive", lambda *args, **kwargs: None)
    before, paid = model.config._attn_implementation, []
    model.set_attn_implementation("naive")
    logits = model(input_ids=ids[None], use_cache=False, hidden=hidden, paid=paid).logits[0]
    model.set_attn_implementation(before)
    return logits, sum(weights.sum(0) for weights in paid) if paid else None


class Witness:
    """Sees every forward: the tokens, and which positions each head of each layer held when they were read."""

    def __init__(self, monkeypatch):
        self.chunks, self.logits, real = {}, {}, core.forward

        def forward(lm, cache, ids):
            start = cache.get_seq_length()
            held = [torch.cat([buffer.entries()[2].clone() for buffer in layer.buffers]) if layer.buffers and not cache.ragged else
                    [buffer.entries()[2][0].clone() for buffer in layer.buffers] for layer in cache.layers]
            self.chunks = {at: chunk for at, chunk in self.chunks.items() if at < start} | {start: (ids, held)}
            self.logits[start + len(ids) - 1] = real(lm, cache, ids)
            return self.logits[start + len(ids) - 1]

        monkeypatch.setattr(core, "forward", forward)

    def replay(self, model) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """What a single forward over these tokens gives where each sees what it saw: the tokens, and `naive_reading`'s."""
        ids = torch.cat([chunk for chunk, _ in self.chunks.values()])
        n, groups = len(ids), model.config.num_attention_heads // model.config.num_key_value_heads
        hidden = torch.ones(model.config.num_hidden_layers, model.config.num_key_value_heads, n, n, dtype=torch.bool)
        for start, (chunk, held) in self.chunks.items():
            hidden[:, :, start : start + len(chunk), start : start + len(chunk)] = False
            for layer, heads in enumerate(held):
                for head, positions in enumerate(heads):
                    hidden[layer, head, start : start + len(chunk), positions.long()] = False
        return ids, *naive_reading(model, ids, hidden.repeat_interleave(groups, dim=1))


LIBRARY = {f"{topic} {i}": f"Note {i} on {topic}. " + f"It says {topic} and {i}, {i}, {i}. " * 2 + "\n\n" for topic in TOPICS for i in range(6)}


def check_answer(conversation, witness, facts) -> None:
    """The answer and the citations are those of `Witness.replay`, and the passages are where the facts say."""
    lm, sliding = conversation.lm, getattr(conversation.lm.model.config, "sliding_window", None)
    ids, logits, paid = witness.replay(lm.model)
    assert len(ids) == facts["n_seen"]
    n_prompt = max(start + len(chunk) for start, (chunk, _) in witness.chunks.items() if len(chunk) > 1)
    said = logits[n_prompt - 1 :]
    got = torch.stack([witness.logits[at] for at in range(n_prompt - 1, len(ids))])
    assert len(said) == N_NEW or facts["finish_reason"] == "stop"
    assert (said - got).abs().max() < 1e-4
    assert lm.tokenizer.decode(said.argmax(-1), skip_special_tokens=True).strip() == facts["answer"]
    for row in facts["passages"]:
        span = conversation.spans.get(row["passage"])
        assert (row["state"] == "unread") == (span is None) == (row["lag"] is None)
        if span is not None:
            held = conversation.cache.count([span])[0]
            assert row["at"] == ("host" if row["state"] == "evicted" else "device")
            assert (held > 0) == (row["at"] == "device") or (sliding and not held)
            assert row["tokens"] == span[1] - span[0]
            assert lm.tokenizer.decode(ids[slice(*span)]) == conversation.passages[row["passage"]]
    best = [row["passage"] for row in facts["passages"][:5] if row["at"] == "device"]
    scores = [row["score"] for row in facts["passages"]]
    assert scores[0] == max(row["score"] for row in facts["passages"] if row["at"] == "device") and scores == sorted(scores, reverse=True)
    if paid is None:
        assert (facts["citations"], facts["cited_by"]) == (best[:3], "retriever")
    else:
        paid = {row["passage"]: float(paid[n_prompt - 1 :, slice(*conversation.spans[row["passage"]])].sum())
                for row in facts["passages"] if row["at"] == "device"}
        most = sorted(paid, key=paid.get, reverse=True)[:5]
        assert (facts["citations"], facts["cited_by"]) == ([name for name in most if name in best][:3], "retriever and attention")


def test_twenty_questions_about_documents_of_four_windows(start, monkeypatch):
    """In flight: one reading, KV within the budget and one chunk, every answer that of a fresh run over the same passages."""
    monkeypatch.setattr(core, "QUESTION_TOKENS", 130)
    assert sum(map(len, LIBRARY.values())) > 4 * 900
    conversation, witness = start(window=900, passages=LIBRARY, evict_at="chunk", chunk_size=64), Witness(monkeypatch)
    states_seen, went_back, cache = set(), 0, None
    per_entry = 2 * 2 * (2 * 16 * 4 + 4)  # layers, KV heads, (keys and values of 16 numbers, a position), in bytes
    rng = np.random.default_rng(0)
    for i in range(20):
        question, end = f"What says note {rng.integers(6)} on {rng.choice(TOPICS)}?", len(conversation.documents)
        facts = ask(conversation, question)
        check_answer(conversation, witness, facts)
        if i == 0:
            cache, n_passages = conversation.cache, sum(b - a for a, b in conversation.spans.values())
            n_beside = len(conversation.documents) - n_passages
        assert conversation.cache is cache and facts["n_seen"] <= 900 and facts["kv_bytes_full"] == facts["n_seen"] * 512
        n_reserved = n_beside + facts["n_seen"] - len(conversation.documents)
        assert facts["kv_bytes_peak"] <= (0.4 * n_passages + n_reserved + 64) * per_entry < 0.7 * facts["n_seen"] * per_entry
        assert core.kv_bytes(conversation.cache) <= facts["kv_bytes_peak"]
        assert sum(row["tokens"] for row in facts["passages"] if row["at"] == "device") <= 0.4 * n_passages
        assert facts["n_read"] < 570 or i == 0  # five passages and the question
        states_seen |= set(states(facts).values())
        went_back += len(conversation.documents) < end or (i > 0 and len(conversation.documents) == end and "read in" in states(facts).values())
    assert states_seen == {"resident", "evicted", "paged in", "read in", "unread"} and went_back > 2
    assert conversation.pager.spans == conversation.spans and conversation.pager.out.keys() <= conversation.spans.keys()
    assert {key.rpartition("@")[0] for key in conversation.store.pages} == conversation.pager.out.keys()


@pytest.mark.parametrize("config, given", [
    ("L2", {}), ("L3", dict(history=2)), ("L3", dict(kv_budget="0.05", architecture="qwen3")), ("L4", dict(evict_at="chunk")), ("L5", {}),
    ("L6", dict(scorer="random", threshold=0.5)), ("L7", dict(scorer="random", threshold=None, keep=0.5, evict_at="chunk")),
    ("L3", dict(architecture="gemma3_text")), ("L2", dict(architecture="gemma2")),
])
def test_passages_are_read_in_under_every_policy(start, monkeypatch, config, given):
    """Where going back is not possible, the documents are read anew; the answers are right in any case."""
    monkeypatch.setattr(core, "QUESTION_TOKENS", 130)
    conversation, witness = start(window=1000, passages=LIBRARY, config=config, **given), Witness(monkeypatch)
    n_read_in = 0
    for question in ("What says note 2 on otters?", "And note 4 on saffron?", "Note 1 on glaciers, then?", "What says note 3 on magnets?"):
        facts = ask(conversation, question)
        check_answer(conversation, witness, facts)
        n_read_in += sum(state == "read in" for state in states(facts).values())
        assert facts["n_seen"] <= 1000
    assert n_read_in > 2


def test_the_stock_cache_reads_anew_what_its_best_passage_lacks(start):
    conversation = start(window=1200, passages=LIBRARY, config="L1")
    for question in ("What says note 2 on otters?", "And note 4 on saffron?"):
        facts = ask(conversation, question)
        assert facts["n_read"] == facts["n_seen"] - N_NEW + 1 and facts["passages"][0]["state"] == "resident"
        assert facts["cited_by"] == "retriever" and facts["citations"] == [row["passage"] for row in facts["passages"][:3]]
    assert {row["state"] for row in facts["passages"]} == {"resident", "unread"}


def test_a_reading_that_breaks_off_is_begun_anew(start, monkeypatch):
    """Interrupted while passages are read in, the next question is answered as the first of a fresh conversation."""
    given = dict(window=1200, passages=LIBRARY, evict_at="chunk", chunk_size=64)
    conversation, real = start(**given), core.forward
    ask(conversation, "What says note 2 on otters?")

    def interrupt(lm, cache, ids):
        if cache.get_seq_length() > len(conversation.documents) - 100:
            raise KeyboardInterrupt
        return real(lm, cache, ids)

    monkeypatch.setattr(core, "forward", interrupt)
    with pytest.raises(KeyboardInterrupt):
        ask(conversation, "And note 4 on saffron?")
    monkeypatch.setattr(core, "forward", real)
    facts, fresh = (ask(one, "And note 4 on saffron?") for one in (conversation, start(**given)))
    assert facts["answer"] == fresh["answer"] and states(facts) == states(fresh)


def test_the_tokens_of_a_question_are_those_of_the_whole_prompt(start, smollm2_tokenizer):
    """Behind the documents it is tokenised as in one prompt; what is read in is exactly those passages' text."""
    texts = {name: text * 3 for name, text in LIBRARY.items()}
    conversation = start(window=3000, passages=texts, config="L2", tokenizer=smollm2_tokenizer, max_new_tokens=2)
    ask(conversation, "What says note 2 on otters?")
    read = {name: texts[name] for name in conversation.spans}
    for question in ("And?", "\n2 on otters?"):
        want = core.ask_prompt(smollm2_tokenizer, read, question, conversation.config).input_ids
        assert torch.equal(conversation._tokens(question), want)
    ask(conversation, "And note 4 on saffron?")
    behind = [name for name in conversation.spans if name not in read]
    assert 0 < len(behind) < 6
    text = "".join(texts[name] for name in (*read, *behind))
    whole = core.render_chat(smollm2_tokenizer, [{"role": "user", "content": core.INSTRUCTION + text + core.QUESTION.format(question="So?")}])
    assert smollm2_tokenizer.decode(conversation._tokens("So?")).split() == whole.split()  # where passages meet a line may be left blank


@pytest.mark.parametrize("config", ["L1", "L2", "L3", "L6"])
@pytest.mark.parametrize("history", [0, 2])
def test_a_conversation_never_ends_for_lack_of_room(start, config, history):
    """Twelve questions in a window that the documents nearly fill: all answered, and the documents stay."""
    conversation = start(window=3800, config=config, history=history)
    seen = [ask(conversation, f"What of {topic}?")["n_seen"] for topic in TOPICS]
    assert max(seen) <= 3800 and len(conversation.spans) == 12


def test_a_question_that_no_window_holds_is_refused_and_the_next_is_answered(start):
    conversation = start(window=3800, config="L2")
    first = ask(conversation, "What of otters?")
    with pytest.raises(core.Refusal, match="3800 positions"):
        ask(conversation, "Why? " * 1000)
    again = ask(conversation, "What of otters?")
    assert again["answer"] == first["answer"] and again["n_read"] < 300


def test_exchanges_without_room_are_dropped_oldest_first(start, capsys):
    conversation = start(window=3800, config="L3", history=2)
    for question in ("What of otters?", "And comets?"):
        ask(conversation, question)
    cache = conversation.cache
    facts = ask(conversation, "And saffron? " + "Tell me of saffron. " * 26)
    said = capsys.readouterr().err
    assert "'What of otters?'" in said and "they are dropped" in said and "comets" not in said
    assert conversation.cache is cache and facts["n_seen"] <= 3800
    assert [question for question, _ in conversation.exchanges][0] == "And comets?"


def test_a_long_question_makes_room_for_itself(start):
    conversation = start(window=3800, config="L3")
    ask(conversation, "What of otters?")
    facts = ask(conversation, "What of otters? " + "Tell me of otters. " * 60)
    assert facts["n_seen"] <= 3800 and 0 < len(conversation.spans) < 12 and "otters" in conversation.spans


def test_documents_that_just_fit_are_read_whole_and_once(start, passages, capsys):
    """To the last position of the window, with a question longer than the usual."""
    questions, config = (f"What of {topic}? " + "Is there more to tell? " * 10 for topic in ("otters", "comets")), core.CONFIGS["L3"]
    questions = [question.ljust(280, ".") for question in questions]
    n_asked, = {len(core.ask_prompt(core.load_tokenizer("tiny"), {}, question, config).input_ids) for question in questions}
    conversation = start(window=sum(map(len, passages.values())) + n_asked + N_NEW)
    first, second = (ask(conversation, question) for question in questions)
    assert "unread" not in states(first).values() and "never been read" not in capsys.readouterr().err
    assert second["n_read"] == n_asked - conversation.n_head and second["n_seen"] == conversation.window - 1


@pytest.mark.parametrize("config", core.CONFIGS)
def test_a_dialogue_is_what_the_chat_template_writes(start, passages, monkeypatch, config):
    """With --history 1 the last exchange stands between the documents and the question, and it is ranked by as well."""
    conversation = start(config=config, history=1, max_new_tokens=12)
    ranked, rank = [], conversation.retriever.rank
    monkeypatch.setattr(conversation.retriever, "rank", lambda question: ranked.append(question) or rank(question))
    questions = ("What of otters?", "And when?", "And where?")
    answers = [ask(conversation, question)["answer"] for question in questions]
    assert ranked == [questions[0], "What of otters? And when?", "And when? And where?"]
    conversation.exchanges = [(questions[1], answers[1])]
    tokens = conversation._tokens(questions[2])
    asked = [core.QUESTION.format(question=question) * (1 + (config == "L5")) for question in questions[1:]]
    messages = [{"role": "user", "content": core.INSTRUCTION + "".join(passages.values()) + asked[0]},
                {"role": "assistant", "content": answers[1]}, {"role": "user", "content": asked[1].strip()}]
    tokenizer = conversation.lm.tokenizer
    assert tokenizer.decode(tokens) == core.render_chat(tokenizer, messages)
    assert torch.equal(tokens[: len(conversation.documents)], conversation.documents)


@pytest.mark.parametrize("config, chunk", [("L1", 256), ("L2", 64), ("L2", 256), ("L5", 256)])
def test_a_follow_up_equals_one_uninterrupted_reading(start, monkeypatch, config, chunk):
    """The logits behind a third question are those of reading documents, kept exchange and question at once."""
    conversation = start(config=config, chunk_size=chunk, kv_budget="none", history=1)
    for question in ("What of otters?", "And comets?"):
        ask(conversation, question)
    tokens, logits, real = conversation._tokens("And violins?"), [], core.forward
    monkeypatch.setattr(core, "forward", lambda *args: logits.append(real(*args)) or logits[-1])
    facts = ask(conversation, "And violins?")
    n_chunks = -(-facts["n_read"] // chunk) if config != "L1" else 1
    with core.attention(conversation.lm.model, stock=True), torch.inference_mode():
        want = conversation.lm.model(input_ids=tokens[None], logits_to_keep=1).logits[0, -1]
    assert (logits[n_chunks - 1] - want).abs().max() < 1e-4


def test_a_budget_changes_between_questions(start, monkeypatch):
    """Down, off and up: the answer is that of a conversation that began with it, and nothing is read again but the question."""
    monkeypatch.setattr(core, "DECAY", 0.0)
    conversation, full = start(), start(config="L2")
    ask(full, "What of otters?")
    ask(conversation, "What of otters?")
    for budget in ("0.15", "none", "400KiB"):
        conversation.set_budget(budget)
        facts, fresh = ask(conversation, f"And comets at {budget}?"), ask(start(kv_budget=budget), f"And comets at {budget}?")
        assert facts["answer"] == fresh["answer"] and resident(facts) == resident(fresh) and facts["n_read"] < 300
        want = {topic: full.cache.read_page(*span) for topic, span in full.spans.items() if topic in resident(facts)}
        assert all(torch.equal(conversation.cache.read_page(*full.spans[topic])[key], page[key]) for topic, page in want.items() for key in page)
        assert (len(want) == 12) == (budget == "none") and want


def test_a_budget_may_be_set_where_there_was_none(start):
    conversation = start(kv_budget="none")
    assert len(resident(ask(conversation, "What of otters?"))) == 12
    cache = conversation.cache
    conversation.set_budget("0.3")
    facts = ask(conversation, "What of comets?")
    assert "comets" in resident(facts) and len(resident(facts)) < 5 and conversation.cache is cache and facts["n_read"] < 300
    assert {row["at"] for row in facts["passages"] if row["state"] == "evicted"} == {"host"}


def test_a_budget_below_the_best_passage_keeps_it(start, capsys):
    conversation = start()
    conversation.set_budget("50")
    for topic in ("otters", "comets"):
        facts = ask(conversation, f"What of {topic}?")
        assert resident(facts) == {topic}
    longest = max(map(len, conversation.passages.values()))
    assert f"a budget of 50 entries is below the longest passage; raised to its {longest}" in capsys.readouterr().err


def test_another_budget_for_key_norms_reads_anew(start):
    conversation = start(config="L4")
    ask(conversation, "What of otters?")
    for budget in ("0.2", "0.6"):
        conversation.set_budget(budget)
        facts, fresh = ask(conversation, "And comets?"), ask(start(config="L4", kv_budget=budget), "And comets?")
        assert facts["answer"] == fresh["answer"] and facts["compression_ratio"] == fresh["compression_ratio"] and facts["n_read"] > 3000


@pytest.mark.parametrize("config, budget, said", [
    ("L2", "0.3", "L2 has no budget"), ("L6", "0.3", "L6 has no budget"), ("L3", "many", "many is no budget"),
    ("L3", "0", "0 is no budget"), ("L4", "0.00001", "leaves none of"), ("L3", "0.2KiB", "leaves none of"),
])
def test_a_budget_that_is_none_changes_nothing(start, monkeypatch, config, budget, said):
    monkeypatch.setattr(core, "DECAY", 0.0)
    conversation = start(config=config)
    first = ask(conversation, "What of otters?")
    with pytest.raises(core.Refusal, match=said):
        conversation.set_budget(budget)
    again = ask(conversation, "What of otters?")
    assert again["answer"] == first["answer"] and again["n_read"] < 300


def test_short_documents_are_kept_whole_under_any_budget(start):
    conversation = start(passages={"note": "A short note on otters. " * 20})
    with pytest.raises(core.Refusal, match="480 tokens, and up to 512 are kept whole"):
        conversation.set_budget("0.3")


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("chunk", [7, None])
def test_attention_received_is_that_of_a_naive_softmax(tiny_model, chunk, ragged):
    """Of the last prompt token and of every token of the answer, also where entries have been evicted in between."""
    ids = torch.randint(3, 128, (61,), generator=torch.Generator().manual_seed(1))
    lm = core.LM(tiny_model, core.load_tokenizer("tiny"), torch.device("cpu"))
    cache, n = core.PagedCache(tiny_model.config, ragged=ragged), len(ids) + 5

    class Gap(core.Policy):
        def before_decode(self, cache):
            cache.evict([(10, 30)])

    with core.attention(tiny_model, stock=False), core.attention_received(cache, len(ids), n) as received:
        answer = core.generate(lm, cache, ids, 5, chunk, Gap())
    assert all(layer.observe is None for layer in cache.layers)
    ids = torch.cat([ids, torch.tensor(answer.token_ids[: cache.get_seq_length() - len(ids)])])
    hidden = torch.zeros(len(ids), len(ids), dtype=torch.bool)
    hidden[61:, 10:30] = True
    _, paid = naive_reading(tiny_model, ids, [hidden] * 3)
    if paid is None:
        assert tiny_model.config.model_type in ("mistral", "gemma2") and not received
    else:
        assert len(ids) > 61 and torch.allclose(received[torch.device("cpu")][: len(ids)], paid[60:].sum(0), atol=1e-4)


def test_the_citing_rule(start):
    """At most three, among the retriever's best five and the five with most attention, in the order of attention."""
    conversation = start()
    ask(conversation, "What of otters?")
    conversation.pager.out = {"glaciers": []}
    conversation.spans = {topic: (10 * i, 10 * i + 10) for i, topic in enumerate(TOPICS)}
    scores = dict(zip(TOPICS, (6, 5, 4, 3, 2, 1, 0, 0, 0, 0, 0, 0)))  # the best five: otters, comets, violins, glaciers, lanterns
    received = torch.zeros(200)

    def cited(paid: dict[str, float]) -> list[str]:
        received[:] = 0
        for topic, share in paid.items():
            received[10 * TOPICS.index(topic) + 3] = share
        facts = conversation._cite(scores, received)
        assert facts["cited_by"] == "retriever and attention"
        return facts["citations"]

    assert cited({"comets": 2, "otters": 1, "violins": 3, "lanterns": 4}) == ["lanterns", "violins", "comets"]
    assert cited({"beehives": 9, "harbours": 8, "magnets": 7, "orchids": 6, "comets": 5, "otters": 4}) == ["comets"]
    assert cited({"beehives": 9, "harbours": 8, "magnets": 7, "orchids": 6, "pistons": 5, "otters": 4}) == []
    assert cited({"glaciers": 9, "otters": 1, "beehives": 2, "harbours": 2, "magnets": 2, "orchids": 2}) == ["otters"]  # an evicted one is not cited
    assert conversation._cite(scores, None) == {"citations": ["otters", "comets", "violins"], "cited_by": "retriever"}
    assert conversation._cite(dict.fromkeys(TOPICS, 0.0) | {"otters": 1.0}, None)["citations"] == ["otters"]


@pytest.mark.parametrize("on_disk", [False, True])
def test_the_facts_say_where_a_passage_is(start, tmp_path, capsys, on_disk):
    conversation = start(window=1200, passages=LIBRARY, page_dir=tmp_path if on_disk else None)
    facts = ask(conversation, "What says note 2 on otters?")
    at = {(row["state"], row["at"]) for row in facts["passages"]}
    assert at == {("resident", "device"), ("evicted", "disk" if on_disk else "host"), ("unread", None)}
    assert len(facts["passages"]) == len(LIBRARY) and all(row["tokens"] == len(LIBRARY[row["passage"]]) for row in facts["passages"])
    assert facts["n_beside"] == facts["n_seen"] - sum(row["tokens"] for row in facts["passages"] if row["at"] is not None)
    core.print_answer(core.Reply(facts["answer"], (), facts), with_table=True)
    out = capsys.readouterr().out
    assert f"{sum(row['at'] is None for row in facts['passages'])} unread" in out


def fit(n_tokens=10_000, questions=("Who?",), window=4096, **given):
    """The tiny model's configuration with this window, fitted to documents of so many tokens."""
    config = core.load_config("tiny")
    config.max_position_embeddings = window
    runtime = core.resolve_runtime("tiny", "cpu", "float32", "none")
    return core.fit_questions(core.Args(**given), runtime, config, core.load_tokenizer("tiny"), questions, n_tokens)


def test_yarn_stretches_the_window_as_far_as_the_documents_need(start, capsys):
    for n_tokens, length, factor in ((10_000, 10_320, 10_320 / 4096), (50_000, 16_384, 4.0)):
        config = fit(n_tokens, rope="yarn")
        assert config.max_position_embeddings == length and config.rope_parameters["rope_type"] == "yarn"
        assert config.rope_parameters["factor"] == factor and config.rope_parameters["original_max_position_embeddings"] == 4096
        assert f"YaRN, factor {factor:g}" in capsys.readouterr().out
    conversation = start(passages=LIBRARY, window=fit(sum(map(len, LIBRARY.values())), rope="yarn", max_new_tokens=N_NEW).max_position_embeddings)
    assert "unread" not in states(ask(conversation, "What says note 2 on otters?")).values()
    capsys.readouterr()
    for config in (fit(10_000), fit(3000, rope="yarn")):
        assert config.max_position_embeddings == 4096 and config.rope_parameters["rope_type"] == "default"
    assert not capsys.readouterr().out
    with pytest.raises(core.Refusal, match="--rope ntk is unknown"):
        core.check_args(core.Args(rope="ntk"))


@pytest.mark.parametrize("questions", [("Who?",), ()])
@pytest.mark.parametrize("max_new_tokens", [10**9, 4096, 3800])
def test_an_answer_that_leaves_no_room_is_refused(questions, max_new_tokens):
    """In one sentence, which names the most that there is room for."""
    with pytest.raises(core.Refusal, match=rf"4096 positions.*--max-new-tokens {max_new_tokens}; pass --max-new-tokens \d+ or less$") as caught:
        fit(questions=questions, max_new_tokens=max_new_tokens)
    most = int(str(caught.value).split()[-3])
    fit(questions=questions, max_new_tokens=most)
    with pytest.raises(core.Refusal, match=f"--max-new-tokens {most} or less"):
        fit(questions=questions, max_new_tokens=most + 1)


def test_a_question_too_long_for_any_answer_is_refused():
    with pytest.raises(core.Refusal, match="4096 positions.*; shorten the question$"):
        fit(questions=("Why? " * 1000,), max_new_tokens=1)


def test_room_for_many_exchanges_is_not_taken_from_all_passages(start):
    """A hundred exchanges would fill the window; they get a quarter of it, and the oldest leave."""
    conversation = start(window=3800, history=100, config="L3", max_new_tokens=90)
    for topic in TOPICS[:4]:
        assert ask(conversation, f"What of {topic}?")["n_seen"] <= 3800
    assert len(conversation.spans) > 5 and conversation.exchanges


@pytest.mark.parametrize("config, given", [*WAYS, ("L1", {}), ("L7", dict(kv_budget="700"))])
def test_reading_before_the_question_changes_no_answer(start, config, given):
    """Answers, states and lags are those of a conversation whose first question has the documents read.

    The bytes are too, but for the room that a buffer has grown by.
    """
    told, n_read, n_bytes = [], [], []
    for ahead in (False, True):
        conversation = start(config=config, **given)
        with core.attention(conversation.lm.model, conversation.config.stock):
            n_read.append(conversation.read_ahead().n_read if ahead else 0)
        facts = [ask(conversation, f"What about {topic}?") for topic in ("magnets", "otters", "magnets")]
        n_bytes.append([one[name] for one in facts for name in ("kv_bytes_decode", "kv_bytes_peak")])
        told.append([{name: fact for name, fact in one.items() if not name.endswith(("_s", "_mean", "_decode", "_peak"))}
                     for one in facts])
    assert told[0] == told[1]
    assert n_bytes[1] == pytest.approx(n_bytes[0], rel=2 / core.ROOM)
    needs_a_question = config == "L1" or (config in ("L3", "L7") and (given.get("evict_at") == "chunk" or config == "L7"))
    assert (n_read[1] == 0) == needs_a_question
