"""What it is like to ask: a session in a notebook, the prompt and its commands, Ctrl-C, and streams of every kind."""

import contextlib
import gc
import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import types
import zlib
from pathlib import Path

import cognito_run as core
import numpy as np
import pytest
import torch
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

ROOT = Path(__file__).parents[1]
TINY = dict(model="tiny", device="cpu", dtype="float32", quant="none", reranker="none", max_new_tokens=6)
QUESTIONS = ("What is fact 7?", "And fact 30?", "Which is a square?")


class EveryWord(dict):
    """A vocabulary that lacks none."""

    def __contains__(self, word):
        return True


class BagOfWords:
    """A dense embedder of hashed words, without weights."""

    max_seq_length = None
    tokenizer = types.SimpleNamespace(get_vocab=EveryWord)

    def encode(self, texts, **kwargs):
        vectors = np.zeros((len(texts), 256), np.float32)
        for vector, text in zip(vectors, texts):
            for word in core.words(text):
                vector[zlib.crc32(word.encode()) % 256] += 1
        return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-9)


class Screen(io.StringIO):
    """A terminal, as far as a script can tell."""

    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def folder_with_notes(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(core, "load_embedder", lambda name: BagOfWords())
    Path("notes").mkdir()
    for name in ("a.txt", "b.md"):
        Path("notes", name).write_text("".join(f"Fact {i} of {name} is that {i * i} is a square. " for i in range(20)))


def run(monkeypatch, stdin: str | None = None, **given) -> int:
    """Run the script over the notes, with these lines piped in, or with a stdin that is not to be read."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(stdin) if stdin is not None else open(os.devnull, "w"))
    return core.run_main(core.main, core.Args(**{**TINY, "docs": (Path("notes"),), **given}))


def entries(session) -> list[torch.Tensor]:
    return [tensor.clone() for buffer in session.conversation.cache.buffers() for tensor in buffer.entries()]


def test_a_session_in_a_notebook(monkeypatch, capsys):
    """Answers, citations and facts; paths as texts and a budget as a number; pages go with the session."""
    with core.Session("notes", kv_budget=0.3, page_dir="pages", trace="run.trace.jsonl", **TINY) as session:
        pieces = []
        reply = session.ask(f"  {QUESTIONS[0]}\n", on_text=pieces.append)
        assert reply.text == reply.facts["answer"] == "".join(pieces).strip() and reply.facts["question"] == QUESTIONS[0]
        assert 0.6 < reply.facts["compression_ratio"] < 0.8 and list(Path("pages").iterdir()) and Path("run.trace.jsonl").stat().st_size
        assert session.conversation.lm.model.config._attn_implementation == "cognito"
        with pytest.raises(core.Refusal, match="empty"):
            session.ask(" \n")
        assert "2 documents" in str(session) and "tiny on cpu" in repr(session) and str(session) in capsys.readouterr().out
    assert not list(Path("pages").iterdir()) and session.conversation.lm.model.config._attn_implementation != "cognito"
    with pytest.raises(core.Refusal, match="closed"):
        session.ask(QUESTIONS[1])

    session = core.Session(["notes/a.txt", Path("notes/b.md")], page_dir="pages", kv_budget="0.3", **TINY)  # without `with`
    assert session.ask(QUESTIONS[0]).text == reply.text and list(Path("pages").iterdir())
    del session
    gc.collect()
    assert not list(Path("pages").iterdir())
    for flags in (dict(bugdet=0.3), dict(json="out.json")):
        with pytest.raises(core.Refusal, match=f"the flag {next(iter(flags))} is unknown; expected one of model, .*kv_budget"):
            core.Session("notes", **flags)
    with pytest.raises(core.Refusal, match="--kv-budget 1.5"):
        core.Session("notes", kv_budget=1.5, **TINY)
    reply = core.Reply("Ada.", ("manual.pdf p. 12", "notes.txt"), {"much": "more"})
    assert str(reply) == "Ada.  [manual.pdf p. 12]  [notes.txt]"
    assert repr(reply) == "Reply(text='Ada.', citations=('manual.pdf p. 12', 'notes.txt'))"


def test_piped_lines_are_questions_and_commands(monkeypatch, capsys):
    """Every line is answered in its turn, those that cannot be as well; what stands behind /quit is not."""
    lines = ["", "/why", QUESTIONS[0], "/why", "/pages", "/docs", "/nope 1", "/why so", " /etc/fstab has which fact?", "why " * 20_000,
             "/help", "/budget", QUESTIONS[1], "/quit", QUESTIONS[2]]
    assert run(monkeypatch, "\n".join(lines), json=Path("out.json"), trace=Path("run.trace.jsonl")) == 0
    said, turns = capsys.readouterr(), json.loads(Path("out.json").read_text())["turns"]
    assert [turn["question"] for turn in turns] == [QUESTIONS[0], lines[8].strip(), QUESTIONS[1]]
    parts = dict(zip(lines[1:], re.split("\n> .*\n", said.out)[1:]))
    names = [row["passage"] for row in turns[0]["passages"]]
    seen = [row["passage"] for row in turns[0]["passages"] if row["state"] == "resident"]
    listed = {command: re.findall(r"^((?:a.txt|b.md)(?: .*?#\d+)?) +\d", parts[command], re.M) for command in ("/why", "/pages", "/docs")}
    assert listed["/pages"] == sorted(names) and 0 < len(seen) < len(names)
    assert listed["/docs"] == ["a.txt", "b.md"] and f"{len(names)} passages, " in parts["/docs"]
    assert "the budget is 0.4" in parts["/budget"] and all(command in parts["/help"] for command in (*core.COMMANDS, "/quit", "Ctrl-C"))
    assert QUESTIONS[2] not in said.out

    errors = [line for line in said.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 4 and "Traceback" not in said.err
    assert "no question has been answered yet" in errors[0] and "/nope is no command; expected /docs, /pages" in errors[1]
    assert "/why takes nothing behind it" in errors[2] and "32768" in errors[3]


def test_why_lists_what_the_answer_could_see(monkeypatch, capsys):
    """The best first, with score and lag; nothing of what was evicted."""
    assert run(monkeypatch, "\n".join([*QUESTIONS, "/why"]), json=Path("out.json"), kv_budget="0.7") == 0
    turn = json.loads(Path("out.json").read_text())["turns"][-1]
    why = capsys.readouterr().out.partition("\n> /why\n")[2]
    want = sorted((row for row in turn["passages"] if row["state"] != "evicted"), key=lambda row: -row["score"])
    listed = re.findall(r"^(\S+ .*?#\d+) +(\d+) +([\d.]+) +(\d+)  ([a-z ]+?)(?:  .*)?$", why, re.M)
    assert listed == [(row["passage"], str(row["tokens"]), f"{row['score']:.4f}", str(row["lag"]), row["state"]) for row in want]
    assert {lag for *_, lag, _ in listed} != {"0"} and f"could see {len(want)} of {len(turn['passages'])}" in why
    assert {"resident", "paged in"} == {state for *_, state in listed}


def test_the_budget_changes_with_the_next_question(monkeypatch, capsys):
    lines = [QUESTIONS[0], "/budget 0.2", QUESTIONS[1], "/budget lots", "/budget 0.9", QUESTIONS[2], "/budget"]
    assert run(monkeypatch, "\n".join(lines), json=Path("out.json")) == 0
    said, turns = capsys.readouterr(), json.loads(Path("out.json").read_text())["turns"]
    ratios = [turn["compression_ratio"] for turn in turns]
    assert len(ratios) == 3 and ratios[2] < 0.2 < ratios[0] < 0.7 < ratios[1]
    assert re.findall("the budget is (.*)", said.out) == ["0.2", "0.9", "0.9"]
    assert [line for line in said.err.splitlines() if line.startswith("error: ") and "lots is no budget" in line]


def test_what_evicts_no_passages_has_no_budget_to_change(monkeypatch, capsys):
    assert run(monkeypatch, "/budget 0.2", config="L2") == 0
    assert "error: L2 evicts no passages" in capsys.readouterr().err


@pytest.mark.parametrize("stdin, given, said", [
    ("", {}, "stdin is empty"), (" \n\n", {}, "stdin is empty"), (None, {}, "stdin cannot be read"),
    ("Who?", dict(docs=(Path("-"),)), "--docs - reads"),
    ("", dict(ask=("Who?", " ")), "--ask got an empty question"), ("Who?", dict(json=Path("notes")), "cannot write notes"),
])
def test_what_cannot_be_asked_is_refused_before_weights_load(monkeypatch, capsys, stdin, given, said):
    monkeypatch.setattr(core, "load_model", lambda *args: pytest.fail("weights were loaded"))
    assert run(monkeypatch, stdin, **given) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and said in error


def test_json_alone_on_stdout(monkeypatch, capsys):
    """One object and nothing else; people read on stderr. Without --json there is none."""
    assert run(monkeypatch, ask=QUESTIONS[:2], json=Path("-")) == 0
    out, err = capsys.readouterr()
    assert [turn["question"] for turn in json.loads(out)["turns"]] == list(QUESTIONS[:2]) and out.count("\n") == 1
    assert json.loads(out)["runtime"] == "tiny on cpu, float32, quant none" and json.loads(out)["config"] == "L3"
    assert f"> {QUESTIONS[1]}" in err and "KV cache" in err
    assert run(monkeypatch, ask=QUESTIONS[:2]) == 0
    out = capsys.readouterr().out
    assert f"> {QUESTIONS[1]}" in out and "{" not in out


def pressing_ctrl_c(monkeypatch, *at: int) -> None:
    """Ctrl-C is pressed when these pieces of answers come, counted from 0."""
    n, real = iter(range(10_000)), core.say

    def say(piece):
        real(piece)
        if next(n) in at:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(core, "say", say)


def test_ctrl_c_stops_an_answer(monkeypatch, capsys):
    """What was streamed stays; the cache is as before, and the next answer is that of a session where nothing was stopped."""
    monkeypatch.setattr(core, "DECAY", 0.0)
    with core.Session("notes", **TINY) as session, core.Session("notes", **TINY) as other:
        session.ask(QUESTIONS[0])
        before, streamed = entries(session), []

        def stop(piece):
            streamed.append(piece)
            if len(streamed) == 3:
                signal.raise_signal(signal.SIGINT)

        with pytest.raises(KeyboardInterrupt):
            session.ask(QUESTIONS[0], on_text=stop)
        assert len(streamed) == 3 and all(torch.equal(a, b) for a, b in zip(before, entries(session), strict=True))
        assert session.ask(QUESTIONS[1]).text == other.ask(QUESTIONS[1]).text

    capsys.readouterr()
    pressing_ctrl_c(monkeypatch, 2)
    assert run(monkeypatch, "\n".join([*QUESTIONS[:2], "/why"]), json=Path("out.json")) == 0
    out, turns = capsys.readouterr().out, json.loads(Path("out.json").read_text())["turns"]
    assert [turn["question"] for turn in turns] == [QUESTIONS[1]] and "interrupted; Ctrl-C again ends the session" in out
    assert out.count("KV cache") == 1 and f"the answer to {QUESTIONS[1]!r} could see" in out


def test_ctrl_c_twice_ends_the_session(monkeypatch, capsys):
    """Within a second: code 130, and the JSON has what was answered. While loading once is enough."""
    pressing_ctrl_c(monkeypatch, TINY["max_new_tokens"] + 1, TINY["max_new_tokens"] + 3)
    assert run(monkeypatch, "\n".join(QUESTIONS), json=Path("out.json")) == 130
    said, turns = capsys.readouterr(), json.loads(Path("out.json").read_text())["turns"]
    assert [turn["question"] for turn in turns] == [QUESTIONS[0]] and said.err.endswith("\ninterrupted\n")
    assert "Traceback" not in said.err and said.out.count("Ctrl-C again") == 1 and f"> {QUESTIONS[2]}" in said.out

    monkeypatch.setattr(core, "load_model", lambda *args: signal.raise_signal(signal.SIGINT))
    assert run(monkeypatch, QUESTIONS[0], json=Path("none.json")) == 130
    assert capsys.readouterr().err == "\ninterrupted\n" and not Path("none.json").read_text()


def test_when_a_second_ctrl_c_ends_the_session(monkeypatch):
    """Within a second, or while the first is still being dealt with; not when an answer lies between."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("Who?"))
    lines = core.Lines(core.Args(docs=(Path("notes"),)))

    def interrupt(also_while_cleaning_up=False):
        with lines.answering():
            try:
                raise KeyboardInterrupt
            finally:
                if also_while_cleaning_up:
                    raise KeyboardInterrupt

    interrupt()
    lines.interrupted_at -= 2  # seconds
    interrupt()
    with lines.answering():
        pass
    interrupt()
    with lines.answering():
        raise core.Refusal("no")
    interrupt()
    with pytest.raises(KeyboardInterrupt):
        interrupt()
    lines.interrupted_at -= 2
    with pytest.raises(KeyboardInterrupt):
        interrupt(also_while_cleaning_up=True)


@contextlib.contextmanager
def keys(text: str):
    """Within it these keys are pressed at whatever prompt there is."""
    with create_pipe_input() as pressed, create_app_session(input=pressed, output=DummyOutput()):
        pressed.send_text(text)
        yield


def test_the_prompt_edits_and_remembers(monkeypatch):
    """Ctrl-C twice or Ctrl-D ends it; the history is a file of the user's alone, or in memory where there is none to write to."""
    monkeypatch.setattr(sys, "stdin", Screen())
    monkeypatch.setattr(sys, "stdout", Screen())
    args = core.Args(docs=(Path("notes"),))
    history = Path("state/cognito/history")
    with keys("What is fact 9?\x7f\x7f7?\r\ris 7 a fact?\x01And \r/exit\r"):
        lines = core.Lines(args)
        assert lines.typed and list(lines) == ["What is fact 7?", "And is 7 a fact?"]
    with keys("Nothing\x03When?\r\x04"):
        assert list(core.Lines(args)) == ["When?"]
    typed = [line for line in history.read_text().splitlines() if line.startswith("+")]
    assert typed == ["+What is fact 7?", "+And is 7 a fact?", "+/exit", "+When?"] and history.stat().st_mode & 0o777 == 0o600
    with keys("And?\x03\x03"), pytest.raises(KeyboardInterrupt):
        next(core.Lines(args))
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null")
    with keys("And?\r\x04"):
        assert list(core.Lines(args)) == ["And?"]
    assert sys.stdout.getvalue().splitlines() == ["", "interrupted; Ctrl-C again ends the session"] * 2
    assert not core.Lines(core.Args()).typed  # the demo has its own question


NAME = "a\nb\udcff [bold]x[/bold] :smile: \x1b[31m.txt"


@pytest.mark.parametrize("width", [40, 80])
@pytest.mark.parametrize("no_color", [False, True])
def test_a_table_on_a_terminal(monkeypatch, width, no_color):
    """No line is wider than the terminal, no name is markup or steers it; colours, but not with NO_COLOR."""
    for name, value in {"COLUMNS": str(width), "TERM": "xterm-256color", "NO_COLOR": "1" * no_color}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    row = dict(tokens=7, score=0.5, lag=1, state="evicted", at="host")
    core.show(core.passage_table([dict(row, passage=NAME), dict(row, passage="notes.md")]))
    said = screen.getvalue()
    assert ("\x1b[" in said) == (not no_color) and "\x1b[31m" not in said
    plain = re.sub(r"\x1b\[[\d;]*m", "", said)
    assert max(map(len, plain.splitlines())) <= width
    head, *lines = plain.splitlines()
    folded = "".join(line[: head.index("tokens")] for line in lines).replace(" ", "")
    assert folded == r"a\nb\udcff[bold]x[/bold]:smile:\x1b[31m.txtnotes.md" and "7  0.5000    1  evicted" in lines[-1]


def test_plain_when_piped(monkeypatch, capsys):
    """Odd names on one line each; an answer cannot steer the terminal; citations stand below it."""
    Path("notes", NAME.replace("/", "")).write_text("Fact 7 is on no list. " * 20)
    assert run(monkeypatch, ask=QUESTIONS[:1]) == 0
    out = capsys.readouterr().out
    assert r"a\nb\udcff [bold]x[bold] :smile: \x1b[31m.txt l. 1 #1  " in out and "\x1b" not in out
    assert not re.search(" $", out, re.M)
    facts = {**core.Session("notes", **TINY).ask(QUESTIONS[0]).facts, "passages": []}
    capsys.readouterr()
    core.print_answer(core.Reply("Ada.", ("[b]manual\n.pdf p. 12", "notes.txt"), facts), with_table=True)
    assert "\n[[b]manual\\n.pdf p. 12] [notes.txt]\n" in capsys.readouterr().out
    core.say("one\ntwo\t[bold]\x1b]0;mine\x07\x00\x9b\r\n")
    assert capsys.readouterr().out == "one\ntwo\t[bold]\\x1b]0;mine\\x07\\x00\\x9b\\r\n"


@pytest.mark.parametrize("question, want", [("caf\udcc3\udca9", "café"), ("\udcff?", "\ufffd?"), ("\ud83d?", "\ufffd?"),
                                            ("\udcc3", "\ufffd"), ("日本 \U0001f600", "日本 \U0001f600")])
def test_questions_are_well_formed(question, want):
    """The bytes of an argument under another locale, and what is no character at all."""
    assert core.well_formed(question) == want
    assert core.session_args((), dict(ask=[question])).ask == (want,)


@contextlib.contextmanager
def streams(monkeypatch, stdout, stdin=None):
    with monkeypatch.context() as patch, open(os.devnull, "w") as stderr:
        for name, stream in (("stdin", stdin), ("stdout", stdout), ("stderr", stderr)):
            patch.setattr(sys, name, stream)
        yield


@pytest.mark.parametrize("encoding, want", [("cp1252", b"\xe9 \\u65e5"), ("ascii", b"\\xe9 \\u65e5"), ("utf-8", "é 日".encode())])
def test_streams_that_cannot_say_everything(monkeypatch, encoding, want):
    raw = io.BytesIO()
    typed = io.TextIOWrapper(io.BytesIO("é\n\xff\n".encode("latin-1")), encoding="utf-8")
    with streams(monkeypatch, io.TextIOWrapper(raw, encoding=encoding), typed), core.lenient_streams():
        print("é 日 \udcff")
        assert [core.well_formed(line) for line in sys.stdin] == ["\ufffd\n", "\ufffd\n"]
        sys.stdout.flush()
        assert raw.getvalue() == want + b" \\udcff\n"


def test_closed_streams(monkeypatch):
    with streams(monkeypatch, None), core.lenient_streams():
        print("to nobody")
        with pytest.raises(core.Refusal, match="stdin is empty"):
            core.Lines(core.Args(docs=(Path("notes"),)))


def test_a_reader_who_leaves(monkeypatch):
    """`| head -1`: nothing is said, the code is that of a broken pipe, and Python's last flush has nothing to complain of."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    stdout = open(write_end, "w")
    with streams(monkeypatch, stdout), pytest.raises(SystemExit) as ended, core.lenient_streams():
        with core.Session("notes", **TINY) as session:
            core.print_answer(session.ask(QUESTIONS[0]), with_table=True)
    assert ended.value.code == 141
    stdout.close()  # flushes
    read_end, write_end = os.pipe()
    os.close(read_end)
    stdout = open(write_end, "w")
    with streams(monkeypatch, stdout), pytest.raises(SystemExit) as ended, core.lenient_streams():
        stdout.write("waits in the buffer until the end")
        sys.exit(0)
    assert ended.value.code == 141
    stdout.close()


class Terminal:
    """The script on a terminal of its own, which Ctrl-C reaches as a signal."""

    RUN = ("import fcntl, runpy, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); sys.argv = sys.argv[1:]; "
           "runpy.run_path(sys.argv[0], run_name='__main__')")

    def __init__(self, *args: str):
        self.fd, far_end = pty.openpty()
        env = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1"}
        self.process = subprocess.Popen([sys.executable, "-c", self.RUN, ROOT / "cognito_run.py", *args], stdin=far_end, stdout=far_end,
                                        stderr=far_end, start_new_session=True, env=env)
        os.close(far_end)
        self.unread = ""

    def read(self) -> None:
        ready, _, _ = select.select([self.fd], [], [], 120)
        assert ready, f"there came no more than {self.unread!r}"
        self.unread += os.read(self.fd, 65536).decode(errors="replace")

    def until(self, text: str) -> str:
        """Wait for a text; what came before it."""
        while text not in self.unread:
            self.read()
        before, _, self.unread = self.unread.partition(text)
        return before

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())


def test_the_script_on_a_terminal():
    """A line of an earlier session is edited into a command; then an answer that Ctrl-C stops, another command, Ctrl-D."""
    Path("state/cognito").mkdir(parents=True)
    Path("state/cognito/history").write_text("\n# earlier\n+/halp\n")
    screen = Terminal("--model", "tiny", "--dtype", "float32", "--docs", "notes", "--max-new-tokens", "20000")
    screen.until("a question, or /help")
    screen.type("\x1b[A")
    screen.until("/halp")
    screen.type("\x7f\x7f\x7felp\r")
    assert "/budget" in screen.until("end the session")
    screen.until("a question, or /help")
    screen.type(f"{QUESTIONS[0]}\r")
    screen.until("\x1b[?2004l\r\n")  # the prompt is done with the line
    while len(screen.unread) < 200:  # of the answer
        screen.read()
    screen.type("\x03")
    assert "KV cache" not in screen.until("interrupted; Ctrl-C again ends the session")
    screen.until("a question, or /help")
    screen.type("/why\r")
    screen.until("no question has been answered yet")
    screen.until("a question, or /help")
    screen.type("\x04")
    assert screen.process.wait(timeout=60) == 0
    with contextlib.suppress(OSError):  # the far end is closed
        while True:
            screen.read()
    assert not re.search("Traceback|Exception|Error", screen.unread)
    os.close(screen.fd)
