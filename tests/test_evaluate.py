"""What the evaluations share: the passages' order, what is kept of the answer's passage, thinking, torn needles."""

import logging
import types

import eval_niah as niah
import pytest
import torch

ORDERED = {"original": [0, 1, 2, 3, 4], "bm25": [3, 1, 4, 0, 2], "edges": [3, 4, 2, 0, 1]}


def arranged(order: str, trim: int | None) -> tuple[list[str], dict[str, str]]:
    """Five passages that share 1, 3, 0, 5 and 2 words with the question, each its own, and what is made of them."""
    rare = [[f"rare{i}{k}" for k in range(n)] for i, n in enumerate((1, 3, 0, 5, 2))]
    passages = [" ".join(["plain"] * 9 + mine + ["stone"] * (5 - len(mine))) + ". " for mine in rare]
    question = " ".join(sum(rare, []))
    return passages, niah.arrange(passages, question, types.SimpleNamespace(context_order=order, context_trim=trim))


@pytest.mark.parametrize("order", niah.CONTEXT_ORDERS)
@pytest.mark.parametrize("trim", [None, 1, 3, 9])
def test_order_and_trim(order, trim):
    passages, made = arranged(order, trim)
    best = set(ORDERED["bm25"][:trim])
    want = [i for i in ORDERED["original"] if i in best] if order == "original" else ORDERED[order] if trim is None or trim >= 5 else None
    if want is None:
        want = {("bm25", 1): [3], ("bm25", 3): [3, 1, 4], ("edges", 1): [3], ("edges", 3): [3, 4, 1]}[order, trim]
    assert list(made) == [f"passage-{i}" for i in want]
    assert [text.strip() for text in made.values()] == [passages[i].strip() for i in want]
    assert all(text[-1].isspace() for text in made.values())


def test_passages_as_they_stand_are_untouched():
    passages, made = arranged("original", None)
    assert list(made.values()) == passages


@pytest.mark.parametrize("text, thinking, want", [
    ("Paris", False, ("Paris", False)), ("<think>\nhm\n</think>\n\nParis\n", False, ("Paris", False)),
    ("<think>\nit could be Rome", False, ("", True)), ("Well <think> hm", False, ("Well", True)),
    ("hm</think>Paris", True, ("Paris", False)), ("it could be Rome", True, ("", True)), ("", False, ("", False)),
    ("<think>a</think><think>b</think> Paris", False, ("Paris", False)),
])
def test_thinking_is_no_answer(text, thinking, want):
    assert niah.final_answer(text, thinking) == want


def test_a_thinking_template_is_asked_not_to(monkeypatch):
    """And where it opens the block all the same, what follows is thinking until the block is closed."""
    tokenizer = niah.load_tokenizer("tiny")
    tokenizer.chat_template += "{% if not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% else %}{{ '<think>' }}{% endif %}"
    asked = niah.build_prompt(tokenizer, [niah.Segment("a", "Hello.")]).segments[-1].text
    assert asked.endswith("<think>\n\n</think>\n\n") and not asked.rfind("<think>") > asked.rfind("</think>")


@pytest.mark.parametrize("ragged", [False, True])
def test_kept_share(ragged):
    from conftest import tiny_config

    config = tiny_config("llama")
    cache = niah.PagedCache(config, ragged=ragged)
    for layer in cache.layers:
        layer.update(torch.randn(1, 2, 40, 8), torch.randn(1, 2, 40, 8))
    assert niah.kept_share(cache, config, [(0, 10), (30, 40)]) == 1
    cache.evict([(5, 15), (20, 25)])
    assert niah.kept_share(cache, config, [(0, 10), (30, 40)]) == 15 / 20
    assert niah.kept_share(cache, config, [(5, 15)]) == 0
    buffer = next(cache.buffers())
    buffer.keep(torch.zeros(buffer.keys.shape[0], 1, dtype=torch.long))  # position 0 alone, in one layer, or head
    n_heads = 1 if ragged else 2
    assert niah.kept_share(cache, config, [(0, 10)]) == pytest.approx((5 * (6 - n_heads) + n_heads) / 60)


def test_a_torn_needle_is_reported(caplog, monkeypatch):
    """Passages shorter than the needle tear it, and reordering scatters the pieces; ours end with its sentence."""
    tokenizer, sentences = niah.load_tokenizer("tiny"), niah.cut_sentences(niah.read_haystack("noise"))
    args = niah.Args(context_order="edges")
    assert all(len(niah.make_case(args, "niah", tokenizer, sentences, 8192, i).needle_passages) == 1 for i in range(15))
    monkeypatch.setattr(niah, "PASSAGE_TOKENS", 60)
    cases = [niah.make_case(args, "niah", tokenizer, sentences, 8192, i) for i in range(15)]
    torn = [case for case in cases if len(case.needle_passages) > 1]
    assert torn
    for case in cases:
        whole = niah.NEEDLE.format(key=case.key, value=case.value)
        held = [case.passages[name].strip() for name in case.needle_passages]
        assert (len(held) == 1) == any(whole in text for text in case.passages.values())
        assert "".join(held).replace(" ", "").count(whole.replace(" ", "")) == 1
    niah.warn_of_arranging(niah.Args(), cases)
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        niah.warn_of_arranging(args, cases)
    assert "no fair setting" in caplog.text and f"torn over several passages in {len(torn)}" in caplog.text


def test_a_trimmed_needle_is_reported(caplog):
    tokenizer = niah.load_tokenizer("tiny")
    args = niah.Args(context_trim=2)
    cases = [niah.make_case(args, "niah", tokenizer, niah.cut_sentences(niah.read_haystack("noise")), 4096, i) for i in range(5)]
    assert all(len(case.passages) == 2 for case in cases)
    gone = sum(case.needle_passages[0] not in case.passages for case in cases)
    niah.warn_of_arranging(args, cases)
    assert f"trimmed away in {gone} of 5" in caplog.text
