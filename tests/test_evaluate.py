"""What the evaluations share: the passages' order, what is kept of the answer's passage, thinking, torn needles, flags."""

import json
import types
from dataclasses import dataclass
from pathlib import Path

import eval_niah as niah
import eval_squad as squad
import eval_stress as stress
import pytest
import torch

CPU = dict(model="tiny", device="cpu", dtype="float32", quant="none", reranker="none")
OURS = Path(__file__).parents[1] / "data" / "squad_cognito.json"
ORDERED = {"original": [0, 1, 2, 3, 4], "bm25": [3, 1, 4, 0, 2], "edges": [3, 4, 2, 0, 1]}


@pytest.fixture(autouse=True)
def offline_in_an_empty_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for script in (niah, squad, stress):
        monkeypatch.setattr(script, "hub_unreachable", lambda: True)


def read(path) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def arranged(order: str, trim: int | None) -> tuple[list[str], dict[str, str]]:
    """Five passages that share 1, 3, 0, 5 and 2 words with the question, each its own, and what is made of them."""
    rare = [[f"rare{i}{k}" for k in range(n)] for i, n in enumerate((1, 3, 0, 5, 2))]
    passages = [" ".join(["plain"] * 9 + mine + ["stone"] * (5 - len(mine))) + ". " for mine in rare]
    question = " ".join(sum(rare, []))
    return passages, niah.arrange(passages, question, types.SimpleNamespace(context_order=order, context_trim=trim))


@pytest.mark.parametrize("order", niah.CONTEXT_ORDERS)
@pytest.mark.parametrize("trim", [None, 1, 3, 9])
def test_order_and_trim(order, trim):
    passages, made = arranged(order, trim)
    best = set(ORDERED["bm25"][:trim])
    want = [i for i in ORDERED["original"] if i in best] if order == "original" else ORDERED[order] if trim is None or trim >= 5 else None
    if want is None:
        want = {("bm25", 1): [3], ("bm25", 3): [3, 1, 4], ("edges", 1): [3], ("edges", 3): [3, 4, 1]}[order, trim]
    assert list(made) == [f"passage-{i}" for i in want]
    assert [text.strip() for text in made.values()] == [passages[i].strip() for i in want]
    assert all(text[-1].isspace() for text in made.values())


def test_passages_as_they_stand_are_untouched():
    passages, made = arranged("original", None)
    assert list(made.values()) == passages


@pytest.mark.parametrize("text, thinking, want", [
    ("Paris", False, ("Paris", False)), ("<think>\nhm\n</think>\n\nParis\n", False, ("Paris", False)),
    ("<think>\nit could be Rome", False, ("", True)), ("Well <think> hm", False, ("Well", True)),
    ("hm</think>Paris", True, ("Paris", False)), ("it could be Rome", True, ("", True)), ("", False, ("", False)),
    ("<think>a</think><think>b</think> Paris", False, ("Paris", False)),
])
def test_thinking_is_no_answer(monkeypatch, text, thinking, want):
    """And the row says where the answer ended within it; `thinking`: the template has opened the block."""
    class Saying(niah.NeedleRun):
        def generate(self, name, prompt, policy):
            assert niah.opens_thinking(prompt) == thinking and niah.final_answer(prompt, text) == want[0]
            return niah.Generation(text=text, n_prompt_tokens=len(prompt.input_ids), n_read=len(prompt.input_ids), prefill_s=1.0)

    tokenizer = niah.load_tokenizer("tiny")
    tokenizer.chat_template += "<think>\n" * thinking
    monkeypatch.setattr(niah, "load_tokenizer", lambda name: tokenizer)
    assert niah.main(niah.Args(**CPU, config="L2", n=1, lengths=(4096,), out=Path("out.jsonl")), Saying) == 0
    row = read("out.jsonl")[0]
    assert (row["prediction"], row["think_truncated"]) == want and row["text"] == text and row["em"] == 0


def test_a_thinking_template_is_asked_not_to(monkeypatch):
    """And where it opens the block all the same, what follows is thinking until the block is closed."""
    tokenizer = niah.load_tokenizer("tiny")
    tokenizer.chat_template += "{% if not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% else %}{{ '<think>' }}{% endif %}"
    prompt = niah.build_prompt(tokenizer, [niah.Segment("a", "Hello.")])
    assert prompt.segments[-1].text.endswith("<think>\n\n</think>\n\n") and not niah.opens_thinking(prompt)
    tokenizer.chat_template += "<think>\n"
    assert niah.opens_thinking(niah.build_prompt(tokenizer, [niah.Segment("a", "Hello.")]))


def kept_share(cache, config, spans) -> float:
    policy = niah.KeptShare(config, spans)
    policy.before_decode(cache)
    assert policy.facts() == {"gold_share": policy.share}
    return policy.share


@pytest.mark.parametrize("ragged", [False, True])
def test_kept_share(ragged):
    from conftest import tiny_config

    config = tiny_config("llama")
    cache = niah.PagedCache(config, ragged=ragged)
    for layer in cache.layers:
        layer.update(torch.randn(1, 2, 40, 8), torch.randn(1, 2, 40, 8))
    assert kept_share(cache, config, [(0, 10), (30, 40)]) == 1
    cache.evict([(5, 15), (20, 25)])
    assert kept_share(cache, config, [(0, 10), (30, 40)]) == 15 / 20
    assert kept_share(cache, config, [(5, 15)]) == 0
    buffer = next(cache.buffers())
    buffer.keep(torch.zeros(buffer.keys.shape[0], 1, dtype=torch.long))  # position 0 alone, in one layer, or head
    n_heads = 1 if ragged else 2
    assert kept_share(cache, config, [(0, 10)]) == pytest.approx((5 * (6 - n_heads) + n_heads) / 60)
    assert kept_share(cache, config, []) == 0  # what holds the answer was trimmed away: it never was in the cache


def test_a_stock_cache_keeps_all():
    from conftest import tiny_config

    config = tiny_config("llama")
    cache = niah.DynamicCache(config=config)
    for i in range(3):
        cache.update(torch.randn(1, 2, 40, 8), torch.randn(1, 2, 40, 8), i)
    assert kept_share(cache, config, [(0, 10)]) == 1


def needles(**given) -> list[niah.Case]:
    return niah.make_needles(niah.Args(**given), "niah", niah.load_tokenizer("tiny"), niah.read_haystack("noise"))


def test_a_torn_needle_is_reported(caplog, monkeypatch):
    """Passages shorter than the needle tear it, and reordering scatters the pieces; ours end with its sentence."""
    assert all(len(case.gold) == 1 for case in needles(context_order="edges", lengths=(8192,)))
    assert "no fair setting" in caplog.text and "torn over several passages in 0" in caplog.text
    monkeypatch.setattr(niah, "PASSAGE_TOKENS", 60)
    caplog.clear()
    assert any(len(case.gold) > 1 for case in needles(lengths=(4096,))) and not caplog.records
    cases = needles(context_order="edges", lengths=(8192,))
    torn = [case for case in cases if len(case.gold) > 1]
    assert torn and len(cases) == 15
    before, _, after = niah.NEEDLE_QUESTION.partition("{key}")
    for case in cases:
        whole = niah.NEEDLE.format(key=case.question.removeprefix(before).removesuffix(after), value=case.answers[0])
        held = [case.passages[name].strip() for name in case.gold]
        assert (len(held) == 1) == any(whole in text for text in case.passages.values())
        assert "".join(held).replace(" ", "").count(whole.replace(" ", "")) == 1
    assert "no fair setting" in caplog.text and f"torn over several passages in {len(torn)}" in caplog.text


def test_a_trimmed_needle_is_reported(caplog):
    cases = needles(context_trim=2, lengths=(4096,), n=5)
    assert len(cases) == 5 and all(len(case.passages) == 2 for case in cases)
    gone = sum(case.gold[0] not in case.passages for case in cases)
    assert f"trimmed away in {gone} of 5" in caplog.text


class Failing:
    """A run whose cases all fail before anything is read; mixed into a script's own."""

    def load(self, model_config):
        return None

    def rank(self, name, case):
        raise RuntimeError("not today")


@pytest.mark.parametrize("config", niah.CONFIGS)
@pytest.mark.parametrize("script, given", [(niah, {}), (stress, {}), (squad, {"squad": OURS, "lengths": (8192,)})])
def test_who_knows_the_question_while_reading(monkeypatch, script, given, config):
    """SQuAD's instruction gives it away to every configuration, a needle's only what ranks by it, or an arranged prompt."""
    monkeypatch.setattr(script, "load_embedder", lambda name: None)
    Run = type("Run", (Failing, niah.NeedleRun if script is niah else script.EvalRun), {})
    given = CPU | dict(config=config, n=1, lengths=(4096,), scorer="random", keep=0.5) | given
    for i, arranging in enumerate(({}, {"context_order": "bm25"}, {"context_trim": 5})):
        out = Path(f"out{i}.jsonl")
        assert script.main(script.Args(**given | arranging, out=out), Run) == 1
        row, ranks = read(out)[0], config in ("L3", "L7")
        assert row["error"] == "RuntimeError: not today" and script.row_fault(row) is None
        assert row["question_aware"] is (script is squad or bool(arranging) or ranks)
        assert row["retriever"] == ("bm25+minilm" if ranks else None)
        assert row["kv_budget"] == ("0.4" if ranks or config == "L4" else None)


@dataclass
class PaintedArgs(niah.Args):
    colour: str = "red"
    """of the haystack"""


def painted(applies=lambda args, config: True, **facts) -> type[niah.NeedleRun]:
    """A run with one more flag in its table."""
    class Painted(niah.NeedleRun):
        def __init__(self, args, task, flags=(), configs=niah.one_config):
            super().__init__(args, task, (*flags, niah.Flag("colour", "colour-{}".format, applies, **facts)), configs)

        def todo(self):
            return iter(())

    return Painted


def opened(Run, args) -> niah.EvalRun:
    """A run without cases, its files open."""
    run = Run(args, "niah", niah.NEEDLE_FLAGS, niah.roomy_config)
    run.open([], niah.haystack_name(args), "noise", {})
    return run


def name_and_hash(Run, config, **given) -> tuple[str, str]:
    file = opened(Run, PaintedArgs(**CPU, config=config, **given)).files[config]
    assert file.path.parent == Path("results/niah/tiny")
    return file.path.name, file.settings_hash


def test_a_new_flag_is_in_the_hash_and_in_the_name():
    plain, red = name_and_hash(niah.NeedleRun, "L2"), name_and_hash(painted(), "L2")
    blue, seeded = name_and_hash(painted(), "L2", colour="blue"), name_and_hash(painted(), "L2", colour="blue", seed=3)
    assert plain[0] == red[0] == "L2.jsonl" and blue[0] == "L2-colour-blue.jsonl" and seeded[0] == "L2-colour-blue-seed3.jsonl"
    assert len({plain[1], red[1], blue[1], seeded[1]}) == 4
    assert opened(painted(), PaintedArgs(**CPU, config="L2", colour="blue")).settings("L2", {})["colour"] == "blue"
    assert niah.main(PaintedArgs(**CPU, config="L2", colour="blue", n=1, lengths=(4096,)), painted()) == 0
    assert Path("results/niah/tiny/L2-n1-colour-blue.jsonl").exists()


@pytest.mark.parametrize("optional", [False, True])
def test_a_flag_that_does_not_apply(optional):
    """It is null in the settings, or where it is optional not there, so that files from before it are resumed."""
    Run = painted(lambda args, config: config.stock, optional=optional)
    assert name_and_hash(Run, "L2", colour="blue") == name_and_hash(Run, "L2") and name_and_hash(Run, "L2")[0] == "L2.jsonl"
    settings = {name: opened(Run, PaintedArgs(**CPU, config=name, colour="blue")).settings(name, {}) for name in ("L1", "L2")}
    assert settings["L1"]["colour"] == "blue" and settings["L2"].get("colour", "not there") == ("not there" if optional else None)
    assert (name_and_hash(Run, "L2") == name_and_hash(niah.NeedleRun, "L2")) == optional
    one, other = (name_and_hash(Run, "L1", colour=colour) for colour in ("red", "blue"))
    assert one[1] != other[1] and (one[0], other[0]) == ("L1.jsonl", "L1-colour-blue.jsonl")


def test_a_flag_whose_value_is_not_hashed():
    """For one that stands for something else in the settings, as surrogates' parameters for where they lie."""
    one, other = (name_and_hash(painted(hashed=False), "L2", colour=colour) for colour in ("red", "blue"))
    assert one[1] == other[1] and one[0] != other[0]


@pytest.mark.parametrize("given, name", [
    (dict(config="L1", chunk_size=128), "L1"), (dict(config="L2", chunk_size=128), "L2-chunk128"),
    (dict(config="L2", kv_budget="0.2", evict_at="chunk", keep=0.5, prune_at="prefill"), "L2"),
    (dict(config="L2", lengths=(5000,)), "L2"), (dict(config="L5", kv_budget="4096"), "L5"),
    (dict(config="L2", haystack="prose", n=2, seed=3), "L2-prose-n2-seed3"), (dict(config="L4", evict_at="chunk"), "L4-inflight"),
    (dict(config="L3", kv_budget="4096", evict_at="chunk"), "L3-budget4096-inflight"),
    (dict(config="L2", context_order="edges", context_trim=4, max_new_tokens=8), "L2-new8-edges-trim4"),
    (dict(config="L6", scorer="key-norm", keep=0.4, pooled=True, prune_at="prefill"), "L6-key-norm-keep0.4-pooled-prefill"),
    (dict(config="L6", scorer="random", threshold=-4.0, window=64), "L6-random-tau-4-window64"),
    (dict(config="L7", scorer="random", keep=0.5, kv_budget="none"), "L7-budgetnone-random-keep0.5"),
    (dict(config="L3", kv_budget="2048", evict_at="chunk", positions="rebased"), "L3-budget2048-inflight-rebased"),
    (dict(config="L3", haystack="prose", positions="ranked"), "L3-prose-ranked"), (dict(config="L4", positions="rebased"), "L4-rebased"),
    (dict(config="L1", positions="rebased"), "L1"), (dict(config="L2", positions="ranked"), "L2"),
])
def test_a_file_is_named_by_what_differs_from_the_defaults(monkeypatch, given, name):
    """Of what applies to its configuration; and what stands in no name changes no answer either."""
    monkeypatch.setattr(niah, "load_embedder", lambda name: None)
    files = opened(niah.NeedleRun, niah.Args(**CPU, **given)).files
    assert [file.path for file in files.values()] == [Path("results/niah/tiny") / f"{name}.jsonl"]
    if name in niah.CONFIGS:
        usual = opened(niah.NeedleRun, niah.Args(**CPU, config=name)).files[name]
        assert files[name].settings_hash == usual.settings_hash
