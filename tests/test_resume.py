"""Killed at any point and run again, an evaluation's file is the one of an unbroken run."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import eval_niah as niah
import pytest

ROOT = Path(__file__).parents[1]
ARGS = dict(config="L2", model="tiny", device="cpu", dtype="float32", lengths=(4096,))
SAME = ("case_id", "seed", "depth_percent", "n_prompt_tokens", "n_new_tokens", "answers", "prediction", "text", "em", "f1",
        "kv_bytes_peak", "kv_bytes_decode", "error", "settings_hash")


def facts(path: Path) -> list[list]:
    """Of every row, in order, what does not depend on the clock."""
    return [[row[key] for key in SAME] for row in map(json.loads, path.read_text().splitlines())]


def n_rows(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    path = tmp_path_factory.mktemp("unbroken") / "out.jsonl"
    assert niah.main(niah.Args(**ARGS, n=6, out=path)) == 0
    return path


def test_killed_processes(unbroken, tmp_path):
    """SIGKILL as soon as it speaks, then with one row written, then with three; the fourth start ends it."""
    path = tmp_path / "out.jsonl"
    flags = "--config L2 --model tiny --device cpu --dtype float32 --lengths 4096 --n 6 --out out.jsonl".split()
    start = dict(args=[sys.executable, ROOT / "eval_niah.py", *flags], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                 env={**os.environ, "HF_HUB_OFFLINE": "1"})
    before = 0
    for rows_wanted in (0, 1, 3):
        with subprocess.Popen(**start) as process:
            process.stdout.readline()
            while n_rows(path) < rows_wanted and process.poll() is None:
                time.sleep(0.002)
            process.kill()
        assert process.returncode == -signal.SIGKILL
        assert before <= n_rows(path) < 6
        before = n_rows(path)
        assert facts(path)[:before] == facts(unbroken)[:before] if before else True
    done = subprocess.run(**start, timeout=600)
    assert done.returncode == 0 and json.loads(done.stdout.splitlines()[-1])["cells"][0]["n"] == 6
    assert facts(path) == facts(unbroken)
    assert [p.name for p in tmp_path.iterdir()] == ["out.jsonl"]


@pytest.mark.parametrize("place", ["nothing", "in the first row", "after a row", "before a row's newline", "in the last row"])
def test_torn_files(unbroken, tmp_path, monkeypatch, place):
    """What any crash may leave of the file; only the missing cases run, and the whole rows stay as they were."""
    whole = unbroken.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    n_bytes, n_whole = {"nothing": (0, 0), "in the first row": (17, 0), "after a row": (ends[2], 3),
                        "before a row's newline": (ends[3] - 1, 3), "in the last row": (ends[4] + 500, 5)}[place]
    path = tmp_path / "out.jsonl"
    path.write_bytes(whole[:n_bytes])
    ran, real = [], niah.find_needle
    monkeypatch.setattr(niah, "find_needle", lambda *args: ran.append(args[4].case_id) or real(*args))
    assert niah.main(niah.Args(**ARGS, n=6, out=path)) == 0
    assert facts(path) == facts(unbroken)
    assert ran == [row[0] for row in facts(unbroken)[n_whole:]]
    assert path.read_bytes()[: (ends[n_whole - 1] if n_whole else 0)] == whole[: (ends[n_whole - 1] if n_whole else 0)]


def test_another_length_joins_the_file(unbroken, tmp_path):
    """Lengths are no setting: the file gains the new cases, and the report counts the ones asked for."""
    path = tmp_path / "out.jsonl"
    path.write_bytes(unbroken.read_bytes())
    assert niah.main(niah.Args(**{**ARGS, "lengths": (5000,)}, n=6, out=path)) == 0
    assert facts(path)[:6] == facts(unbroken) and len({row[0] for row in facts(path)}) == len(facts(path)) == 12


def test_fresh_starts_anew(unbroken, tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_bytes(unbroken.read_bytes())
    assert niah.main(niah.Args(**ARGS, n=1, out=path, fresh=True)) == 0
    assert n_rows(path) == 1


@pytest.mark.parametrize("line", ["no json\n", "[1]\n", "{}\n"])
def test_a_line_that_is_no_record_is_refused(tmp_path, line):
    """A whole line that cannot be read is no torn one: nothing of it is thrown away."""
    path = tmp_path / "out.jsonl"
    path.write_text(line)
    with pytest.raises(niah.Refusal, match="line 1"):
        niah.main(niah.Args(**ARGS, n=1, out=path))
    assert path.read_text() == line
