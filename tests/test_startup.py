"""What stands between the command and the first token: imports, the unpacked model, the way to the Hub."""

import copy
import http.server
import os
import subprocess
import sys
import threading
from pathlib import Path

import cognito_run as core
import huggingface_hub
import pytest
import torch

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "transformers", "numpy", "sentence_transformers")


@pytest.mark.parametrize("script", ["cognito_run.py", "eval_niah.py", "eval_squad.py", "eval_stress.py", "train_kvzap.py"])
@pytest.mark.parametrize("args, code", [(["--help"], 0), (["--no-such-flag"], 2)])
def test_flags_are_read_before_torch(script, args, code):
    done = subprocess.run([sys.executable, "-X", "importtime", ROOT / script, *args], capture_output=True, encoding="utf-8")
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert done.returncode == code and "tyro" in imported and imported.isdisjoint(HEAVY)


@pytest.mark.parametrize("flag, value", [("--config", "L9"), ("--scorer", "best"), ("--kv-budget", "lots"), ("--evict-at", "noon"),
                                         ("--history", "-1"), ("--chunk-size", "0")])
def test_wrong_values_are_refused_before_torch(flag, value, tmp_path):
    """An import of torch would fail: the one found first is no torch."""
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, ROOT / "cognito_run.py", flag, value], env=env, capture_output=True, encoding="utf-8")
    assert done.returncode == 2 and done.stderr.startswith(f"error: {flag}") and done.stderr.count("\n") == 1


def test_every_scorer_has_its_function():
    assert tuple(core.SCORE) == core.SCORERS


class Unpacked:
    """Stands for what a GGUF holds."""

    loads: list = []

    def __init__(self, text: str):
        self.text = text

    def save_pretrained(self, folder):
        (Path(folder) / "part.txt").write_text(self.text)

    @classmethod
    def from_pretrained(cls, source, gguf_file=None, local_files_only=False):
        cls.loads.append(gguf_file)
        return cls(((Path(source) / gguf_file).read_text() if gguf_file else (Path(source) / "part.txt").read_text()))


@pytest.fixture
def unpacked(tmp_path, monkeypatch):
    """A model file and an empty cache; what is loaded, and from the GGUF or not."""
    monkeypatch.setattr(core, "hub_unreachable", lambda: True)
    monkeypatch.setattr(core.platformdirs, "user_cache_path", lambda name: tmp_path / "cache" / name)
    monkeypatch.setattr(Unpacked, "loads", [])
    (tmp_path / "model.gguf").write_text("weights")
    return lambda cached=True: core.from_model(str(tmp_path / "model.gguf"), Unpacked, "float32", cached).text


def test_a_gguf_is_unpacked_once(unpacked, tmp_path):
    assert [unpacked(), unpacked(), unpacked()] == ["weights"] * 3
    assert Unpacked.loads == ["model.gguf", None, None, None]
    (tmp_path / "model.gguf").write_text("others!")  # another content under the same name
    assert unpacked() == "others!"


def test_without_the_cache_nothing_is_written(unpacked, tmp_path):
    assert [unpacked(cached=False), unpacked(cached=False)] == ["weights"] * 2
    assert Unpacked.loads == ["model.gguf"] * 2 and not (tmp_path / "cache").exists()


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "sums"])
def test_a_damaged_copy_is_unpacked_again(unpacked, tmp_path, damage):
    unpacked()
    part, = tmp_path.glob("cache/**/part.txt")
    sums = part.with_name(core.CHECKSUMS)
    {"flip": lambda: part.write_text("weightz"), "truncate": lambda: part.write_text("weigh"), "remove": part.unlink,
     "sums": lambda: sums.write_text("{")}[damage]()
    Unpacked.loads.clear()
    assert unpacked() == unpacked() == "weights" and Unpacked.loads == ["model.gguf", None, None]


def test_a_copy_that_was_cut_short_leaves_nothing(unpacked, tmp_path, monkeypatch):
    def cut_short(self, folder):
        (Path(folder) / "part.txt").write_text("wei")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Unpacked, "save_pretrained", cut_short)
        unpacked()
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert unpacked() == "weights"


def test_a_cache_that_cannot_be_written(unpacked, tmp_path, caplog):
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert unpacked() == "weights" and "cannot be written" in caplog.text


def test_the_unpacked_model_is_the_gguf(smollm2, smollm2_tokenizer):
    """Configuration, tokenizer, and every weight and buffer, bit for bit."""
    config, tokenizer = core.load_config("smollm2", cached=False), core.load_tokenizer("smollm2", cached=False)
    kept = core.load_config("smollm2").to_dict()
    assert {**config.to_dict(), "_name_or_path": None} == {**kept, "_name_or_path": None}
    assert tokenizer.backend_tokenizer.to_str() == smollm2_tokenizer.backend_tokenizer.to_str()
    assert tokenizer.chat_template == smollm2_tokenizer.chat_template
    assert tokenizer.special_tokens_map == smollm2_tokenizer.special_tokens_map
    runtime = core.resolve_runtime("smollm2", "cpu", "float32", "none")
    fresh = core.load_model(runtime, copy.deepcopy(config), tokenizer, cached=False)
    assert fresh.eos_ids == smollm2.eos_ids
    for kind in ("named_parameters", "named_buffers"):
        mine, theirs = dict(getattr(fresh.model, kind)()), dict(getattr(smollm2.model, kind)())
        assert mine.keys() == theirs.keys()
        assert all(tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name]) for name, tensor in mine.items())


@pytest.fixture
def server():
    """A web server that answers 404 to whatever it is asked, and notes what."""
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            asked.append((self.command, self.path))
            self.send_error(404)

        do_CONNECT = do_HEAD

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{httpd.server_port}", asked
        httpd.shutdown()


@pytest.fixture
def ask_hub(monkeypatch):
    """Ask whether the Hub answers, at this address and in this environment, of its client's settings."""
    for name in [name for name in os.environ if name.upper().endswith("_PROXY")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(core.huggingface_hub.constants, "HF_HUB_OFFLINE", False)

    def ask(endpoint: str, **env: str) -> bool:
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(core.huggingface_hub.constants, "ENDPOINT", endpoint)
        huggingface_hub.close_session()  # a new client reads the environment
        core.hub_unreachable.cache_clear()
        return not core.hub_unreachable()

    yield ask
    huggingface_hub.close_session()
    core.hub_unreachable.cache_clear()


def test_a_mirror_is_asked_instead_of_the_hub(server, ask_hub):
    url, asked = server
    assert ask_hub(url) and [command for command, _ in asked] == ["HEAD"]


def test_a_proxy_is_asked_for_the_hub(server, ask_hub):
    url, asked = server
    assert not ask_hub("https://hub.invalid", HTTPS_PROXY=url)  # it lets nothing through
    assert asked == [("CONNECT", "hub.invalid:443")]


def test_a_hub_that_is_no_address(ask_hub):
    assert not ask_hub("http://[") and not ask_hub("http://127.0.0.1:9")
