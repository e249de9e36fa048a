"""Several questions about documents that are read once: what returns, what is left out, and that the transcript is right."""

import json
import zlib

import cognito_run as core
import numpy as np
import pytest
import torch

TOPICS = ("otters", "comets", "violins", "glaciers", "lanterns", "beehives", "harbours", "magnets", "orchids", "pistons", "quarries",
          "saffron")
N_NEW = 4


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
    """A function that begins a conversation with the tiny model in fp32."""
    def start(window=32768, n_turns=3, **given):
        config = core.load_config("tiny")
        config.max_position_embeddings, config.initializer_range = window, 0.2
        lm = core.load_model(core.resolve_runtime("tiny", "cpu", "float32", "none"), config, core.load_tokenizer("tiny"))
        retriever = core.HybridRetriever(list(passages.values()), BagOfWords())
        args = core.Args(**dict(max_new_tokens=N_NEW, scorer="random", threshold=0.7, window=64) | given)
        return core.Conversation(args, lm, passages, retriever, core.PageStore(args.page_dir), n_turns)

    return start


def ask(conversation, question, trace=None) -> dict:
    with core.attention(conversation.lm.model, conversation.config.stock):
        facts = conversation.ask(question, on_text=lambda piece: None, trace=trace)
    json.dumps(facts)
    return facts


def states(facts) -> dict[str, str]:
    return {row["passage"]: row["state"] for row in facts["passages"]}


def n_follow_up(conversation, question, previous) -> int:
    """Tokens of a follow-up alone: what the template writes between two answers, and an answer's last token, never read before."""
    text = core.next_turn_text(conversation.lm.tokenizer, question, conversation.config)
    return len(core.tokenise(conversation.lm.tokenizer, text)[0]) + (previous["finish_reason"] == "length")


@pytest.mark.parametrize("config, given", [
    *((config, {}) for config in core.CONFIGS), ("L3", dict(evict_at="chunk")), ("L6", dict(keep=0.4, threshold=None)),
    ("L6", dict(keep=0.4, threshold=None, pooled=True, prune_at="prefill")),
    ("L7", dict(keep=0.4, threshold=None, evict_at="chunk")),
])
def test_documents_are_read_once(start, config, given):
    conversation = start(config=config, **given)
    facts = ask(conversation, "What of otters?")
    assert facts["n_prompt_tokens"] > sum(map(len, conversation.passages.values()))
    for question in ("And comets?", "And saffron, at last?"):
        cache, before = conversation.cache, facts
        facts = ask(conversation, question)
        assert conversation.cache is cache and facts["n_prompt_tokens"] == n_follow_up(conversation, question, before) < 300
        n_new = facts["n_seen"] - before["n_seen"] - facts["n_prompt_tokens"]
        assert n_new == N_NEW - 1 if facts["finish_reason"] == "length" else 0 <= n_new < N_NEW
        assert facts["question"] == question and (facts["compression_ratio"] > 0.5) == (config in ("L3", "L4", "L6", "L7"))


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
    assert returned["n_seen"] == second["n_seen"]  # it is there already when the question that wants it is read
    assert third["kv_bytes_decode"] < 0.5 * third["kv_bytes_full"]


def test_budget_holds_over_the_turns(start):
    """The fraction counts all tokens seen, template and answers too."""
    for config in ("L3", "L4"):
        conversation = start(config=config, evict_at="chunk")
        for question in ("What of otters?", "And comets?", "And violins?"):
            facts = ask(conversation, question)
            kept = core.kv_entries(conversation.cache) / core.kv_heads(conversation.lm.model.config)
            assert kept <= 0.4 * facts["n_seen"] + 2 * N_NEW and (kept >= 0.4 * facts["n_seen"] - 1 or config == "L3")
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
    assert conversation.cache is not cache and wanted in conversation.spans and facts["n_prompt_tokens"] > 1000
    assert facts["n_seen"] <= 2000 and facts["n_prompt_tokens"] + N_NEW >= facts["n_seen"]

    cache = conversation.cache
    follow_up = ask(conversation, f"More of {wanted}: the passage on {wanted}?")
    assert conversation.cache is cache and follow_up["n_prompt_tokens"] < 300


def test_a_full_window_makes_it_read_again(start):
    conversation = start(window=3600, n_turns=1, config="L3")
    seen = [ask(conversation, "What of otters?")["n_seen"] for _ in range(6)]
    assert max(seen) <= 3600 and any(b < a for a, b in zip(seen, seen[1:]))


def test_many_questions_still_leave_room_for_the_best_passage(start):
    conversation = start(window=2000, n_turns=20, config="L2")
    ask(conversation, "What of saffron?")
    assert "saffron" in conversation.spans


@pytest.mark.parametrize("finish", ["stop", "length"])
@pytest.mark.parametrize("config, chunk", [("L1", 256), ("L2", 64), ("L2", 256), ("L5", 256)])
def test_a_follow_up_equals_one_uninterrupted_reading(start, passages, monkeypatch, config, chunk, finish):
    """The model is made to say "Yes"; the cache has then read what the chat template writes, with the logits of reading it at once."""
    conversation = start(config=config, chunk_size=chunk, kv_budget="none")
    tokenizer, read, logits, real = conversation.lm.tokenizer, [], [], core.forward
    answer = "Yes." if finish == "length" else "Yes"
    said = [*tokenizer.encode(answer), tokenizer.eos_token_id]

    def forward(lm, cache, input_ids):
        read.append(input_ids)
        logits.append(real(lm, cache, input_ids))
        n_answered = cache.get_seq_length() - len(conversation.tokens)
        return logits[-1] if n_answered < 0 else torch.nn.functional.one_hot(torch.tensor(said[n_answered]), 260)

    monkeypatch.setattr(core, "forward", forward)
    first = ask(conversation, "What of otters?")
    assert first["finish_reason"] == finish and first["answer"] == answer
    said = [tokenizer.eos_token_id]
    ask(conversation, "And comets?")
    read = torch.cat(read)
    asked = [core.QUESTION.format(question=question) * (1 + (config == "L5")) for question in ("What of otters?", "And comets?")]
    messages = [{"role": "user", "content": core.INSTRUCTION + "".join(passages.values()) + asked[0]},
                {"role": "assistant", "content": answer}, {"role": "user", "content": asked[1].strip()}]
    assert tokenizer.decode(read) == core.render_chat(tokenizer, messages) and torch.equal(read, conversation.tokens)
    with core.attention(conversation.lm.model, stock=True), torch.inference_mode():
        want = conversation.lm.model(input_ids=read[None], logits_to_keep=1).logits[0, -1]
    assert (logits[-1] - want).abs().max() < 1e-4


def test_typed_questions(monkeypatch):
    """Blank lines are passed over; the end of input ends the session."""
    typed = iter(["What of otters?", "  ", "And comets?"])

    def type_in(prompt):
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", type_in)
    assert list(core.typed_questions()) == ["What of otters?", "And comets?"]
