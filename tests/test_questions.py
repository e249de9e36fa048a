"""The benchmark of many questions about one text: what is hidden, what each arm reads and holds, and what its rows say."""

import itertools
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import bootstrap
import cognito_run as core
import eval_niah as niah
import pytest
import torch
from conftest import ROOT
from test_session import BagOfWords

sys.path.insert(0, str(ROOT / "benchmarks"))

import questions  # noqa: E402

N = 4
ARGS = questions.Args(model="tiny", device="cpu", n=N, lengths=(2400,), max_new_tokens=6)
MEASURED = {"ttft_s", "retrieval_s", "itl_ms_mean", "peak_memory_bytes", "memory_kind", "created"}
ENTRY_BYTES = core.entry_bytes(core.load_config("tiny"), torch.float32)


@pytest.fixture(autouse=True)
def light(monkeypatch):
    monkeypatch.setattr(core, "load_embedder", lambda name: BagOfWords())


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def said(rows: list[dict]) -> list[dict]:
    return [{key: value for key, value in row.items() if key not in MEASURED} for row in rows]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The folder of a run of all arms, and what its last line said."""
    folder = tmp_path_factory.mktemp("results") / "questions" / "tiny"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "load_embedder", lambda name: BagOfWords())
        printed = []
        patch.setattr("builtins.print", lambda *text, **_: printed.extend(text))
        assert questions.main(replace(ARGS, dtype="float32", out=folder, plot=True)) == 0
    return folder, json.loads(printed[-1])


@pytest.fixture(scope="module")
def haystack():
    return questions.make_haystack(ARGS, core.load_tokenizer("tiny"), niah.cut_sentences(niah.read_haystack("prose")), 0, 2400)


@pytest.fixture(scope="module")
def lm():
    config = core.load_config("tiny")
    config.initializer_range = 0.2
    return core.load_model(core.resolve_runtime("tiny", "cpu", "float32", "none"), config, core.load_tokenizer("tiny"))


def test_what_is_hidden(smollm2_tokenizer):
    """Twenty numbers a text, each said once and in one passage, evenly spread; two texts with no prose in common."""
    sentences = niah.cut_sentences(niah.read_haystack("prose"))
    args, seen = questions.Args(), []
    for length in args.lengths:
        one = questions.make_haystack(args, smollm2_tokenizer, sentences, 0, length)
        assert abs(len(core.tokenise(smollm2_tokenizer, one.text)[0]) / length - 1) < 0.02
        assert "".join(one.passages.values()).split() == one.text.split()
        assert len({needle.question for needle in one.needles}) == len({needle.value for needle in one.needles}) == args.n == 20
        for needle in one.needles:
            sentence = f"Please note that the registration number of {needle.key} is: {needle.value}."
            assert needle.question == f"What is the registration number of {needle.key}?"
            assert one.text.count(sentence) == one.text.count(needle.value) == 1
            assert sum(sentence in text for text in one.passages.values()) == 1
            assert abs(one.text.index(sentence) / len(one.text) - needle.depth_percent / 100) < 0.1  # a table has no sentence end
        depths = [needle.depth_percent for needle in one.needles]
        assert depths != sorted(depths) and sorted(depths) == pytest.approx([100 * i / 19 for i in range(20)])
        seen.append({line for line in one.text.splitlines() if len(line) > 40 and "registration" not in line})
    assert min(map(len, seen)) > 50 and not seen[0] & seen[1]


def test_what_each_arm_reads_and_holds(ran, haystack):
    folder, _ = ran
    rows = {path.stem: rows_of(path) for path in folder.glob("*.jsonl")}
    assert rows.keys() == questions.ARMS.keys()
    n_text = len(core.tokenise(core.load_tokenizer("tiny"), haystack.text)[0])
    beside = [len(core.ask_prompt(core.load_tokenizer("tiny"), {}, needle.question, core.CONFIGS["L2"]).input_ids)
              for needle in haystack.needles]
    for name, own in rows.items():
        assert not any(niah.row_fault(row) or row.keys() - niah.SCHEMA.keys() for row in own)
        assert [(row["case_id"], row["question"], row["answers"]) for row in own] == [
            (needle.case_id, needle.question, [needle.value]) for needle in haystack.needles]
        assert all(row["ttft_s"] > row["retrieval_s"] for row in own)
        assert {row["retriever"] is None for row in own} == {row["kv_budget"] is None for row in own} == {"budget" not in name}
        if name.startswith(("rag", "reread")):  # reads all that it sees, for every question
            assert all(row["n_seen"] - row["n_read"] in range(ARGS.max_new_tokens) for row in own)
        else:
            assert own[0]["n_read"] > n_text and all(row["n_read"] < max(beside) + 3 * 250 for row in own[1:])
    for name in ("L2", "history", "reread"):
        assert all(row["needle_kept"] and row["evictions"] == 0 and not row["question_aware"] for row in rows[name])
    assert all(row["n_read"] < n for row, n in zip(rows["L2"][1:], beside[1:]))
    assert all(row["n_read"] > n_text for row in rows["reread"]) and all(row["retrieval_s"] == 0 for row in rows["reread"])
    growth = [row["n_seen"] - row["n_read"] for row in rows["history"][1:]], [row["n_read"] for row in rows["history"][1:]]
    assert max(growth[0]) - min(growth[0]) < ARGS.max_new_tokens and all(a < b for a, b in itertools.pairwise(growth[1]))
    for budget, positions in itertools.product(questions.BUDGETS, ("", "-rebased", "-ranked")):
        rag = f"rag-budget{budget}{positions.replace('-rebased', '')}"
        for row, rag, n in zip(rows[f"L3-budget{budget}{positions}"], rows[rag], beside):
            assert row.get("positions") == (positions[1:] or None)
            room = float(budget) * n_text + n + ARGS.max_new_tokens
            assert row["kv_budget"] == rag["kv_budget"] == budget and row["question_aware"] and rag["question_aware"]
            assert rag["n_read"] <= room and rag["kv_bytes_decode"] <= room * ENTRY_BYTES
            assert row["kv_bytes_decode"] <= 1.1 * (room + core.ROOM) * ENTRY_BYTES and row["evictions"] > 0
            assert rag["n_read"] > room - 200 - 2 * ARGS.max_new_tokens  # as many as fit


def test_the_table_is_that_of_the_rows(ran):
    folder, last = ran
    for name, cell in last["arms"].items():
        rows = rows_of(folder / f"{name}.jsonl")
        times = sorted(row["ttft_s"] for row in rows)
        assert cell["n"] == N and cell["failed"] == 0 and cell["right"] == sum(row["em"] for row in rows)
        assert cell["ttft_s"] == pytest.approx((times[1] + times[2]) / 2) and cell["ttft_s_mean"] == pytest.approx(sum(times) / N)
    ratio = last["arms"]["L3-budget0.2"]["ttft_s"] / last["arms"]["rag-budget0.2"]["ttft_s"]
    assert last["arms"]["L3-budget0.2"]["ttft_ratio"] == pytest.approx(ratio)
    assert (folder / "questions.png").read_bytes().startswith(b"\x89PNG")
    assert set(last["written"]) == {str(path) for path in folder.iterdir()}


def test_a_run_that_was_killed_goes_on_where_it_stopped(ran, tmp_path):
    """Pages and exchanges are what they would have been, and the rows that were there stay."""
    folder, _ = ran
    arms = ("L3-budget0.4", "history", "rag-budget0.2")
    for name in arms:
        lines = (folder / f"{name}.jsonl").read_bytes().splitlines(keepends=True)
        (tmp_path / f"{name}.jsonl").write_bytes(b"".join(lines[:2]) + lines[2][:40])
    assert questions.main(replace(ARGS, dtype="float32", out=tmp_path, arms=arms)) == 0
    for name in arms:
        before, after = rows_of(folder / f"{name}.jsonl"), rows_of(tmp_path / f"{name}.jsonl")
        assert after[:2] == before[:2] and after[2]["ttft_s"] != before[2]["ttft_s"]
        replayed = [row | {"n_read": None, "kv_bytes_peak": None} for row in said(after)]
        assert replayed == [row | {"n_read": None, "kv_bytes_peak": None} for row in said(before)]
    with pytest.raises(niah.Refusal, match="other settings"):
        questions.main(replace(ARGS, dtype="float32", out=tmp_path, arms=arms, n=3))


def test_a_file_gains_other_seeds(ran, tmp_path):
    """Their texts and questions are others; what was there stays."""
    folder, arm = ran[0], ("rag-budget0.2",)
    (tmp_path / "rag-budget0.2.jsonl").write_bytes((folder / "rag-budget0.2.jsonl").read_bytes())
    assert questions.main(replace(ARGS, dtype="float32", out=tmp_path, arms=arm, seeds=(1,))) == 0
    rows = rows_of(tmp_path / "rag-budget0.2.jsonl")
    assert rows[:N] == rows_of(folder / "rag-budget0.2.jsonl") and [row["seed"] for row in rows] == [0] * N + [1] * N
    assert len({row["case_id"] for row in rows}) == len({row["answers"][0] for row in rows}) == 2 * N


def test_bootstrap_reads_the_rows(ran, capsys):
    """Where their folder is named, question by question; elsewhere they do not crowd the main tables."""
    folder, _ = ran
    assert bootstrap.main(bootstrap.Args((folder.parent,), compare=("L3-budget0.2", "rag-budget0.2"))) == 0
    (one,) = json.loads(capsys.readouterr().out.splitlines()[-1])["comparisons"]
    assert one["n_pairs"] == one["n_groups"] == N and one["obstacle"] is None and one["haystack"] == "prose"
    with pytest.raises(bootstrap.Refusal, match="no record"):
        bootstrap.main(bootstrap.Args((folder.parents[1],)))


@pytest.mark.parametrize("positions", ["absolute", "ranked"])
def test_rag_answers_from_the_best_passages_alone(lm, haystack, positions):
    """Chosen and decoded by a naive reference, which reads the whole prompt for every token."""
    retriever = core.HybridRetriever(list(haystack.passages.values()), BagOfWords())
    args = core.Args(config="L1", kv_budget="0.2", max_new_tokens=6, positions=positions)
    for needle in haystack.needles[:2]:
        best = sorted(zip(retriever.rank(needle.question), haystack.passages.items()), key=lambda pair: -pair[0])
        kept, budget = [], 0.2 * sum(map(len, haystack.passages.values()))  # a token per character here
        for _, (name, text) in best:
            if sum(map(len, kept)) + len(text) > budget:
                break
            kept.append(text)
        ordered = kept[::-1] if positions == "ranked" else [text for text in haystack.passages.values() if text in kept]
        content = core.INSTRUCTION + "".join(ordered)
        content += core.QUESTION.format(question=needle.question)
        rendered = core.render_chat(lm.tokenizer, [{"role": "user", "content": content}])
        tokens, answer = lm.tokenizer(rendered, add_special_tokens=False)["input_ids"], []
        while len(answer) < 6 and not lm.eos_ids & set(answer):
            answer.append(int(lm.model(input_ids=torch.tensor([tokens + answer])).logits[0, -1].argmax()))
        reader = questions.Anew(args, lm, haystack.passages, retriever)
        with core.attention(lm.model, stock=True):
            facts = reader.ask(needle.question, lambda piece: None, None)
        assert facts["n_read"] == len(tokens)
        assert facts["answer"] == lm.tokenizer.decode(answer, skip_special_tokens=True).strip()


class Scripted:
    """A reader that thinks, says its answer in two pieces, and saw all passages but some."""

    config = core.CONFIGS["L2"]

    def __init__(self, answer: str, evicted: list[str], haystack, pauses=(0.0, 0.0)):
        self.answer, self.evicted, self.haystack, self.pauses = answer, evicted, haystack, pauses

    def ask(self, question, on_text, trace):
        for pause, piece in zip(self.pauses, (self.answer[:3], self.answer[3:])):
            time.sleep(pause)
            on_text(piece)
        counts = dict.fromkeys(("n_seen", "n_read", "kv_bytes_full", "kv_bytes_peak", "kv_bytes_decode"), 1)
        states = [{"passage": name, "state": "evicted" if name in self.evicted else "paged in"}
                  for name in self.haystack.passages]
        return counts | {"answer": self.answer, "finish_reason": "stop", "compression_ratio": 0.5, "itl_ms_mean": None,
                         "passages": states}


@pytest.mark.parametrize("form, right", [
    ("The registration number is {}.", 1), ("{}", 1), ("It is 1{}.", 0), ("I do not know.", 0), ("Either 4 or {}.", 0)])
def test_what_a_row_says_of_an_answer(lm, haystack, form, right):
    needle = haystack.needles[0]
    (holder,) = [name for name, text in haystack.passages.items() if needle.value in text]
    retriever = questions.TimedRetriever(list(haystack.passages.values()), BagOfWords())
    for evicted in ([], [holder]):
        reader = Scripted(form.format(needle.value), evicted, haystack)
        row = questions.put(reader, needle, haystack, retriever, lm)
        assert row["em"] == right and row["text"] == reader.answer
        assert row["needle_kept"] == (not evicted) and row["evictions"] == len(evicted)


def test_seconds_count_from_the_question_to_the_first_piece(lm, haystack):
    class Slow(BagOfWords):
        def encode(self, texts, **kwargs):
            time.sleep(0.02)
            return super().encode(texts, **kwargs)

    retriever = questions.TimedRetriever(list(haystack.passages.values()), Slow())
    reader = Scripted("42", [], haystack, pauses=(0.03, 0.05))
    reader.ask = lambda *given: retriever.rank(given[0]) is not None and Scripted.ask(reader, *given)
    for _ in range(2):  # the second question's seconds are its own
        begin = time.perf_counter()
        row = questions.put(reader, haystack.needles[0], haystack, retriever, lm)
        assert 0.02 <= row["retrieval_s"] <= row["ttft_s"] - 0.03
        assert row["ttft_s"] <= time.perf_counter() - begin - 0.05


def test_the_picture_has_a_point_for_each_arm():
    cells = {name: {"n": 40, "failed": 0, "right": 4 + i, "ttft_s": 0.1 * (i + 1), "kv_bytes_decode": i * 2**20}
             for i, name in enumerate(questions.ARMS)}
    (axis,) = questions.draw(cells, "title").axes
    points = {container.get_label(): list(zip(*container.lines[0].get_data())) for container in axis.containers}
    assert points.keys() == {"L2", "L3", "L3-rebased", "L3-ranked", "history", "rag", "rag-ranked", "reread"}
    for kind, own in (("L3", (1, 2, 3)), ("L3-rebased", (4, 5, 6)), ("L3-ranked", (7, 8, 9))):
        assert points[kind] == [pytest.approx((0.1 * (i + 1), 4 + i)) for i in own]
    assert [text.get_text() for text in axis.texts] == [f"{i} MiB" for i in range(18)]


def test_a_question_that_fails_is_a_row(tmp_path, monkeypatch, capsys):
    ask, calls = questions.Anew.ask, []

    def fail_once(self, *given):
        calls.append(given)
        if len(calls) == 2:
            raise MemoryError("too much")
        return ask(self, *given)

    monkeypatch.setattr(questions.Anew, "ask", fail_once)
    args = replace(ARGS, out=tmp_path, arms=("rag-budget0.2",))
    assert questions.main(args) == 1
    assert [row["error"] for row in rows_of(tmp_path / "rag-budget0.2.jsonl")] == [
        None, "out of memory: MemoryError: too much", None, None]
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["failed"] == 1
    assert questions.main(args) == 0 and len(calls) == N + 1


@pytest.mark.parametrize("given, words", [
    (dict(arms=("L2", "L9")), "--arms L9 is unknown"), (dict(arms=()), "name an arm"), (dict(n=0), "--n 0 is too small"),
    (dict(n=145), "more than the 144"), (dict(n=40), "more than half"), (dict(lengths=(1999,)), "at least 2000"),
    (dict(lengths=(512,), arms=("L2",)), "at least 513"),
])
def test_refusals(given, words, tmp_path):
    with pytest.raises(core.Refusal, match=words):
        questions.main(replace(ARGS, out=tmp_path, **given))
