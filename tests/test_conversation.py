"""Several questions about documents that are read once: what returns, what is left out, and that the transcript is right."""

import json
import zlib

import cognito_run as core
import numpy as np
import pytest
import torch
from transformers import AutoConfig

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
    def start(window=32768, architecture=None, **given):
        config = core.load_config("tiny")
        if architecture is not None:
            sizes = {name: getattr(config, name) for name in SIZES}
            config = AutoConfig.for_model(architecture, **sizes, sliding_window=100, head_dim=16)
        config.max_position_embeddings, config.initializer_range = window, 0.2
        lm = core.load_model(core.resolve_runtime("tiny", "cpu", "float32", "none"), config, core.load_tokenizer("tiny"))
        retriever = core.HybridRetriever(list(passages.values()), BagOfWords())
        args = core.Args(**dict(max_new_tokens=N_NEW, scorer="streaming", threshold=1800.0, window=64) | given)
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


@pytest.mark.parametrize("config", ["L1", "L3", "L6", "L7"])
def test_an_answer_that_breaks_off_leaves_no_trace(start, monkeypatch, config):
    """Interrupted in the middle, the next question is answered as if nothing had been asked."""
    monkeypatch.setattr(core, "DECAY", 0.0)
    conversation = start(config=config)

    def interrupt(piece):
        raise KeyboardInterrupt

    ask(conversation, "What of otters?")
    before = entries(conversation.cache) if config != "L1" else []
    with pytest.raises(KeyboardInterrupt):
        ask(conversation, "What of otters?", on_text=interrupt)
    if config != "L1":
        assert all(torch.equal(a, b) for a, b in zip(before, entries(conversation.cache), strict=True))
    assert ask(conversation, "And comets?")["answer"] == ask(start(config=config), "And comets?")["answer"]


@pytest.mark.parametrize("on_disk", [False, True])
def test_an_evicted_passage_returns(start, tmp_path, on_disk):
    """Evicted for the first question, paged in for the third with the very keys and values of its reading."""
    conversation, full = start(page_dir=tmp_path if on_disk else None), start(config="L2")
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
    """The best-ranked that fit, in document order; the others are named; a question on one of those makes it read again."""
    conversation = start(window=2000, config="L2")
    facts = ask(conversation, "What of saffron, and of otters?")
    read = list(conversation.spans)
    assert {"saffron", "otters"} <= set(read) and 2 < len(read) < 12 and read == [topic for topic in TOPICS if topic in read]
    left_out = [topic for topic in TOPICS if topic not in read]
    said = capsys.readouterr().err
    assert f"{len(left_out)} of 12" in said and all(topic in said for topic in left_out[:8]) and not any(topic in said for topic in read)
    ranked = sorted(TOPICS, key=dict(zip(TOPICS, conversation.retriever.rank(facts["question"]))).get, reverse=True)
    assert set(ranked[: len(read)]) == set(read)

    cache = conversation.cache
    wanted = left_out[0]
    facts = ask(conversation, f"What of {wanted}? Is there a passage on {wanted}?")
    assert conversation.cache is not cache and wanted in conversation.spans and facts["n_read"] > 1000
    assert facts["n_seen"] <= 2000

    cache = conversation.cache
    follow_up = ask(conversation, f"More of {wanted}: the passage on {wanted}?")
    assert conversation.cache is cache and follow_up["n_read"] < 300


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
