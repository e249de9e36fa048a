"""The JSONL file of a run: killed anywhere and run again, it is the file of an unbroken run."""

import json
import math

import bootstrap
import eval_niah
import eval_squad
import eval_stress
import pytest
from eval_niah import RecordFile, Refusal

SETTINGS = {"config": "L3", "seed": 0}
CASES = [f"case-{i}" for i in range(5)]


def row(case_id: str, error: str | None = None) -> dict:
    return {"case_id": case_id, "prediction": f"é\u2028 \"\\\n🙂 {case_id}" if error is None else None, "em": 1 / 3, "error": error}


def run(path, fails=(), settings=SETTINGS, fresh=False) -> list[str]:
    """What a script does: every case that is not done, in order; returns those that were run."""
    file = RecordFile(path, settings, fresh)
    todo = [case for case in CASES if not file.is_done(case)]
    for case in todo:
        file.write(row(case, "MemoryError: out" if case in fails else None))
    return todo


def rows(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "results" / "L3.jsonl"


def test_rows_are_written_once_and_skipped_after(path):
    assert run(path) == CASES
    unbroken = path.read_bytes()
    assert unbroken.endswith(b"\n") and unbroken.count(b"\n") == 5
    written = rows(path)
    settings_hash = written[0].pop("settings_hash")
    assert written[0] == row("case-0") and len(settings_hash) == 16
    assert run(path) == [] and path.read_bytes() == unbroken


def test_each_row_is_on_disk_when_write_returns(path):
    file = RecordFile(path, SETTINGS, False)
    for n, case in enumerate(CASES, 1):
        file.write(row(case))
        assert [r["case_id"] for r in rows(path)] == CASES[:n]


def test_failed_cases_are_run_again_in_their_place(path, tmp_path):
    run(path, fails=("case-1", "case-4"))
    assert [r["error"] is None for r in rows(path)] == [True, False, True, True, False]
    assert run(path, fails=("case-1",)) == ["case-1", "case-4"]
    assert [r["error"] is None for r in rows(path)] == [True, False, True, True, True]
    assert run(path) == ["case-1"]
    run(tmp_path / "unbroken.jsonl")
    assert path.read_bytes() == (tmp_path / "unbroken.jsonl").read_bytes()


def test_a_file_cut_at_any_byte_is_made_whole(path, monkeypatch):
    """At every offset of the third and of the last line, both ends included."""
    monkeypatch.setattr("os.fsync", lambda fd: None)  # a thousand waits for the disk
    run(path)
    unbroken = path.read_bytes()
    lines = unbroken.splitlines(keepends=True)
    for whole in (2, 4):
        start = len(b"".join(lines[:whole]))
        for cut in range(start, start + len(lines[whole]) + 1):
            path.write_bytes(unbroken[:cut])
            assert run(path) == CASES[whole + (cut == start + len(lines[whole])) :]
            assert path.read_bytes() == unbroken


def test_killed_before_the_first_row_is_whole(path):
    run(path)
    unbroken = path.read_bytes()
    for cut in (0, 1, unbroken.index(b"\n")):
        path.write_bytes(unbroken[:cut])
        assert run(path) == CASES and path.read_bytes() == unbroken


def test_killed_while_replacing_a_row(path, monkeypatch):
    """The old file stands until the new one is complete, and a draft left behind does no harm."""
    run(path, fails=("case-2",))
    before = path.read_bytes()
    file = RecordFile(path, SETTINGS, False)
    with monkeypatch.context() as patch:
        patch.setattr(type(path), "replace", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            file.write(row("case-2"))
    assert path.read_bytes() == before
    assert run(path) == ["case-2"]
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_other_settings_are_refused(path):
    run(path)
    before = path.read_bytes()
    with pytest.raises(Refusal, match="line 1 .*other settings") as refusal:
        run(path, settings={**SETTINGS, "seed": 1})
    assert str(path) in str(refusal.value)
    assert path.read_bytes() == before
    assert run(path, settings=dict(reversed(SETTINGS.items()))) == []


def test_one_foreign_row_is_refused_with_its_line(path, tmp_path):
    run(path)
    run(tmp_path / "other.jsonl", settings={"seed": 7})
    lines, foreign = path.read_bytes().splitlines(keepends=True), (tmp_path / "other.jsonl").read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], foreign[3], *lines[4:]]))
    with pytest.raises(Refusal, match="line 4 .*other settings"):
        run(path)


@pytest.mark.parametrize("line", [
    b"garbage", b" ", b"[]", b"null", b'"text"', b"7", b"{}", b'{"case_id": "case-1"}', b'{"case_id": ', b"\xff\xfe\x00",
])
@pytest.mark.parametrize("number", [1, 3, 6])
def test_garbage_is_refused_and_left_alone(path, line, number):
    run(path)
    lines = path.read_bytes().splitlines(keepends=True)
    lines.insert(number - 1, line + b"\n")
    path.write_bytes(b"".join(lines))
    with pytest.raises(Refusal, match=f"line {number} ") as refusal:
        run(path)
    assert str(path) in str(refusal.value)
    assert path.read_bytes() == b"".join(lines)


@pytest.mark.parametrize("content", [b"", b"garbage\n", b"half a li"])
def test_fresh_starts_anew(path, tmp_path, content):
    run(tmp_path / "unbroken.jsonl")
    path.parent.mkdir()
    path.write_bytes(content)
    assert run(path, fresh=True) == CASES
    assert run(path, fresh=True) == CASES
    assert path.read_bytes() == (tmp_path / "unbroken.jsonl").read_bytes()


def test_unwritable_path_is_refused(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file" / "L3.jsonl", tmp_path / ("x" * 300)):
        with pytest.raises(Refusal, match="cannot write"):
            RecordFile(path, SETTINGS, False)


def test_fields():
    """The contract with whoever reads the files."""
    assert list(eval_niah.CONTRACT) == [
        "task", "config", "model", "case_id", "group_id", "seed", "haystack", "context_length", "depth_percent", "n_prompt_tokens",
        "n_new_tokens", "answers", "prediction", "em", "f1", "question_aware", "compression_ratio", "kv_bytes_full", "kv_bytes_peak",
        "kv_bytes_decode", "peak_memory_bytes", "memory_kind", "ttft_s", "prefill_tokens_per_s", "itl_ms_mean", "itl_ms_p95",
        "evictions", "finish_reason", "error", "device", "dtype", "quant", "threads", "versions", "script_sha256", "settings_hash",
        "created",
    ]


@pytest.mark.parametrize("reader", [bootstrap, eval_squad, eval_stress])
def test_who_writes_and_who_reads_have_one_schema(reader):
    assert reader.SCHEMA == eval_niah.SCHEMA and list(reader.CONTRACT) == list(eval_niah.CONTRACT)
    assert reader.KINDS.keys() == eval_niah.KINDS.keys()
    assert {kind.removesuffix("?") for kind in reader.SCHEMA.values()} == reader.KINDS.keys()


FACTS = dict(task="niah", config="L3", model="tiny", case_id="a", context_length=4096, answers=["7"], em=1.0, device="cpu",
             dtype="float32")


def test_a_row_says_null_of_what_is_not_known():
    made = eval_niah.make_row(**FACTS, cuts=3)
    assert made == dict.fromkeys(eval_niah.CONTRACT) | FACTS | {"cuts": 3} and eval_niah.row_fault(made) is None
    assert list(made)[: len(eval_niah.CONTRACT)] == list(eval_niah.CONTRACT)


@pytest.mark.parametrize("facts, said", [
    ({"colour": "red"}, "unknown fields colour"), ({"zeal": 1, "colour": None}, "unknown fields colour, zeal"),
    ({"task": None}, "task is None, expected a text that is not empty$"), ({"task": ""}, "task is ''"),
    ({"config": 3}, "config is 3"), ({"device": None}, "device is None"),
    ({"context_length": 4096.0}, "context_length is 4096.0"), ({"context_length": True}, "context_length is True"),
    ({"context_length": -1}, "context_length is -1"), ({"context_length": None}, "context_length is None"),
    ({"answers": []}, r"answers is \[\]"), ({"answers": "7"}, "answers is '7'"), ({"answers": [7]}, r"answers is \[7\]"),
    ({"em": None}, "em is None, expected 0 or 1"), ({"em": 0.5}, "em is 0.5, expected 0 or 1"), ({"em": 2}, "em is 2"),
    ({"em": math.nan}, "em is nan"), ({"f1": 1.5}, "f1 is 1.5, expected a number from 0 to 1 or null"),
    ({"question_aware": 1}, "question_aware is 1, expected true or false"), ({"depth_percent": 101}, "depth_percent is 101"),
    ({"ttft_s": math.nan}, "ttft_s is nan"), ({"ttft_s": math.inf}, "ttft_s is inf"), ({"ttft_s": False}, "ttft_s is False"),
    ({"ttft_s": "fast"}, "ttft_s is 'fast', expected a finite number or null"), ({"versions": []}, r"versions is \[\]"),
    ({"kv_budget": 0.4}, "kv_budget is 0.4"), ({"keep": 40}, "keep is 40"), ({"evicted_segments": -2}, "evicted_segments is -2"),
    ({"think_truncated": "no"}, "think_truncated is 'no'"),
])
def test_a_row_of_another_kind_is_refused(facts, said):
    """An unknown field, or a value that its field may not hold: said with what is expected."""
    with pytest.raises(ValueError, match=said):
        eval_niah.make_row(**FACTS | facts)


@pytest.mark.parametrize("field", eval_niah.CONTRACT)
def test_a_row_that_lacks_a_field_is_faulty(field):
    made = eval_niah.make_row(**FACTS)
    del made[field]
    assert eval_niah.row_fault(made) == f"lacks {field}"


def test_a_failed_row_needs_no_score_and_a_reader_passes_over_unknown_fields():
    failed = eval_niah.make_row(**FACTS | {"em": None, "error": "MemoryError: out"})
    assert eval_niah.row_fault(failed) is None and eval_niah.row_fault({**failed, "error": None}).startswith("em is None")
    assert eval_niah.row_fault({**failed, "colour": "red"}) is None
