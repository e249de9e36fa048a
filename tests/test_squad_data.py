"""Checks of data/squad_cognito.json, a SQuAD v1.1 style question set."""
import json
import unicodedata
from pathlib import Path

import pytest

PATH = Path(__file__).resolve().parent.parent / "data" / "squad_cognito.json"


@pytest.fixture(scope="module")
def raw():
    return json.loads(PATH.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def paragraphs(raw):
    return [p for article in raw["data"] for p in article["paragraphs"]]


@pytest.fixture(scope="module")
def questions(paragraphs):
    return [(p["context"], qa) for p in paragraphs for qa in p["qas"]]


def test_format(raw):
    assert raw["version"] == "1.1"
    titles = [article["title"] for article in raw["data"]]
    assert all(titles)
    assert len(titles) == len(set(titles))
    for article in raw["data"]:
        assert set(article) == {"title", "paragraphs"}
        for p in article["paragraphs"]:
            assert set(p) == {"context", "qas"}
            for qa in p["qas"]:
                assert set(qa) == {"id", "question", "answers"}
                for answer in qa["answers"]:
                    assert set(answer) == {"text", "answer_start"}


def test_counts(raw, paragraphs, questions):
    assert len(raw["data"]) >= 24
    assert len(paragraphs) >= 48
    assert len(questions) >= 96


def test_contexts_are_unique_and_clean(paragraphs):
    contexts = [p["context"] for p in paragraphs]
    assert len(contexts) == len(set(contexts))
    for context in contexts:
        assert 110 <= len(context.split()) <= 170, context[:60]
        assert context == " ".join(context.split()), context[:60]
        assert context == unicodedata.normalize("NFC", context), context[:60]


def test_answers_match_their_offsets(questions):
    for context, qa in questions:
        assert qa["answers"], qa["id"]
        for answer in qa["answers"]:
            text, start = answer["text"], answer["answer_start"]
            end = start + len(text)
            assert isinstance(start, int) and start >= 0, qa["id"]
            assert text and text == text.strip(), qa["id"]
            assert context[start:end] == text, qa["id"]
            assert start == 0 or not context[start - 1].isalnum(), qa["id"]
            assert end == len(context) or not context[end].isalnum(), qa["id"]


def test_answers_are_short_and_distinct(questions):
    for _, qa in questions:
        texts = [answer["text"] for answer in qa["answers"]]
        assert len(texts) == len(set(texts)), qa["id"]
        assert all(len(text) <= 60 for text in texts), qa["id"]


def test_ids_are_unique(questions):
    ids = [qa["id"] for _, qa in questions]
    assert len(ids) == len(set(ids))
    assert all(i.startswith("cog-") for i in ids)


def test_questions_read_as_questions(questions):
    texts = [qa["question"] for _, qa in questions]
    assert len(texts) == len(set(texts))
    for text in texts:
        assert text.endswith("?"), text
        assert text == text.strip(), text


def test_questions_do_not_contain_their_answer(questions):
    for _, qa in questions:
        assert qa["answers"][0]["text"].lower() not in qa["question"].lower(), qa["id"]
