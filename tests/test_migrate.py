"""tools/migrate_rows.py on small throw-away rows, run as a user runs it: by its command line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parent.parent / "tools" / "migrate_rows.py"
LATER = {"question_aware", "evicted_segments", "cuts", "evicted_entries", "kv_budget", "evict_at"}


def row(config, task="niah", evictions=3, error=None, **more):
    return {"task": task, "config": config, "question_aware": config == "L3", "evictions": evictions, "error": error,
            "em": 1.0, "settings_hash": "ab"} | more


def write(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes("".join(json.dumps(one) + "\n" for one in rows).encode())
    return path


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def migrate(*paths, cwd=None):
    return subprocess.run([sys.executable, TOOL, *paths], cwd=cwd, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("name", "old", "gained"),
    [
        ("L1", row("L1"), {}),
        ("L2-dev-v1.1", row("L2", "squad"), {"question_aware": True}),
        ("L3", row("L3"), {"evicted_segments": 3, "kv_budget": "0.4", "evict_at": "pre-decode"}),
        ("L3-inflight-prose", row("L3"), {"evicted_segments": 3, "kv_budget": "0.4", "evict_at": "chunk"}),
        ("L4-budget0.2", row("L4", "squad"),
         {"question_aware": True, "cuts": 3, "kv_budget": "0.2", "evict_at": "pre-decode"}),
        ("L3-budget4096-inflight", row("L3", evictions=0), {"evicted_segments": 0, "kv_budget": "4096", "evict_at": "chunk"}),
        ("L4", row("L4", evictions=None), {"kv_budget": "0.4", "evict_at": "pre-decode"}),
        ("L4", row("L4", error="out of memory"), {"kv_budget": "0.4", "evict_at": "pre-decode"}),
        ("L6-tau-4", row("L6"), {"evicted_entries": 3}),
        ("L6", row("L6", error="out of memory"), {}),
        ("knorm", row("kvpress-knorm"), {}),
        ("mine", row("L3", kv_budget="0.1", evict_at="chunk", evicted_segments=2), {}),  # the row knows better than its name
    ],
)
def test_what_a_row_gains(tmp_path, name, old, gained):
    path = write(tmp_path / f"{name}.jsonl", old)
    assert migrate(path).stdout == f"{int(bool(gained))} of 1 rows in 1 files changed\n"
    (new,) = read(path)
    assert new == old | gained
    assert list(new)[: len(old)] == list(old)  # new fields stand at the end
    assert {field for field in old if new[field] != old[field]} <= LATER and new["settings_hash"] == "ab"


def test_a_second_run_changes_nothing(tmp_path):
    folder = tmp_path / "results"
    kept = write(folder / "niah/smollm2/L2.jsonl", row("L2"), row("L2", text="naïve"))
    mixed = write(folder / "squad/smollm2/ablation/L6.jsonl", row("L6", "squad"), row("L6", "squad", question_aware=True))
    unescaped = folder / "squad/smollm2/L2.jsonl"
    unescaped.write_bytes(json.dumps(row("L2", "squad", text="François"), ensure_ascii=False).encode() + b"\n")
    trace = write(folder / "niah/smollm2/L3.trace.jsonl", {"event": "evict"})
    bench = write(folder / "bench/smollm2.jsonl", {"arm": "stock"})
    before = {path: path.read_bytes() for path in (kept, trace, bench)}

    assert migrate(cwd=tmp_path).stdout == "3 of 5 rows in 3 files changed\n"
    assert {path: path.read_bytes() for path in before} == before
    assert [one["evicted_entries"] for one in read(mixed)] == [3, 3]
    assert "François".encode() in unescaped.read_bytes() and b'"question_aware": true' in unescaped.read_bytes()

    after = {path: path.read_bytes() for path in folder.rglob("*.*")}  # no temporary file is left
    assert len(after) == 5
    assert migrate(cwd=tmp_path).stdout == "0 of 5 rows in 3 files changed\n"
    assert {path: path.read_bytes() for path in after} == after


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda text: text[:-20], "L4.jsonl ends within a line; resume the run"),
        (lambda text: text + "{\n", "L4.jsonl:2 holds no valid JSON"),
        (lambda text: text + "[1]\n", "L4.jsonl:2 is no row as the eval scripts write it"),
        (lambda text: text + '{"epoch": 1}\n', "L4.jsonl:2 is no row as the eval scripts write it"),
        (lambda text: text.replace(", ", ","), "L4.jsonl:1 is no row as the eval scripts write it"),
        (lambda text: text.replace("\n", "\r\n"), "L4.jsonl:1 is no row as the eval scripts write it"),
        (lambda text: text.replace("niah", "ni\udcffah"), "L4.jsonl cannot be read"),
    ],
)
def test_a_torn_or_foreign_file_is_refused_and_nothing_is_written(tmp_path, damage, told):
    sound, path = write(tmp_path / "L3.jsonl", row("L3")), write(tmp_path / "L4.jsonl", row("L4"))
    path.write_bytes(damage(path.read_text()).encode("utf-8", "surrogateescape"))
    before = sound.read_bytes(), path.read_bytes()
    result = migrate(tmp_path)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith(str(path)) and told in result.stderr and result.stderr.count("\n") == 1
    assert (sound.read_bytes(), path.read_bytes()) == before


def test_a_path_that_is_missing(tmp_path):
    result = migrate(tmp_path / "nowhere")
    assert result.returncode == 2 and "nowhere does not exist" in result.stderr
