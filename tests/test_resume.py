"""Killed at any point and run again, an evaluation's file is the one of an unbroken run; the committed files are resumed too."""

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import eval_niah as niah
import eval_squad as squad
import eval_stress as stress
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
def test_torn_files(unbroken, tmp_path, place):
    """What any crash may leave of the file; only the missing cases run, and the whole rows stay as they were."""
    whole = unbroken.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    n_bytes, n_whole = {"nothing": (0, 0), "in the first row": (17, 0), "after a row": (ends[2], 3),
                        "before a row's newline": (ends[3] - 1, 3), "in the last row": (ends[4] + 500, 5)}[place]
    path = tmp_path / "out.jsonl"
    path.write_bytes(whole[:n_bytes])
    ran = []

    class Telling(niah.NeedleRun):
        def rank(self, name, case):
            ran.append(case.case_id)
            return super().rank(name, case)

    assert niah.main(niah.Args(**ARGS, n=6, out=path), Telling) == 0
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


SCRIPTS = {"niah": (niah, niah.NeedleRun), "squad": (squad, squad.EvalRun), "stress": (stress, stress.EvalRun)}
RESULTS = ROOT / "results"
COMMITTED = [path.relative_to(RESULTS) for task in SCRIPTS for folder in ("smollm2", "smollm2/ablation")
             for path in sorted((RESULTS / task / folder).glob("*.jsonl"))
             if not path.name.endswith(".trace.jsonl") and "dev-v1.1" not in path.name]  # that set is not ours to ship


def flags_of(rows: list[dict]) -> dict:
    """The flags of the run that wrote these rows, read off them; a threshold is the surrogates' own."""
    row = rows[0]
    lengths = tuple(sorted({row["context_length"] for row in rows}))
    given = {name: row[name] for name in ("model", "device", "dtype", "quant")}
    given |= {"reranker": "none", "lengths": lengths, "n": len(rows) // len(lengths)}
    given |= {"squad": ROOT / "data" / f"{row['haystack']}.json"} if row["task"] == "squad" else {"haystack": row["haystack"]}
    names = ("config", "seed", "kv_budget", "evict_at", "positions", "scorer", "keep", "pooled", "window", "prune_at")
    return given | {name: row[name] for name in names if row.get(name) is not None}


@pytest.fixture(scope="module")
def smollm2_config():
    return niah.load_config("smollm2")


@pytest.fixture
def light(monkeypatch, tmp_path, smollm2_config, smollm2_tokenizer):
    """The scripts in an empty folder, with SmolLM2's configuration and tokenizer at hand; no weights are to be loaded."""
    monkeypatch.chdir(tmp_path)
    for script, _ in SCRIPTS.values():
        monkeypatch.setattr(script, "load_config", lambda name: smollm2_config)
        monkeypatch.setattr(script, "load_tokenizer", lambda name: smollm2_tokenizer)
        monkeypatch.setattr(script, "load_embedder", lambda name: None)
        monkeypatch.setattr(script, "load_model", lambda *args: pytest.fail("weights were loaded"))


def put(path: Path) -> list[dict]:
    """A copy of a committed file in its place below this folder; its rows. Python's help topics differ with its version."""
    path = "results" / path
    path.parent.mkdir(parents=True)
    shutil.copyfile(ROOT / path, path)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    versions = [version.split(".")[:2] for version in (rows[0]["versions"]["python"], platform.python_version())]
    if rows[0]["haystack"] == "prose" and versions[0] != versions[1]:
        pytest.skip("another Python's help topics")
    return rows


def test_there_are_committed_files():
    assert len(COMMITTED) > 80 and {path.parts[0] for path in COMMITTED} == set(SCRIPTS)


@pytest.mark.parametrize("path", COMMITTED, ids=str)
def test_committed_rows_have_the_hash_of_their_settings(light, monkeypatch, path):
    """The run that a file's rows tell of takes the file as its own, and finds it by its name where it was not given one."""
    script, Run = SCRIPTS[path.parts[0]]

    class Without(Run):
        """No cases are made: they are no setting."""

        def open(self, cases, *given):
            super().open([], *given)

    for make in ("make_needles", "make_question"):
        monkeypatch.setattr(script, make, lambda *args: [], raising=False)
    rows = put(path)
    out = {"out": "results" / path} if "ablation" in path.parts else {}
    assert script.main(script.Args(**flags_of(rows), **out), Without) == 0
    assert [found for found in Path().rglob("*") if found.is_file()] == ["results" / path]


@pytest.mark.parametrize("path, lengths", [("niah/smollm2/L2.jsonl", (4096,)), ("squad/smollm2/L4-squad_cognito.jsonl", (8192,))])
def test_committed_cases_are_done(light, capsys, path, lengths):
    """The very cases are made again, so that nothing of them is left to run."""
    rows = put(Path(path))
    script, Run = SCRIPTS[Path(path).parts[0]]
    assert script.main(script.Args(**flags_of(rows) | {"lengths": lengths}), Run) == 0
    cells = json.loads(capsys.readouterr().out.splitlines()[-1])["cells"]
    rows = [row for row in rows if row["context_length"] in lengths]
    assert [(cell["n"], cell["exact"]) for cell in cells] == [(len(rows), sum(row["em"] for row in rows))]
