"""eval_squad.py: the question set is checked, cases are built as said, rows say whether the paragraph was kept."""

import copy
import json
import sys
import types
from collections import Counter
from pathlib import Path

import eval_squad as squad
import pytest

OURS = Path(__file__).parents[1] / "data" / "squad_cognito.json"
CPU = dict(model="tiny", device="cpu", dtype="float32", quant="none", reranker="none", squad=OURS)
LENGTH = 8192  # the tiny model reads bytes


@pytest.fixture(autouse=True)
def offline_in_an_empty_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(squad, "hub_unreachable", lambda: True)


def evaluate(**given) -> int:
    return squad.run_main(squad.main, squad.Args(**{**CPU, "n": 1, "lengths": (LENGTH,), **given}))


def read(path) -> list[dict]:
    rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
    assert not any(squad.row_fault(row) or row.keys() - squad.SCHEMA.keys() for row in rows)
    return rows


@pytest.fixture(scope="module")
def paragraphs():
    return squad.read_squad(OURS)[1]


@pytest.fixture(scope="module")
def tokenizer():
    return squad.load_tokenizer("tiny")


def small_set() -> dict:
    """Two articles that are right in every field."""
    def paragraph(i: int) -> dict:
        return {"context": f"Fact {i} is plain.", "qas": [
            {"id": f"q{i}", "question": f"What is fact {i}?", "answers": [{"text": "plain", "answer_start": 10}]}]}

    return {"version": "1.1", "data": [{"title": f"T{i}", "paragraphs": [paragraph(i)]} for i in range(2)]}


def put(tree, path: list, value) -> None:
    for key in path[:-1]:
        tree = tree[key]
    if value is None:
        del tree[path[-1]]
    else:
        tree[path[-1]] = value


ARTICLE = ["data", 1]
PARAGRAPH = [*ARTICLE, "paragraphs", 0]
QUESTION = [*PARAGRAPH, "qas", 0]
ANSWER = [*QUESTION, "answers", 0]


@pytest.mark.parametrize("path, value, said", [
    (["data"], None, "data is null"), (["data"], [], "data is []"), (ARTICLE, "text", "article 1: paragraphs is str"),
    ([*ARTICLE, "title"], None, "article 1: title is null"), ([*ARTICLE, "paragraphs"], {}, "article 1: paragraphs is {}"),
    (PARAGRAPH, 7, "article 1, paragraph 0: context is int"), ([*PARAGRAPH, "context"], "", 'article 1, paragraph 0: context is ""'),
    ([*PARAGRAPH, "qas"], [], "article 1, paragraph 0: qas is []"), ([*QUESTION, "id"], 5, "article 1, paragraph 0, question 0: id is 5"),
    ([*QUESTION, "id"], "q0", "article 1, paragraph 0, question 0: id q0 occurs twice"),
    ([*QUESTION, "question"], None, "question 0: question is null"), ([*QUESTION, "answers"], [], "question 0: answers is []"),
    ([*ANSWER, "text"], None, "answer 0: text is null"), ([*ANSWER, "answer_start"], None, "answer 0: answer_start is null"),
    ([*ANSWER, "answer_start"], True, "answer 0: answer_start is true"), ([*ANSWER, "answer_start"], "10", 'answer 0: answer_start is "10"'),
    ([*ANSWER, "answer_start"], 11, "article 1, paragraph 0, question 0, answer 0: answer_start 11"),
    ([*ANSWER, "answer_start"], -8, "answer_start -8"), ([*ANSWER, "text"], "Plain", "answer_start 10"),
])
def test_a_malformed_set_is_refused_with_the_path_to_the_fault(path, value, said):
    tree = copy.deepcopy(small_set())
    put(tree, path, value)
    Path("set.json").write_text(json.dumps(tree))
    with pytest.raises(squad.Refusal) as refusal:
        squad.read_squad(Path("set.json"))
    assert "set.json" in str(refusal.value) and said in str(refusal.value)


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '"text"'])
def test_a_file_of_something_else_is_refused(content):
    Path("set.json").write_text(content)
    with pytest.raises(squad.Refusal, match=r"set\.json"):
        squad.read_squad(Path("set.json"))


def test_a_right_set_is_read():
    Path("set.json").write_text(json.dumps(small_set()))
    name, paragraphs = squad.read_squad(Path("set.json"))
    assert name == "set" and [p.group_id for p in paragraphs] == ["T0#0", "T1#0"] and [p.article for p in paragraphs] == [0, 1]
    assert paragraphs[1].questions == [("q1", "What is fact 1?", ["plain"])]


def test_hub_rows_become_the_same_paragraphs(monkeypatch):
    """The Hub's flat table and the JSON file are two forms of one set."""
    rows = [{"title": article["title"], "context": paragraph["context"], "id": qa["id"], "question": qa["question"],
             "answers": {key: [answer[key] for answer in qa["answers"]] for key in ("text", "answer_start")}}
            for article in json.loads(OURS.read_text())["data"] for paragraph in article["paragraphs"] for qa in paragraph["qas"]]
    monkeypatch.setattr(squad, "hub_unreachable", lambda: False)
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=lambda name, split: rows))
    assert squad.read_squad(None) == ("squad", squad.read_squad(OURS)[1])


def test_offline_default_is_said_aloud(capsys):
    assert squad.read_squad(None) == squad.read_squad(OURS)
    assert "squad_cognito.json" in capsys.readouterr().out


def test_no_paragraph_gives_a_second_question_before_all_gave_a_first(paragraphs):
    drawn = squad.draw(paragraphs, 150, 0, "ours")
    assert len({name for _, (name, *_) in drawn}) == 150
    assert set(Counter(paragraph.group_id for paragraph, _ in drawn[:60]).values()) == {1}
    assert squad.draw(paragraphs, 15, 0, "ours") == drawn[:15] != squad.draw(paragraphs, 15, 1, "ours")
    with pytest.raises(squad.Refusal, match="177 .* 176"):
        squad.draw(paragraphs, 177, 0, "ours")


@pytest.mark.parametrize("filler", ["squad", "noise"])
@pytest.mark.parametrize("order, trim", [("original", None), ("bm25", None), ("edges", None), ("bm25", 5), ("original", 3)])
def test_cases(paragraphs, tokenizer, filler, order, trim):
    """The paragraph stands whole in one passage among filler of other articles, at its depth; the length is kept."""
    args = squad.Args(**CPU, filler=filler, context_order=order, context_trim=trim)
    by_text = {paragraph.text: paragraph for paragraph in paragraphs}
    for i, drawn in enumerate(squad.draw(paragraphs, 6, 0, "ours")):
        case = squad.make_question(args, tokenizer, paragraphs, drawn, LENGTH, i)
        paragraph, (name, question, answers) = drawn
        assert (case.group_id, case.question, case.answers) == (paragraph.group_id, question, answers) and name in case.case_id
        (gold,) = case.gold
        texts = [text.strip() for text in case.passages.values()]
        if filler == "squad":
            whole = [by_text[text].article for text in texts if text in by_text]
            assert whole.count(paragraph.article) == (gold in case.passages) and len(whole) >= len(texts) - 1
        if trim is None:
            n_tokens = [len(case.prompt(tokenizer, repeat).input_ids) + args.max_new_tokens for repeat in (False, True)]
            assert 0.98 * LENGTH <= n_tokens[0] < n_tokens[1] <= LENGTH
            assert case.passages[gold].strip() == paragraph.text
        else:
            assert len(texts) == trim
        if order == "original" and trim is None:
            at = list(case.passages).index(gold)
            assert abs(at / max(len(texts) - 1, 1) - i * squad.GOLDEN % 1) < 1 / len(texts)


def test_depths_are_spread_whatever_n():
    for n in (15, 60):
        depths = sorted(i * squad.GOLDEN % 1 for i in range(n))
        assert max(b - a for a, b in zip([0, *depths], [*depths, 1])) < 2.7 / n


def test_all_configurations(capsys):
    """Rows by the contract; the paragraph's share is 1 without eviction, 0 or 1 in L3, between in L4."""
    assert evaluate(config="all") == 0
    paths = [f"results/squad/tiny/L{i}-squad_cognito.jsonl" for i in range(1, 6)]
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["files"] == paths
    rows = {Path(path).name[:2]: read(path)[0] for path in paths}
    assert len({row["case_id"] for row in rows.values()}) == 1
    for name, row in rows.items():
        assert not [key for key in squad.CONTRACT if row[key] is None and key != "error"] and row["task"] == "squad"
        assert row["haystack"] == "squad_cognito" and row["group_id"].count("#") == 1 and row["prediction"] == row["text"].strip().split("\n")[0].strip()
        assert row["gold_kept"] == (row["gold_share"] == 1) and row["question_aware"]
        assert "context" not in row and len(json.dumps(row)) < 4000  # no paragraph text
    assert all(rows[name]["gold_share"] == 1 for name in ("L1", "L2", "L5"))
    assert rows["L3"]["gold_share"] in (0, 1) and 0 < rows["L4"]["gold_share"] < 1
    assert rows["L3"]["kv_bytes_decode"] <= 0.45 * rows["L2"]["kv_bytes_decode"]
    assert rows["L5"]["n_prompt_tokens"] > rows["L2"]["n_prompt_tokens"] == rows["L3"]["n_prompt_tokens"]


def test_a_larger_n_goes_on_with_the_same_file():
    assert evaluate(config="L2", n=2) == 0
    first = Path("results/squad/tiny/L2-squad_cognito.jsonl").read_bytes()
    assert evaluate(config="L2", n=3) == 0
    assert Path("results/squad/tiny/L2-squad_cognito.jsonl").read_bytes().startswith(first)
    assert len(read("results/squad/tiny/L2-squad_cognito.jsonl")) == 3


def test_a_trimmed_paragraph_is_said_to_be_gone(monkeypatch):
    """Its entries never were in the cache."""
    monkeypatch.setattr(squad, "arrange", lambda texts, question, args: {
        f"passage-{i}": text for i, text in enumerate(texts) if len(texts) - i < 3})
    assert evaluate(config="L2", context_trim=2, n=1) == 0
    row = read("results/squad/tiny/L2-squad_cognito-trim2.jsonl")[0]
    assert row["gold_kept"] is False and row["gold_share"] == 0 and row["question_aware"] and row["error"] is None


@pytest.mark.parametrize("given, said", [
    (dict(filler="lorem"), "--filler lorem"), (dict(squad=Path("none.json")), "none.json"), (dict(n=1000), "--n 1000"),
    (dict(lengths=(300,)), "300"), (dict(lengths=(30_000_000,)), "30000000"), (dict(context_order="random"), "--context-order random"),
    (dict(context_trim=0), "--context-trim 0"), (dict(kv_budget="12"), "reserved"), (dict(config="L8"), "L8"),
])
def test_bad_usage(monkeypatch, capsys, given, said):
    monkeypatch.setattr(squad, "load_model", lambda *args: pytest.fail("weights were loaded"))
    monkeypatch.setattr(squad, "load_embedder", lambda name: None)
    capsys.readouterr()
    assert evaluate(**given) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and said in error
