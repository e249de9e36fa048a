"""Spans and passages: the prompt is tokenised once, and what a token belongs to is read off its first character."""

import copy
import random

import cognito_run as core
import eval_niah as niah
import pytest

ATOMS = (
    "word", "Word", "ing", " the", " a passage", "  two spaces", " ", "   ", "\n", "\n\n", "\n\n\n", "\t", "\t\tx = 1",
    ".", "...", "!?", ". ", "'s", "’s", "1", "12", "1234567", " 3.14", "1,000", "e-5", "é", "e\u0301", "ß", "naïve ",
    "🙂", "👩‍👩‍👧‍👦", "🏳️‍🌈", "👍🏽", "🇧🇷", "漢字", "东京。", "日本語です", "한국어 ", "ไทย", "العربية", "def f(x):\n    return x[0]\n",
    '{"a": [1, 2]}', "</div>", "`code`", "<|im_end|>", "<|im_start|>user\n", "\u00a0", "\u200b", "\ufeff", "\u2028", "\r\n",
)


def odd_texts(n: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choices(ATOMS, k=rng.randint(1, 6))) for _ in range(n)]


def naive_spans(tokenizer, prompt) -> list[tuple[int, int]]:
    """Walk over the bytes of the prompt token by token; a byte-level token's name has one character per byte."""
    owner_of_byte = []
    for i, segment in enumerate(prompt.segments):
        for char in segment.text:
            owner_of_byte += [i] * len(char.encode())
    owners, at = [], 0
    for token in tokenizer.convert_ids_to_tokens(prompt.input_ids.tolist()):
        owners.append(owner_of_byte[at])
        at += len(token)
    assert at == len(owner_of_byte)
    return [(sum(o < i for o in owners), sum(o <= i for o in owners)) for i in range(len(prompt.segments))]


def test_piecewise_is_not_mono(smollm2_tokenizer):
    """200 odd passages: our spans are exact, and those of piecewise tokenisation are not."""
    texts = odd_texts(200)
    prompt = core.build_prompt(smollm2_tokenizer, [core.Segment(f"p{i}", text) for i, text in enumerate(texts)], "The answer is")
    ids, pieces = prompt.input_ids.tolist(), [segment.text for segment in prompt.segments]
    rendered = smollm2_tokenizer.apply_chat_template([{"role": "user", "content": "".join(texts)}], tokenize=False,
                                                     add_generation_prompt=True) + "The answer is"
    assert "".join(pieces) == rendered and pieces[1:-1] == texts
    assert ids == smollm2_tokenizer(rendered, add_special_tokens=False)["input_ids"]
    assert smollm2_tokenizer.decode(ids, clean_up_tokenization_spaces=False) == rendered

    assert prompt.spans[0][0] == 0 and prompt.spans[-1][1] == len(ids)
    assert all(a[1] == b[0] and a[0] <= a[1] for a, b in zip(prompt.spans, prompt.spans[1:]))
    assert prompt.spans == naive_spans(smollm2_tokenizer, prompt)

    piecewise = [smollm2_tokenizer(text, add_special_tokens=False)["input_ids"] for text in pieces]
    assert sum(piecewise, []) != ids
    assert sum(len(piece) != stop - start for piece, (start, stop) in zip(piecewise, prompt.spans)) > 20


@pytest.mark.parametrize("seed", range(1, 6))
def test_spans_of_few_segments(smollm2_tokenizer, seed):
    """An empty passage included: it owns no token and shifts no other."""
    texts = [*odd_texts(5, seed), "", *odd_texts(5, seed + 100)]
    prompt = core.build_prompt(smollm2_tokenizer, [core.Segment(f"p{i}", text, i % 2 == 0) for i, text in enumerate(texts)])
    assert prompt.spans == naive_spans(smollm2_tokenizer, prompt)
    assert prompt.spans[6][0] == prompt.spans[6][1]
    reserved = sum(b - a for i, (a, b) in enumerate(prompt.spans) if i in (0, 1, 3, 5, 7, 9, 11, 12))
    assert prompt.reserved_tokens == reserved


@pytest.mark.parametrize("text", ["user", "system\n", "SmolLM", "<|im_end|>"])
def test_text_that_the_template_holds_too(smollm2_tokenizer, text):
    """A message is located in its own place, not where the template says the same."""
    prompt = core.build_prompt(smollm2_tokenizer, [core.Segment("p", text)])
    assert prompt.segments[0].text.endswith("<|im_start|>user\n")
    assert prompt.segments[2].text == "<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.spans == naive_spans(smollm2_tokenizer, prompt)


def with_template(tokenizer, template):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("alteration", ["trim", "upper", "e", "replace('  ', ' ')"])
def test_template_that_alters_the_text_is_refused(smollm2_tokenizer, alteration):
    tokenizer = with_template(smollm2_tokenizer, "{% for m in messages %}[INST]{{ m['content'] | " + alteration + " }}[/INST]{% endfor %}")
    with pytest.raises(core.Refusal, match="template"):
        core.build_prompt(tokenizer, [core.Segment("a", "\nx < y  and", True), core.Segment("b", " more ")])
    unaltered = core.build_prompt(tokenizer, [core.Segment("a", "1 "), core.Segment("b", "2")])
    assert [segment.text for segment in unaltered.segments] == ["[INST]", "1 ", "2", "[/INST]"]


def test_model_without_a_chat_template(smollm2_tokenizer):
    tokenizer = with_template(smollm2_tokenizer, None)
    prompt = core.build_prompt(tokenizer, [core.Segment("a", " One."), core.Segment("b", "two\n")], "So:")
    assert tokenizer.decode(prompt.input_ids, clean_up_tokenization_spaces=False) == "<|im_start|> One.two\n\nSo:"
    assert [segment.text for segment in prompt.segments] == ["<|im_start|>", " One.", "two\n", "\nSo:"]
    assert prompt.spans == naive_spans(tokenizer, prompt)


def token_counts(tokenizer, passages: list[str]) -> list[int]:
    """Tokens of the whole text that start in each passage."""
    offsets = tokenizer("".join(passages), add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    counts, begin = [], 0
    for passage in passages:
        counts.append(sum(begin <= start < begin + len(passage) for start, _ in offsets))
        begin += len(passage)
    return counts


@pytest.mark.parametrize("n_tokens", [1, 2, 7, 50])
def test_passages_are_the_text_again(smollm2_tokenizer, n_tokens):
    text = "".join(odd_texts(60, seed=7))
    passages = niah.cut_passages(text, smollm2_tokenizer, n_tokens)
    assert "".join(passages) == text and all(passages)
    for passage, count in zip(passages, token_counts(smollm2_tokenizer, passages)):
        assert count <= n_tokens or len(passage) == 1  # one character may be several tokens


def test_passages_end_at_sentence_ends(smollm2_tokenizer):
    """And they are as long as they can be: the next sentence would not have fitted."""
    ends = [". ", "! ", "? ", '." ', ".) ", ".\n", "\n\n"]
    rng = random.Random(0)
    sentences = [f"Sentence {'very ' * rng.randrange(8)}number {i}{rng.choice(ends)}" for i in range(100)]
    passages = niah.cut_passages("".join(sentences), smollm2_tokenizer, 50)
    counts, sizes = token_counts(smollm2_tokenizer, passages), token_counts(smollm2_tokenizer, sentences)
    assert "".join(passages) == "".join(sentences)
    done = 0
    for count in counts:
        n = next(n for n in range(len(sentences)) if sum(sizes[done : done + n]) == count)  # a whole number of sentences
        done += n
        assert count <= 50 and (done == 100 or count + sizes[done] > 50)
    assert done == 100


def test_cut_of_a_sentence_that_is_too_long(smollm2_tokenizer):
    text = "word " * 500 + "end. Then a short one."
    passages = niah.cut_passages(text, smollm2_tokenizer, 64)
    counts = token_counts(smollm2_tokenizer, passages)
    assert "".join(passages) == text
    assert counts[:7] == [64] * 7 and max(counts) <= 64
    assert passages[-1].endswith("short one.")


def test_cut_of_cjk(smollm2_tokenizer):
    text = "今日は晴れです。明日は雨でしょう！本当ですか？" * 20
    passages = niah.cut_passages(text, smollm2_tokenizer, 60)
    assert "".join(passages) == text and len(passages) > 5
    assert all(passage[-1] in "。！？" for passage in passages)
    assert max(token_counts(smollm2_tokenizer, passages)) <= 60


@pytest.mark.parametrize("text,want", [
    ("", []), ("One.", ["One."]), ("One. ", ["One. "]), ("One.\n\n", ["One.\n\n"]), ("。", ["。"]), (" \n\n ", [" \n\n "]),
])
def test_cut_makes_no_empty_passage(smollm2_tokenizer, text, want):
    assert niah.cut_passages(text, smollm2_tokenizer, 50) == want


@pytest.mark.parametrize("content,reason", [
    (b"", "empty"), (b" \n\t\n", "empty"), (b"\xef\xbb\xbf", "empty"), (b"\x89PNG\r\n\x1a\n\0\0", "not UTF-8"),
    (b"abc\0def", "binary"), ("olá".encode("latin-1"), "not UTF-8"), ("text".encode("utf-16"), "not UTF-8"),
])
def test_document_without_text_is_refused(tmp_path, content, reason):
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(niah.Refusal, match=reason) as refusal:
        niah.read_text(path)
    assert str(path) in str(refusal.value)


def test_document_that_cannot_be_read_is_refused(tmp_path):
    for path in (tmp_path / "missing.txt", tmp_path):
        with pytest.raises(niah.Refusal, match="cannot be read"):
            niah.read_text(path)


def test_document_is_read_as_it_is(tmp_path):
    (tmp_path / "a.md").write_bytes("\ufeff  Olá 🙂\n\n".encode())
    assert niah.read_text(tmp_path / "a.md") == "  Olá 🙂\n\n"
