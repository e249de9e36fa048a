"""What a user meets at the command line: bad input in one sentence, runs that finish, records that keep their contract."""

import hashlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import cognito_run as core
import eval_niah as niah
import pytest
import torch

ROOT = Path(__file__).parents[1]
CPU = dict(model="tiny", device="cpu", dtype="float32", quant="none", reranker="none")
LENGTH = 4096  # the tiny model reads bytes: below this the repeated question of L5 leaves more than 2 % empty
CONTRACT = """task config model case_id group_id seed haystack context_length depth_percent n_prompt_tokens n_new_tokens answers
    prediction em f1 question_aware compression_ratio kv_bytes_full kv_bytes_peak kv_bytes_decode peak_memory_bytes memory_kind
    ttft_s prefill_tokens_per_s itl_ms_mean itl_ms_p95 evictions finish_reason error device dtype quant threads versions
    script_sha256 settings_hash created""".split()


@pytest.fixture(autouse=True)
def offline_in_an_empty_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for script in (core, niah):
        monkeypatch.setattr(script, "hub_unreachable", lambda: True)


@pytest.fixture
def no_weights(monkeypatch):
    """Weights must not be loaded: what is refused is refused before."""
    for script in (core, niah):
        monkeypatch.setattr(script, "load_model", lambda *args: pytest.fail("weights were loaded"))
        monkeypatch.setattr(script, "load_embedder", lambda name: None)


def refusal(script, capsys, **given) -> str:
    """Run a script that must refuse; the one sentence it says."""
    capsys.readouterr()
    assert script.run_main(script.main, script.Args(**{**CPU, **given})) == 2
    return one_sentence(capsys.readouterr().err)


def one_sentence(stderr: str) -> str:
    assert stderr.startswith("error: ") and stderr.count("\n") == 1 and "Traceback" not in stderr
    return stderr


def run(script: str, *args: str, cwd: Path, **env: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONIOENCODING": "utf-8", **env}
    return subprocess.run([sys.executable, ROOT / script, *args], cwd=cwd, env=env, stdin=subprocess.DEVNULL, capture_output=True,
                          encoding="utf-8", timeout=300)


@pytest.mark.parametrize("content", [None, b"", b" \n\t\n", b"\x89PNG\r\n\x1a\n\0\0\xff", b"text\0text", "caf\u00e9".encode("latin-1"),
                                     "plain".encode("utf-16")])
def test_documents_that_are_no_text(no_weights, capsys, content):
    """Missing, empty, blank, binary twice, another encoding twice."""
    if content is not None:
        Path("notes.txt").write_bytes(content)
    if content not in (b"caf\xe9", "plain".encode("utf-16")):  # these two cognito_run.py reads
        assert "notes.txt" in refusal(core, capsys, docs=(Path("notes.txt"),), ask=("Who?",))
    assert "notes.txt" in refusal(niah, capsys, haystack="notes.txt")


def test_folder_without_texts(no_weights, capsys):
    Path("papers").mkdir()
    Path("papers/a.pdf").write_bytes(b"%PDF")
    assert "papers" in refusal(core, capsys, docs=(Path("papers"),), ask=("Who?",))


@pytest.mark.parametrize("given, said", [
    (dict(ask=("",)), "question"), (dict(ask=("Who?", " \n")), "question"), (dict(ask=()), "question"),
    (dict(ask=("why " * 10_000,)), "32768"),
    (dict(model="nobody/no-such-model"), "nobody/no-such-model"), (dict(model="missing.gguf"), "missing.gguf"),
    (dict(model="."), "--model ."),
    (dict(kv_budget="0"), "--kv-budget 0"), (dict(kv_budget="0.0"), "--kv-budget 0.0"), (dict(kv_budget="-1"), "--kv-budget -1"),
    (dict(kv_budget="1.5"), "--kv-budget 1.5"), (dict(kv_budget="0MiB"), "--kv-budget 0MiB"), (dict(kv_budget="lots"), "--kv-budget lots"),
    (dict(kv_budget=""), "--kv-budget"), (dict(history=-1), "--history -1"),
    (dict(config="L9"), "L9"), (dict(config="all"), "all"),
    (dict(chunk_size=0), "--chunk-size 0"), (dict(chunk_size=-5), "--chunk-size -5"),
    (dict(evict_at="junk"), "--evict-at junk"), (dict(max_new_tokens=0), "--max-new-tokens 0"),
    (dict(device="junk"), "--device junk"), (dict(device="meta"), "--device meta"), (dict(device="cuda"), "--device cuda"),
    (dict(dtype="junk"), "--dtype junk"), (dict(quant="junk"), "--quant junk"), (dict(quant="nf4"), "nf4"),
    (dict(trace=Path("notes.txt/trace.jsonl")), "trace"), (dict(page_dir=Path("notes.txt")), "notes.txt"),
])
def test_bad_questions_and_settings(no_weights, monkeypatch, capsys, given, said):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    Path("notes.txt").write_text("The meeting was chaired by Ada.")
    assert said in refusal(core, capsys, **{"docs": (Path("notes.txt"),), "ask": ("Who chaired?",), **given})


FACTS = "".join(f"Fact {i} of the list is that {i * i} is a square. " for i in range(40))  # 1,700 tokens of the tiny model


@pytest.mark.parametrize("config", ["L3", "L4", "L7"])
def test_a_budget_of_nothing_is_refused(no_weights, capsys, config):
    Path("notes.txt").write_text(FACTS)
    said = refusal(core, capsys, docs=(Path("notes.txt"),), ask=("Who?",), config=config, kv_budget="0.0001")
    assert "--kv-budget 0.0001 leaves none" in said


def answers(capsys, **given) -> tuple[list[dict], str]:
    """The turns of a run of cognito_run.py over notes.txt, and what it printed."""
    asked = dict(docs=(Path("notes.txt"),), max_new_tokens=4, json=Path("answers.json"))
    assert core.run_main(core.main, core.Args(**{**CPU, **asked, **given})) == 0
    return json.loads(Path("answers.json").read_text())["turns"], capsys.readouterr().out


@pytest.mark.parametrize("config", ["L3", "L4"])
def test_a_short_note_is_kept_whole(capsys, config):
    """Eight questions about a note of 400 tokens: all answered, and nothing evicted."""
    Path("notes.txt").write_text(FACTS[:400])
    turns, out = answers(capsys, config=config, ask=tuple(f"What is fact {i}?" for i in range(8)))
    assert len(turns) == 8 and "up to 512 are kept whole" in out
    assert all(turn["compression_ratio"] == 0 and len(turn["passages"]) > 1 for turn in turns)


@pytest.mark.parametrize("kv_budget", ["40", "0.05", "40KiB", "0.4"])
def test_the_best_passage_always_stays(capsys, kv_budget):
    """However small the budget: passages are cut so that one fits, and what stays fits."""
    Path("notes.txt").write_text(FACTS)
    turns, _ = answers(capsys, kv_budget=kv_budget, ask=("What is fact 7?", "And fact 30?", "What is fact 7?"))
    per_token = turns[0]["kv_bytes_full"] / turns[0]["n_seen"]
    n_tokens = sum(row["tokens"] for row in turns[0]["passages"])
    budget = {"40": 40, "40KiB": 40 * 1024 // per_token}.get(kv_budget) or float(kv_budget) * n_tokens
    for turn in turns:
        rows = turn["passages"]
        assert max(row["score"] for row in rows) in [row["score"] for row in rows if row["state"] != "evicted"]
        assert 0 < sum(row["tokens"] for row in rows if row["state"] != "evicted") <= budget + 1


@pytest.mark.parametrize("given, said", [
    (dict(n=0), "--n 0"), (dict(n=-1), "--n -1"), (dict(lengths=()), "--lengths"), (dict(lengths=(0,)), "--lengths"),
    (dict(lengths=(100,)), "100"), (dict(lengths=(LENGTH, 40_000)), "40000"), (dict(kv_budget="12"), "reserved"),
    (dict(config="L4", kv_budget="0.0001"), "budget"), (dict(kv_budget="-1"), "--kv-budget -1"), (dict(config="L9"), "L9"),
    (dict(chunk_size=0), "--chunk-size 0"), (dict(evict_at="junk"), "--evict-at junk"), (dict(max_new_tokens=0), "--max-new-tokens 0"),
    (dict(model="missing.gguf"), "missing.gguf"), (dict(model="nobody/no-such-model"), "nobody/no-such-model"),
    (dict(out=Path("few.txt/out.jsonl")), "few.txt"), (dict(out=Path("few.txt/deeper/out.jsonl")), "few.txt"),
    (dict(out=Path(".")), "cannot write"), (dict(out=Path("few.txt")), "few.txt"),
    (dict(out=Path("binary")), "binary"), (dict(out=Path("out.jsonl"), config="all"), "--out"),
    (dict(trace=Path("few.txt/trace.jsonl")), "trace"),
])
def test_bad_evaluations(no_weights, capsys, given, said):
    Path("few.txt").write_text("One sentence. ")
    Path("binary").write_bytes(b"\xff\xfe\n")
    before = {path: path.read_bytes() for path in Path().iterdir()}
    assert said in refusal(niah, capsys, **{"lengths": (LENGTH,), "n": 1, **given})
    assert all(path.read_bytes() == content for path, content in before.items())


def test_hub_that_does_not_answer(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(core.huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(core.huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    core.hub_unreachable.cache_clear()
    try:
        assert core.hub_unreachable()
        with pytest.raises(core.Refusal, match="Hub cannot be reached"):
            core.load_config("nobody/no-such-model")
    finally:
        core.hub_unreachable.cache_clear()


def test_a_local_file_is_not_blamed_on_the_hub(no_weights, capsys):
    """A damaged .gguf file: the sentence sends the user to the file."""
    Path("damaged.gguf").write_bytes(b"no gguf at all")
    Path("notes.txt").write_text("The meeting was chaired by Ada.")
    said = refusal(core, capsys, docs=(Path("notes.txt"),), ask=("Who?",), model="damaged.gguf")
    assert "damaged.gguf" in said and "Hub cannot be reached" not in said


@pytest.mark.parametrize("version, code", [("5.23.4", 2), ("5.25.0", 2), ("5.240.0", 2), ("4.24.1", 2), ("5.24.9", 0)])
def test_transformers_minor(monkeypatch, capsys, version, code):
    """The last one is ours: the run then goes on and refuses something else."""
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version if name == "transformers" else real(name))
    for script in (core, niah):
        said = refusal(script, capsys, config="L9")
        assert (f"transformers {version}" in said) == (code == 2) and ("L9" in said) == (code == 0)


def test_usage_error_as_a_process(tmp_path):
    """With all that is not needed closed; of what is said on stderr nothing goes to stdout."""
    command = [sys.executable, ROOT / "cognito_run.py", "--model", "tiny", "--docs", "missing.txt", "--ask", "Who?"]
    done = subprocess.run(["sh", "-c", '"$@" <&- >&-', "sh", *command], cwd=tmp_path, stderr=subprocess.PIPE, encoding="utf-8", timeout=300)
    assert done.returncode == 2 and "missing.txt" in one_sentence(done.stderr)


def test_unknown_flag_as_a_process(tmp_path):
    done = run("eval_niah.py", "--no-such-flag", cwd=tmp_path)
    assert done.returncode == 2 and "--no-such-flag" in done.stderr and "Traceback" not in done.stderr


def test_good_run_as_a_process(tmp_path):
    """Two questions about a folder: answers, a table, JSON; the trace says what was evicted. No home, and a stdout without the names."""
    (tmp_path / "papers").mkdir()
    for name in ("a.txt", "\u65e5\nb.md"):
        (tmp_path / "papers" / name).write_text("".join(f"Fact {i} of {name} is that {i * i} is a square. " for i in range(40)))
    done = run("cognito_run.py", "--model", "tiny", "--device", "cpu", "--dtype", "float32", "--docs", "papers", "--ask", "What is fact 7?",
               "--ask", "And fact \u4e03?", "--max-new-tokens", "4", "--trace", "run.trace.jsonl", "--json", "out.json", cwd=tmp_path,
               HOME="/dev/null", PYTHONIOENCODING="cp1252")
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert set(re.findall(r"(\w[\w ]*):? +\d+%\|", done.stderr)) == {"reading"}  # no progress bar but ours
    said = json.loads((tmp_path / "out.json").read_text())
    assert [turn["question"] for turn in said["turns"]] == ["What is fact 7?", "And fact \u4e03?"] and said["config"] == "L3"
    assert 0.5 < said["turns"][0]["compression_ratio"] < 0.7 and "{" not in done.stdout
    assert "> And fact \\u4e03?\n" in done.stdout and re.search(r"^\\u65e5\\nb.md.* #\d+ .* evicted", done.stdout, re.MULTILINE)
    events = [json.loads(line) for line in (tmp_path / "run.trace.jsonl").read_text().splitlines()]
    out = {row["passage"] for row in said["turns"][0]["passages"] if row["state"] == "evicted"}
    ends = [i for i, event in enumerate(events) if event["event"] == "decode"]  # of the reading, then of every token
    first_turn = events[: ends[1]]
    assert {event["segment"] for event in first_turn if event["event"] == "evict"} == out
    assert all(event["score"] > 0 and event["lag"] >= 0 for event in events if event["event"] == "evict")


def evaluate(Run=niah.NeedleRun, **given) -> int:
    return niah.run_main(lambda args: niah.main(args, Run), niah.Args(**{**CPU, "n": 1, "lengths": (LENGTH,), **given}))


def read(path) -> list[dict]:
    rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
    assert not any(niah.row_fault(row) or row.keys() - niah.SCHEMA.keys() for row in rows)
    return rows


def test_all_configurations(monkeypatch, capsys):
    """L1 to L5 and L3 in flight: rows by the contract, KV bytes as promised; a second run has nothing to do."""
    assert evaluate(config="all", lengths=(8192,)) == 0
    closing = json.loads(capsys.readouterr().out.splitlines()[-1])
    paths = [f"results/niah/tiny/L{i}-n1.jsonl" for i in range(1, 6)]
    assert closing["files"] == paths and closing["failed"] == 0 and [cell["n"] for cell in closing["cells"]] == [1] * 5
    rows = {Path(path).name[:2]: read(path)[0] for path in paths}
    for name, row in rows.items():
        assert set(CONTRACT) <= row.keys() and row["config"] == name and row["error"] is None
        assert not [key for key in CONTRACT if row[key] is None and key != "error"]
        assert row["script_sha256"] == hashlib.sha256((ROOT / "eval_niah.py").read_bytes()).hexdigest()
        assert 0.98 * 8192 <= row["n_prompt_tokens"] + 24 <= 8192
        unit = {"L3": "evicted_segments", "L4": "cuts"}.get(name)
        assert row["evictions"] == (0 if unit is None else row[unit]) and row["question_aware"] == (name == "L3")
        assert (row["kv_budget"], row.get("evict_at")) == ((None, None) if unit is None else ("0.4", "pre-decode"))
        assert not row.keys() & {"evicted_segments", "cuts", "evicted_entries", "scorer", "kv_bytes_oracle"} - {unit}
    assert len({row["case_id"] for row in rows.values()}) == 1 and rows["L5"]["n_prompt_tokens"] > rows["L2"]["n_prompt_tokens"]
    for name in ("L3", "L4"):
        assert rows[name]["kv_bytes_decode"] <= 0.45 * rows["L2"]["kv_bytes_decode"] and rows[name]["evictions"] > 0
        assert 0.6 <= rows[name]["compression_ratio"] < 0.65 and rows["L2"]["compression_ratio"] == 0

    before = {path: Path(path).read_bytes() for path in paths}
    with monkeypatch.context() as patch:
        patch.setattr(niah, "load_model", lambda *args: pytest.fail("weights were loaded"))
        assert evaluate(config="all", lengths=(8192,)) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == closing
    assert {path: Path(path).read_bytes() for path in paths} == before

    assert evaluate(config="L3", evict_at="chunk", lengths=(8192,)) == 0
    in_flight = read("results/niah/tiny/L3-n1-inflight.jsonl")[0]
    assert in_flight["evict_at"] == "chunk" and in_flight["evictions"] == in_flight["evicted_segments"] > 0
    assert in_flight["kv_bytes_peak"] <= 0.5 * rows["L2"]["kv_bytes_peak"] < rows["L3"]["kv_bytes_peak"]


@pytest.mark.parametrize("other", [dict(seed=3), dict(chunk_size=128), dict(n=2), dict(config="L5"), dict(dtype="bfloat16")])
def test_other_settings_on_one_file(capsys, one_row, other):
    before = one_row.read_bytes()
    assert "other settings" in refusal(niah, capsys, **{"config": "L2", "n": 1, "lengths": (LENGTH,), "out": one_row, **other})
    assert one_row.read_bytes() == before


@pytest.fixture(scope="module")
def one_row(tmp_path_factory):
    path = tmp_path_factory.mktemp("one") / "out.jsonl"
    assert evaluate(config="L2", out=path) == 0
    return path


def test_failed_cases_are_rows_and_are_retried(capsys):
    """One case fails, one runs out of memory: exit code 1, and the next run does just those two, in their places."""
    ran = []

    class Failing(niah.NeedleRun):
        def rank(self, name, case):
            ran.append(case.case_id)
            return super().rank(name, case)

        def generate(self, name, prompt, policy):
            if len(ran) in failing:
                raise failing[len(ran)]
            return super().generate(name, prompt, policy)

    failing = {1: RuntimeError("the disk\nis on fire"), 3: MemoryError()}
    given = dict(config="L2", n=4, out=Path("out.jsonl"))
    assert evaluate(Failing, **given) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["failed"] == 2
    rows = read("out.jsonl")
    assert [row["error"] is None for row in rows] == [False, True, False, True] and all(set(CONTRACT) <= row.keys() for row in rows)
    assert rows[0]["error"] == "RuntimeError: the disk" and rows[2]["error"].startswith("out of memory: ") and rows[2]["em"] is None

    failing = {}
    assert evaluate(Failing, **given) == 0
    assert ran[4:] == [rows[0]["case_id"], rows[2]["case_id"]]
    retried = read("out.jsonl")
    assert [row["case_id"] for row in retried] == [row["case_id"] for row in rows]
    assert [row["error"] for row in retried] == [None] * 4 and retried[1] == rows[1] and retried[3] == rows[3]


@pytest.mark.parametrize("model, folder", [
    ("smollm2", "smollm2"), ("tiny", "tiny"), ("nobody/Some-7B-v0.3", "nobody-Some-7B-v0.3"), ("some-7B", "some-7B"),
    ("models/mine", "mine"), ("models/mine/", "mine"), ("./models/../models/mine", "mine"), (".", "work"),
    ("models/Mine-Q8_0.gguf", "Mine-Q8_0"), ("models/mine/..", "models"), ("absolute", "mine"), ("models/odd name (1)", "odd-name-1"),
])
def test_results_are_named_by_the_model(monkeypatch, tmp_path, model, folder):
    """A Hub id keeps both parts; a folder or file gives its own name, whatever path leads there."""
    (tmp_path / "work" / "models" / "mine").mkdir(parents=True)
    (tmp_path / "work" / "models" / "odd name (1)").mkdir()
    (tmp_path / "work" / "models" / "Mine-Q8_0.gguf").touch()
    monkeypatch.chdir(tmp_path / "work")
    model = str(tmp_path / "work" / "models" / "mine") if model == "absolute" else model
    assert niah.model_folder(niah.Runtime(model, torch.device("cpu"), torch.float32, "none")) == folder


def test_waiting_threads_sleep_unless_told_otherwise(tmp_path):
    """What OpenMP is set to when a script brings in torch, which reads it then and only then; no torch is needed for that."""
    watch = """
import importlib, os, sys

class Watch:
    def find_spec(name, path=None, target=None):
        if name == "torch":
            print(script, os.environ.get("OMP_WAIT_POLICY"))
            raise ImportError("seen enough")

sys.meta_path.insert(0, Watch)
sys.path.insert(0, sys.argv[1])
for script in sys.argv[2:]:
    for given in (None, "ACTIVE"):
        os.environ.pop("OMP_WAIT_POLICY", None)
        if given is not None:
            os.environ["OMP_WAIT_POLICY"] = given
        try:
            importlib.import_module(script)
        except ImportError as error:
            assert str(error) == "seen enough", error
"""
    scripts = ["cognito_run", "eval_niah", "eval_squad", "eval_stress", "train_kvzap"]
    done = subprocess.run([sys.executable, "-c", watch, ROOT, *scripts], capture_output=True, encoding="utf-8", timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:-1] == [f"{script} {policy}" for script in scripts for policy in ("PASSIVE", "ACTIVE")]
