# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = [
#   "matplotlib",
#   "numpy",
#   "scipy",
#   "tyro",
# ]
# [tool.uv]
# exclude-newer = "2026-11-25T00:00:00Z"
# ///
"""From JSONL records to tables with intervals, paired tests and pictures.

    uv run bootstrap.py                                       # every record under results/
    uv run bootstrap.py results/niah --compare L2 L3          # another pair of arms
    uv run bootstrap.py --markdown results/README.md --plots results/plots --json results/bootstrap.json

Reads   results/<task>/<model>/<arm>.jsonl, a case per line, as the eval scripts write them, and *.trace.jsonl, the KV bytes of
        traced cases. An *arm* is a file's stem (`L3`, `L3-chunk`) less the name of the haystack: `L3-prose` is arm L3 on the
        haystack "prose". No table pools models, hardware (its name, device, dtype, quant) or haystacks. A folder named
        `ablation`, `peer` or `questions` is passed over where it is found below another, and read whole where it is named.
Prints  the tables in Markdown; the last line is a JSON object: rows, comparisons, what was left out, files written.
Writes  --markdown: the tables, between two marker lines of FILE; with --block NAME between the two that bear NAME, so that one
        page can hold several. --plots: PNG and SVG. --json: every cell and comparison.

What is estimated
    EM of a cell   k/n with Wilson's interval, which keeps its width at 0 and 100 % where a bootstrap has none. It takes cases as
                   independent: several questions on one paragraph make it a little too narrow.
    ΔEM, ΔF1       d_i = score_A(i) − score_B(i) over the cases that *both* arms finished, Δ = mean(d). Each of B resamples draws
                   whole groups (`group_id`: a paragraph, a haystack) with replacement inside each context length h:
                   d* = Σ_h (n_h/n) · Σ(sums drawn) / Σ(sizes drawn). Interval: the 2.5th and the 97.5th percentile of d*.
    p, bootstrap   min(1, 2·min(#{d* ≤ 0} + 1, #{d* ≥ 0} + 1) / (B + 1)): never 0, and 1 when all pairs are equal.
    p, sign flip   under H0 each group's difference has either sign. Exact up to 14 differing groups, else drawn (marked ≈). For
                   EM with one case per group it is McNemar's exact test, 2·P(Bin(b + c, ½) ≥ max(b, c)).
    Bonferroni     every p is held to α/m, α = 0.05, m = the comparisons made in this run. Intervals are not adjusted.
    least ΔEM      the smallest that n pairs could have shown: with one differing pair in each of k groups, all for the same side,
                   the sign-flip p is 2·2^−k; so k = ⌈1 + log2(m/α)⌉ and least ΔEM = k/n. For n = 15, m = 3: 7/15 = 46.7 pp.

What of the thesis (its figures: reported there, T4, Mistral-7B-Instruct-v0.3 NF4; none measured by us)
    Its counts leave the pairing open: L4 may have been right where L3 was wrong. `thesis_pairings` sets every pairing against the
    bootstrap's exact distribution. Only the most favourable one, no case lost by L3, gives the reported intervals:
        NIAH    30/30 − 24/30: [+6.7, +36.7], the one pairing there is
        SQuAD   11/15 −  6/15: [+13.3, +60.0]; one case lost [0.0, +60.0], p 0.053; four lost [−13.3, +73.3], p 0.19
        Stress   9/18 −  3/18: [+11.1, +55.6]; one case lost [+5.6, +61.1], p 0.025; three lost [0.0, +66.7], p 0.089
    NIAH's comes from resampling 4k and 8k together; stratified it is [+6.7, +33.3].
    Its p (0.010, 0.007, 0.005) are not the percentile bootstrap's (0.0025, 0.0046, 0.0014): 2000 resamples give NIAH's 0.010
    about 3 times in 10,000. Nearer is the shifted bootstrap, P(|d* − Δ| ≥ |Δ|): 0.0107, 0.0108, 0.0046.
    The exact sign-flip test gives 0.031, 0.063, 0.031: none of the three passes the thesis's own α/4 = 0.0125.

What is refused, what is counted
    Refused, with file and line: a line that is not one JSON object (`}{` too), a row that breaks the contract (a missing field,
    NaN, a score out of range), two tasks, models, configs or settings in one file, two settings in one arm, two different
    finished rows of a case, a case with other gold answers in the other arm.
    Handled, with a count printed: a torn last line without a line end (a killed run) is dropped; blank lines, a byte-order mark
    and CRLF are skipped; identical rows count once; a finished row replaces the failed tries of its case. A case that failed or
    is missing in one arm makes no pair; failed cases stay out of EM and stand beside it as "OOM ×3" or "error ×1".
    An error is one sentence on stderr and exit code 2.

Sources: Efron & Tibshirani 1993, An Introduction to the Bootstrap (percentile interval: ch. 13; shifted test: ch. 16). Davison &
Hinkley 1997, Bootstrap Methods and their Application (whole groups resampled: ch. 3; the +1 in p: ch. 4). Wilson 1927, JASA 22.
McNemar 1947, Psychometrika 12. Differs from the thesis: strata, groups, the +1, and the sign-flip test beside it.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from scipy import stats

if TYPE_CHECKING:
    import tyro
    from matplotlib.figure import Figure

ALPHA = 0.05
DEFAULT_ARMS = ("L3", "L4")
MAX_EXACT_FLIPS = 2**14  # sign patterns enumerated; beyond this many the sign-flip test draws them
ZERO = 1e-12  # a sum of F1 differences that should be 0 comes out of floating point as ±1e-17
GIB, MIB = 2**30, 2**20

TASK_NAMES = {"niah": "NIAH", "squad": "SQuAD", "stress": "Stress"}  # in the thesis's column order
F1_TASKS = {"squad"}  # elsewhere the answer is one number, and F1 says nothing that EM does not
NEEDLE_TASKS = {"niah", "stress"}
RECORD_NAME = re.compile(r"L[1-7](-.+)?\.jsonl")
ASIDE = {"ablation", "peer", "questions"}  # folders that answer questions of their own, and would crowd the main tables
OUT_OF_MEMORY = re.compile(r"out.?of.?memory|memoryerror|\boom\b", re.IGNORECASE)

ONE_PER_FILE = ("task", "model", "config", "settings_hash")
TRACE_EVENTS = ("prefill_chunk", "evict", "page_in", "after_eviction", "decode")

REPORTED_BY = "reported: T4, Mistral-7B NF4"
REPORTED_COLUMNS = {  # column -> task, context lengths
    "NIAH 4k": ("niah", (4096,)),
    "NIAH 8k": ("niah", (8192,)),
    "SQuAD 8k": ("squad", (8192,)),
    "Stress 16/32k": ("stress", (16384, 32768)),
}
REPORTED = {  # config -> EM % per column, F1 % and its gap, peak memory, mean ITL
    "L1": ("100", "OOM", "OOM", "OOM", "–", "10.0 GB", "–"),
    "L2": ("100", "100", "73.3", "50", "90.4 (+17.1)", "5.11–5.95 GB", "109"),
    "L3": ("100", "100", "73.3", "50", "90.4 (+17.1)", "5.11–5.95 GB", "107"),
    "L4": ("100", "60", "40", "16.7", "51.8 (+11.8)", "5.11–6.34 GB", "90"),
    "L5": ("100", "100", "73.3", "50", "88.1 (+14.8)", "5.11–5.96 GB", "108"),
}
REPORTED_PAIRED = {  # benchmark -> pairs, L3 right, L4 right, interval in pp, p
    "NIAH 4k/8k": (30, 30, 24, (6.7, 36.7), 0.010),
    "SQuAD 8k": (15, 11, 6, (13.3, 60.0), 0.007),
    "Stress 16k/32k": (18, 9, 3, (11.1, 55.6), 0.005),
}
REPORTED_NOTE = (
    "Lines marked *reported* are the thesis's own figures, on a T4 with Mistral-7B-Instruct-v0.3 in NF4; they were not measured "
    "by us. L4, H2O in the thesis, is the key-norm proxy in both and not accumulated attention."
)
PAIRINGS_NOTE = (
    "Every pairing that the thesis's counts allow (cases right only in L3 / only in L4), with what its bootstrap tends to as B "
    "grows, unstratified. Only the pairings without a loss give the reported intervals. The reported p are nearer to the shifted "
    "bootstrap than to the percentile bootstrap, and the exact sign-flip test puts none below the thesis's α/4 = 0.0125."
)

MARKERS = "osD^vP*X<>"
MIN_WIDTH = 5.5  # inches: what the title of a single panel needs
LINE_STYLES = ("-", "--", "-.", ":")


@dataclass
class Args:
    paths: tyro.conf.Positional[tuple[Path, ...]] = (Path("results"),)
    """JSONL files, or folders searched for L1…L7 records and *.trace.jsonl."""
    compare: tuple[str, str] | None = None
    """Two arms, A and B, as their files are named; Δ is A − B. Without it: L3 and L4."""
    n_resamples: int = 2000
    """B, the resamples of each bootstrap."""
    seed: int = 0
    """Every comparison starts from this seed, so that none depends on which others are made."""
    markdown: Path | None = None
    """Write the tables between the marker lines of this file (made if missing)."""
    block: str = ""
    """Name that the marker lines bear, where a file holds several blocks of tables."""
    plots: Path | None = None
    """Write the pictures to this folder, PNG and SVG."""
    json: Path | None = None
    """Write every cell and comparison to this file."""


# >>> core:usage (canonical: cognito_run.py)
class Refusal(Exception):
    """One sentence for the user: what was got, what is expected, what to do. Scripts print it and exit with 2."""


def check_writable(path: Path, flag: str) -> None:
    """Refuse an output file that cannot be written, before the work that it is for."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a"):
            pass
    except OSError as error:
        raise Refusal(f"cannot write {path} ({error.strerror}); choose another {flag}") from None


def run_main(main: Callable[[object], int], args) -> int:
    """Run a script's main; a refusal is one sentence on stderr and exit code 2."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        return main(args)
    except Refusal as refusal:
        print(f"error: {refusal}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130


# <<< core:usage


# >>> core:schema (canonical: eval_niah.py)
KINDS = {  # what a field may hold, in words and as a test; a "?" behind it allows null
    "name": ("a text that is not empty", lambda value: isinstance(value, str) and value != ""),
    "text": ("a text", lambda value: isinstance(value, str)),
    "texts": ("a list of texts that is not empty", lambda value: isinstance(value, list) and value != []
              and all(isinstance(one, str) for one in value)),
    "flag": ("true or false", lambda value: isinstance(value, bool)),
    "count": ("a whole number from 0 on", lambda value: type(value) is int and value >= 0),
    "number": ("a finite number", lambda value: type(value) in (int, float) and abs(value) <= sys.float_info.max),
    "share": ("a number from 0 to 1", lambda value: type(value) in (int, float) and 0 <= value <= 1),
    "percent": ("a number from 0 to 100", lambda value: type(value) in (int, float) and 0 <= value <= 100),
    "object": ("an object", lambda value: isinstance(value, dict)),
}
CONTRACT = {  # the fields that every row has; they are never renamed
    "task": "name", "config": "name", "model": "name", "case_id": "name", "group_id": "text?", "seed": "count?",
    "haystack": "text?", "context_length": "count", "depth_percent": "percent?", "n_prompt_tokens": "count?",
    "n_new_tokens": "count?", "answers": "texts", "prediction": "text?", "em": "share?", "f1": "share?",
    "question_aware": "flag?", "compression_ratio": "share?", "kv_bytes_full": "count?", "kv_bytes_peak": "count?",
    "kv_bytes_decode": "count?", "peak_memory_bytes": "count?", "memory_kind": "text?", "ttft_s": "number?",
    "prefill_tokens_per_s": "number?", "itl_ms_mean": "number?", "itl_ms_p95": "number?", "evictions": "count?",
    "finish_reason": "text?", "error": "text?", "device": "name", "dtype": "name", "quant": "text?", "threads": "count?",
    "versions": "object?", "script_sha256": "text?", "settings_hash": "text?", "created": "text?",
}
ADDED = {  # fields that came later, or that only some tasks and configurations have
    "hardware": "text?", "text": "text?", "think_truncated": "flag?", "retriever": "text?", "retrieval_s": "number?",
    "gold_share": "share?", "gold_kept": "flag?", "needle_kept": "flag?", "needle_fragments": "count?", "rope": "text?",
    "rope_factor": "number?", "kv_budget": "text?", "evict_at": "text?", "positions": "text?", "evicted_segments": "count?",
    "cuts": "count?", "evicted_entries": "count?", "scorer": "text?", "threshold": "number?", "keep": "share?", "pooled": "flag?",
    "window": "count?", "prune_at": "text?", "kv_bytes_oracle": "count?", "shared_prefill": "flag?", "question": "text?",
    "n_seen": "count?", "n_read": "count?",
}
SCHEMA = CONTRACT | ADDED


def row_fault(row: dict) -> str | None:
    """What is wrong with a row, in words; None for a row of the contract. A reader passes over fields that it does not know."""
    missing = [name for name in CONTRACT if name not in row]
    if missing:
        return f"lacks {', '.join(missing)}"
    for name in filter(row.__contains__, SCHEMA):
        value, kind = row[name], SCHEMA[name]
        words, test = KINDS[kind.removesuffix("?")]
        if not (test(value) or (value is None and kind.endswith("?"))):
            return f"{name} is {value!r}, expected {words}" + (" or null" if kind.endswith("?") else "")
    if row["error"] is None and row["em"] not in (0, 1):
        return f"em is {row['em']!r}, expected 0 or 1 in a row without error"
    return None


# <<< core:schema


# --- reading -----------------------------------------------------------------------------------------------------------------


@contextmanager
def file_access(verb: str, path: Path | str, advice: str) -> Iterator[None]:
    """What the system refuses to do with a file becomes one sentence for the user."""
    try:
        yield
    except OSError as error:
        raise Refusal(f"cannot {verb} {path} ({error.strerror or error}); {advice}") from None


def kind_of(file: Path, named: Path) -> str:
    """What a file at or under a path of the command line is: a record, a trace, or what it is counted as when passed over."""
    aside = ASIDE.intersection(file.relative_to(named).parts[:-1])
    if aside:
        return f"{min(aside)} files ignored (name that folder to read them)"
    if file.name.endswith(".trace.jsonl"):
        return "trace"
    chosen = file == named or named.resolve().name in ASIDE  # a peer's methods have names of their own
    return "record" if chosen or RECORD_NAME.fullmatch(file.name) else "other .jsonl files ignored"


def find_files(paths: tuple[Path, ...], tally: Counter) -> tuple[list[Path], list[Path]]:
    """Record files and trace files, each once and in sorted order."""
    found: dict[str, set[Path]] = defaultdict(set)
    for path in paths:
        with file_access("read", path, "name files that can be read"):
            if not path.exists():
                raise Refusal(f"{path} does not exist; run an eval script first (uv run eval_niah.py), or name files that do")
            for file in path.rglob("*.jsonl") if path.is_dir() else [path]:
                found[kind_of(file, path)].add(file.resolve())
    records, traces = found.pop("record", set()), found.pop("trace", set())
    tally.update({kind: len(files - records - traces) for kind, files in found.items()})  # another path may have named them
    return sorted(records), sorted(traces)


def read_jsonl(path: Path, tally: Counter) -> list[tuple[str, dict]]:
    """(file:line, object) of each line; damage is counted or refused."""
    with file_access("read", path, "name files that can be read"):
        data = path.read_bytes()
    if data.startswith(b"\xef\xbb\xbf"):
        data = data[3:]
        tally["byte-order marks skipped"] += 1
    lines, rows = data.split(b"\n"), []
    if any(line.endswith(b"\r") for line in lines):
        tally["files with CRLF line ends"] += 1
    for number, line in enumerate(lines, start=1):
        where, cut_short = f"{path}:{number}", number == len(lines)  # what follows the last \n is b"" in a whole file

        def refuse_constant(name: str, where: str = where) -> None:
            raise Refusal(f"{where} holds {name}, which is no JSON number; write null for what is unknown")

        if not line.strip():
            tally["blank lines skipped"] += not cut_short
            continue
        try:
            row = json.loads(line.decode("utf-8"), parse_constant=refuse_constant)
        except ValueError as error:
            glued = isinstance(error, json.JSONDecodeError) and error.msg == "Extra data"
            if cut_short and not glued:
                tally["torn last lines dropped"] += 1
                continue
            fault = "more than one JSON value" if glued else "no valid JSON"
            raise Refusal(f"{where} holds {fault}; mend or delete the line, then resume the run") from None
        if not isinstance(row, dict):
            raise Refusal(f"{where} holds a JSON {type(row).__name__}; expected one object a line")
        rows.append((where, row))
    return rows


def read_records(files: list[Path], tally: Counter) -> list[dict]:
    """Checked rows of all files, each with its `arm`, `hardware` and `where` (file:line)."""
    rows = []
    for path in files:
        first = None
        for where, row in read_jsonl(path, tally):
            if fault := row_fault(row):
                raise Refusal(f"{where}: {fault}; mend or delete the row, or name files that an eval script wrote")
            first = first or row
            for field in ONE_PER_FILE:
                if row[field] != first[field]:
                    raise Refusal(f"{where}: {field} is {row[field]!r} but {first[field]!r} above; keep one {field} in a file")
            arm = f"-{path.stem}-".replace(f"-{row['haystack']}-", "-", 1).strip("-")
            quant = None if row["quant"] == "none" else row["quant"]
            hardware = " ".join(filter(None, (row.get("hardware"), row["device"], row["dtype"], quant)))
            rows.append(row | {"arm": arm, "hardware": hardware, "where": where})
    return rows


def settle(rows: list[dict], tally: Counter) -> list[dict]:
    """One row per case of an arm, sorted, so that neither line nor file order reaches a digit."""

    def arm_key(row: dict) -> tuple:
        return row["model"], row["hardware"], row["haystack"] or "", row["task"], row["arm"]

    def case_key(row: dict) -> tuple:
        return *arm_key(row), row["context_length"], row["case_id"]

    settled = []
    rows = sorted(rows, key=lambda row: (*case_key(row), row["where"]))
    for _, group in groupby(rows, arm_key):
        tries = list(group)
        for row in tries:
            if row["settings_hash"] != tries[0]["settings_hash"]:
                raise Refusal(
                    f"{row['where']} has other settings than {tries[0]['where']}, but both are arm {row['arm']}; rename one file"
                )
        for _, same in groupby(tries, case_key):
            settled.append(settle_case(list(same), tally))
    return settled


def settle_case(tries: list[dict], tally: Counter) -> dict:
    """The finished row of a case, or its latest failure."""

    def content(row: dict) -> str:
        return json.dumps({field: value for field, value in row.items() if field != "where"}, sort_keys=True)

    distinct = {content(row): row for row in tries}
    tally["identical rows counted once"] += len(tries) - len(distinct)
    finished = [row for row in distinct.values() if row["error"] is None]
    if len(finished) > 1:
        first, second = (row["where"] for row in finished[:2])
        raise Refusal(
            f"{second}: case {tries[0]['case_id']} is finished already at {first} with other values; keep one row of it"
        )
    tally["failed tries replaced by a later try"] += len(distinct) - 1
    return finished[0] if finished else max(distinct.values(), key=lambda row: (row["created"] or "", content(row)))


def read_traces(files: list[Path], tally: Counter) -> dict[Path, list[dict]]:
    """Trace rows of each file."""
    traces = {}
    _, is_count = KINDS["count"]
    for path in files:
        traces[path] = []
        for where, row in read_jsonl(path, tally):
            whole = row.get("event") in TRACE_EVENTS and isinstance(row.get("case_id"), str)
            if not whole or not all(is_count(row.get(field)) for field in ("step", "n_seen", "kv_bytes")):
                raise Refusal(
                    f"{where} is no trace row; expected event ({', '.join(TRACE_EVENTS)}), case_id, step, n_seen and kv_bytes"
                )
            traces[path].append(row)
    return traces


# --- statistics --------------------------------------------------------------------------------------------------------------


def resampled_means(values: np.ndarray, strata: np.ndarray, groups: np.ndarray, n_resamples: int, seed: int) -> np.ndarray:
    """(B,) means of values (n,): whole groups drawn with replacement inside each stratum, strata at their own weight."""
    rng = np.random.default_rng(seed)
    means = np.zeros(n_resamples)
    for stratum in np.unique(strata):
        inside = strata == stratum
        _, member = np.unique(groups[inside], return_inverse=True)
        sums, sizes = np.bincount(member, weights=values[inside]), np.bincount(member)
        drawn = rng.integers(len(sums), size=(n_resamples, len(sums)))  # (B, groups)
        means += inside.mean() * sums[drawn].sum(axis=1) / sizes[drawn].sum(axis=1)
    return means


def percentile_interval(means: np.ndarray) -> tuple[float, float]:
    low, high = np.percentile(means, [100 * ALPHA / 2, 100 * (1 - ALPHA / 2)])
    return float(low), float(high)


def bootstrap_p(deltas: np.ndarray) -> float:
    """Two-sided p of H0: Δ = 0 from resampled Δ (B,)."""
    at_most, at_least = np.count_nonzero(deltas <= ZERO), np.count_nonzero(deltas >= -ZERO)
    return min(1.0, 2 * (min(at_most, at_least) + 1) / (len(deltas) + 1))


def sign_flip_p(group_sums: np.ndarray, seed: int) -> tuple[float, bool]:
    """(p, exact?) of H0: each group's difference has either sign. Groups without a difference change nothing and are left out."""
    moved = group_sums[np.abs(group_sums) > ZERO]
    if len(moved) < 2:  # scipy asks for two; of one group's two signs each is as likely
        return 1.0, True
    rng = np.random.default_rng(seed)
    test = stats.permutation_test(
        (moved,), np.sum, permutation_type="samples", n_resamples=MAX_EXACT_FLIPS, vectorized=True, rng=rng
    )
    return float(test.pvalue), 2 ** len(moved) <= MAX_EXACT_FLIPS


def least_delta(n_pairs: int, n_groups: int, alpha: float) -> float | None:
    """The smallest ΔEM that can be shown at this α, None where not even every group on one side would do."""
    needed = math.ceil(1 - math.log2(alpha))
    return needed / n_pairs if needed <= n_groups else None


def wilson(n_right: int, n: int) -> tuple[float, float]:
    interval = stats.binomtest(n_right, n).proportion_ci(1 - ALPHA, method="wilson")
    return float(interval.low), float(interval.high)


def thesis_pairings(n: int, n_right_a: int, n_right_b: int) -> list[dict]:
    """Every pairing that the two counts allow, with what the bootstrap tends to as B grows (unstratified, as in the thesis).

    n pairs with `gained` d = +1 and `lost` d = −1: n·d* is a sum of n independent draws, so its distribution is the n-fold
    convolution of (lost, n − gained − lost, gained)/n and nothing needs to be drawn.
    """
    pairings = []
    for lost in range(min(n_right_b, n - n_right_a) + 1):
        gained = n_right_a - n_right_b + lost
        mass = np.ones(1)
        for _ in range(n):
            mass = np.convolve(mass, np.array([lost, n - gained - lost, gained]) / n)
        total = np.arange(-n, n + 1)  # n·d*, beside mass (2n + 1,)
        low, high = total[np.searchsorted(np.cumsum(mass), [ALPHA / 2, 1 - ALPHA / 2])] / n
        delta = gained - lost
        pairings.append({
            "gained": gained, "lost": lost, "delta": delta / n, "ci_low": float(low), "ci_high": float(high),
            "p_bootstrap": float(min(1, 2 * min(mass[total <= 0].sum(), mass[total >= 0].sum()))),
            "p_shifted": float(mass[np.abs(total - delta) >= delta].sum()),
            "p_sign_flip": float(stats.binomtest(gained, gained + lost).pvalue),
        })
    return pairings


# --- cells and comparisons ---------------------------------------------------------------------------------------------------


@dataclass
class Cell:
    """One arm on one task, haystack and context length. Scores are fractions over the n finished cases."""

    task: str
    haystack: str | None
    context_length: int
    arm: str
    n: int
    n_right: int
    n_out_of_memory: int
    n_failed: int
    em_low: float | None
    em_high: float | None
    f1: float | None
    f1_low: float | None
    f1_high: float | None
    peak_memory_bytes: tuple[float, float] | None  # smallest and largest; below, means over the cases
    kv_bytes_peak: float | None
    kv_bytes_decode: float | None
    compression_ratio: float | None
    itl_ms: float | None
    itl_ms_quartiles: tuple[float, float] | None


def known(rows: list[dict], field: str) -> np.ndarray:
    return np.array([row[field] for row in rows if row[field] is not None], dtype=float)


def mean_of(rows: list[dict], field: str) -> float | None:
    values = known(rows, field)
    return float(values.mean()) if len(values) else None


def strata_and_groups(rows: list[dict]) -> tuple[np.ndarray, np.ndarray]:
    """Context length and group of each row; a case without a group is its own."""
    strata = np.array([row["context_length"] for row in rows])
    return strata, np.array([row["case_id"] if row["group_id"] is None else row["group_id"] for row in rows])


def make_cell(rows: list[dict], n_resamples: int, seed: int) -> Cell:
    """Rows of one arm, task and haystack (and length, except where the thesis pools two)."""
    done = [row for row in rows if row["error"] is None]
    n_right = sum(int(row["em"]) for row in done)
    n_out_of_memory = sum(bool(OUT_OF_MEMORY.search(row["error"] or "")) for row in rows)
    em_low, em_high = wilson(n_right, len(done)) if done else (None, None)
    scored = [row for row in done if row["f1"] is not None and row["task"] in F1_TASKS]
    strata, groups = strata_and_groups(scored)
    f1_low = f1_high = None
    if len(set(groups)) > 1:
        f1_low, f1_high = percentile_interval(resampled_means(known(scored, "f1"), strata, groups, n_resamples, seed))
    memory, itl = known(done, "peak_memory_bytes"), known(done, "itl_ms_mean")
    return Cell(
        task=rows[0]["task"],
        haystack=rows[0]["haystack"],
        context_length=rows[0]["context_length"],
        arm=rows[0]["arm"],
        n=len(done),
        n_right=n_right,
        n_out_of_memory=n_out_of_memory,
        n_failed=len(rows) - len(done) - n_out_of_memory,
        em_low=em_low,
        em_high=em_high,
        f1=mean_of(scored, "f1"),
        f1_low=f1_low,
        f1_high=f1_high,
        peak_memory_bytes=(memory.min(), memory.max()) if len(memory) else None,
        kv_bytes_peak=mean_of(done, "kv_bytes_peak"),
        kv_bytes_decode=mean_of(done, "kv_bytes_decode"),
        compression_ratio=mean_of(done, "compression_ratio"),
        itl_ms=mean_of(done, "itl_ms_mean"),
        itl_ms_quartiles=tuple(np.percentile(itl, [25, 75]).tolist()) if len(itl) else None,
    )


@dataclass
class Comparison:
    """Arm A − arm B on one task and haystack, all context lengths. Scores and Δ are fractions."""

    model: str
    hardware: str
    task: str
    haystack: str | None
    metric: str
    arm_a: str
    arm_b: str
    n_pairs: int
    n_groups: int
    n_in_one_arm: int  # cases that the other arm lacks
    n_failed: int  # cases that failed in either arm
    obstacle: str | None = None  # why nothing below is known
    score_a: float | None = None
    score_b: float | None = None
    kv_bytes_a: float | None = None
    kv_bytes_b: float | None = None
    delta: float | None = None
    ci_low: float | None = None
    ci_high: float | None = None
    p_bootstrap: float | None = None
    p_sign_flip: float | None = None
    sign_flip_exact: bool | None = None
    both_only_a_only_b_neither: tuple[int, int, int, int] | None = None  # McNemar's table, EM only


def pair_cases(rows: list[dict], arm_a: str, arm_b: str) -> tuple[list[tuple[dict, dict]], int, int]:
    """Pairs finished in both arms, in case order; how many cases one arm lacks; how many failed in either."""
    a, b = ({(row["context_length"], row["case_id"]): row for row in rows if row["arm"] == arm} for arm in (arm_a, arm_b))
    pairs, n_failed = [], 0
    for case in sorted(a.keys() & b.keys()):
        for field in ("answers", "group_id", "depth_percent"):
            if a[case][field] != b[case][field]:
                here, there = b[case]["where"], a[case]["where"]
                raise Refusal(f"{here}: {field} of {case[1]} differs from {there}, not the same case; run both arms alike")
        if a[case]["error"] is None and b[case]["error"] is None:
            pairs.append((a[case], b[case]))
        else:
            n_failed += 1
    return pairs, len(a.keys() ^ b.keys()), n_failed


def compare(rows: list[dict], metric: str, arms: tuple[str, str], n_resamples: int, seed: int) -> Comparison:
    """Paired tests of one metric; rows are those of one model, hardware, task and haystack."""
    pairs, n_in_one_arm, n_failed = pair_cases(rows, *arms)
    pairs = [(a, b) for a, b in pairs if a[metric] is not None and b[metric] is not None]
    left, right = [a for a, _ in pairs], [b for _, b in pairs]
    a, b = known(left, metric), known(right, metric)
    differences = a - b  # (n,)
    strata, groups = strata_and_groups(left)
    group_sums: dict[tuple, float] = defaultdict(float)
    for stratum, group, difference in zip(strata.tolist(), groups.tolist(), differences.tolist(), strict=True):
        group_sums[stratum, group] += difference
    shared = {field: rows[0][field] for field in ("model", "hardware", "task", "haystack")}
    result = Comparison(**shared, metric=metric, arm_a=arms[0], arm_b=arms[1], n_pairs=len(pairs), n_groups=len(group_sums),
                        n_in_one_arm=n_in_one_arm, n_failed=n_failed)
    if len(pairs) < 2:
        result.obstacle = f"{len(pairs)} finished pair{'s' * (len(pairs) != 1)}, at least 2 are needed"
        return result
    groups_at = Counter(stratum for stratum, _ in group_sums)
    lone = [length_name(stratum) for stratum, count in groups_at.items() if count == 1]
    if lone:  # resampling one group always returns it: an interval of no width, which would be a lie
        result.obstacle = f"one group only at {', '.join(lone)}, so nothing there can be resampled"
        return result

    deltas = resampled_means(differences, strata, groups, n_resamples, seed)
    result.score_a, result.score_b, result.delta = float(a.mean()), float(b.mean()), float(differences.mean())
    result.kv_bytes_a, result.kv_bytes_b = mean_of(left, "kv_bytes_decode"), mean_of(right, "kv_bytes_decode")
    result.ci_low, result.ci_high = percentile_interval(deltas)
    result.p_bootstrap = bootstrap_p(deltas)
    result.p_sign_flip, result.sign_flip_exact = sign_flip_p(np.array(list(group_sums.values())), seed)
    if metric == "em":
        table = Counter(zip(a, b, strict=True))
        result.both_only_a_only_b_neither = table[1, 1], table[1, 0], table[0, 1], table[0, 0]
    return result


# --- tables ------------------------------------------------------------------------------------------------------------------


def length_name(context_length: int) -> str:
    return f"{context_length // 1024}k" if context_length % 1024 == 0 else str(context_length)


def task_name(task: str, haystack: str | None, context_length: int | None = None) -> str:
    parts = (TASK_NAMES.get(task, task), length_name(context_length) if context_length else None, haystack)
    return " ".join(part for part in parts if part)


def task_order(task: str) -> tuple[int, str]:
    return list(TASK_NAMES).index(task) if task in TASK_NAMES else len(TASK_NAMES), task


def columns_of(cells: list[Cell]) -> list[tuple[str, str | None, int]]:
    columns = {(cell.task, cell.haystack, cell.context_length) for cell in cells}
    return sorted(columns, key=lambda column: (task_order(column[0]), column[1] or "", column[2]))


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    """A pipe table padded so that it reads in a terminal too."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    rule = ["-" * width for width in widths]
    lines = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in (header, rule, *rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def percent(fraction: float) -> str:
    return f"{100 * fraction:.1f}"


def signed(fraction: float) -> str:
    text = f"{100 * fraction:+.1f}"
    return text if float(text) else "0.0"


def p_text(p: float) -> str:
    return f"{p:.4f}" if p >= 0.0001 else "<0.0001"


def span(values: list[float | None], unit: float = 1, digits: int = 1) -> str:
    """Smallest to largest of what is known."""
    given = [value for value in values if value is not None]
    ends = [f"{end / unit:.{digits}f}" for end in (min(given), max(given))] if given else []
    return "–".join(dict.fromkeys(ends)) or "–"


def em_text(cell: Cell | None) -> str:
    if cell is None:
        return "–"
    parts = []
    if cell.n:
        interval = f"[{percent(cell.em_low)}, {percent(cell.em_high)}]"
        parts.append(f"{percent(cell.n_right / cell.n)} {interval} {cell.n_right}/{cell.n}")
    if cell.n_out_of_memory:
        parts.append(f"OOM ×{cell.n_out_of_memory}")
    if cell.n_failed:
        parts.append(f"error ×{cell.n_failed}")
    return ", ".join(parts)


def main_table(cells: list[Cell], memory_kinds: str) -> str:
    """The thesis's form: EM % by column, then what it cost, as ranges over the columns."""
    columns = columns_of(cells)
    header = ["Config", *(task_name(*column) for column in columns)]
    header += [f"Peak memory GiB ({memory_kinds})", "KV peak MiB", "KV decode MiB", "KV removed %", "ITL ms"]
    rows = []
    for arm in sorted({cell.arm for cell in cells}):
        own = {(cell.task, cell.haystack, cell.context_length): cell for cell in cells if cell.arm == arm}
        rows.append([
            arm,
            *(em_text(own.get(column)) for column in columns),
            span([end for cell in own.values() for end in cell.peak_memory_bytes or ()], GIB, 2),
            span([cell.kv_bytes_peak for cell in own.values()], MIB),
            span([cell.kv_bytes_decode for cell in own.values()], MIB),
            span([cell.compression_ratio for cell in own.values()], 0.01),
            span([cell.itl_ms for cell in own.values()]),
        ])
    return markdown_table(header, rows)


def f1_table(cells: list[Cell]) -> str:
    rows = []
    for cell in cells:
        if cell.f1 is None:
            continue
        em, task = cell.n_right / cell.n, task_name(cell.task, cell.haystack, cell.context_length)
        interval = "one group" if cell.f1_low is None else f"{percent(cell.f1_low)}, {percent(cell.f1_high)}"
        rows.append([task, cell.arm, str(cell.n), percent(em), f"{percent(cell.f1)} [{interval}]", f"{signed(cell.f1 - em)} pp"])
    return markdown_table(["Task", "Config", "n", "EM %", "F1 %", "Gap F1 − EM"], rows) if rows else ""


def comparison_report(comparisons: list[Comparison], arms: tuple[str, str], n_resamples: int, seed: int) -> str:
    """The paired table, what it was held to, and which comparisons could not be made."""
    arm_a, arm_b = arms
    made = [one for one in comparisons if one.obstacle is None]
    paragraphs = [f"### Paired comparison, {arm_a} − {arm_b}"]
    if made:
        alpha_each = ALPHA / len(made)
        header = ["Model", "Task", "Score", "Pairs", f"{arm_a} %", f"{arm_b} %", "Δ pp [95 %]", "p bootstrap", "p sign flip"]
        header += [f"Both / only {arm_a} / only {arm_b} / neither", "KV decode MiB", f"p ≤ {alpha_each:.4f}", "Least ΔEM pp"]
        paragraphs += [
            markdown_table(header, [comparison_row(one, alpha_each) for one in made]),
            f"{len(made)} comparison{'s' * (len(made) > 1)} made, so each p is held to α/{len(made)} = {alpha_each:.4f} "
            f"(Bonferroni; intervals are not adjusted). Percentile bootstrap: {n_resamples} resamples, seed {seed}, stratified "
            "by length. Pairs: with (groups) where several cases share one. KV decode: mean of both arms. Least ΔEM: the "
            "smallest that so many pairs could have shown in the sign-flip test at this level, were no pair to speak against it.",
        ]
    for one in comparisons:
        name = f"{one.model}, {one.hardware}, {task_name(one.task, one.haystack)}"
        if one.obstacle:
            paragraphs.append(f"Not compared: {name}, {one.metric.upper()}: {one.obstacle}.")
        if one.metric == "em" and (one.n_in_one_arm or one.n_failed):
            paragraphs.append(f"Left out of {name}: {one.n_in_one_arm} cases in one arm only, {one.n_failed} failed in either.")
    if not comparisons:
        paragraphs.append(f"No comparison: no task has rows of {arm_a} or {arm_b}.")
    return "\n\n".join(paragraphs)


def comparison_row(one: Comparison, alpha_each: float) -> list[str]:
    passed = [name for name, p in (("bootstrap", one.p_bootstrap), ("sign flip", one.p_sign_flip)) if p <= alpha_each]
    least = least_delta(one.n_pairs, one.n_groups, alpha_each)
    return [
        f"{one.model}, {one.hardware}",
        task_name(one.task, one.haystack),
        one.metric.upper(),
        str(one.n_pairs) if one.n_groups == one.n_pairs else f"{one.n_pairs} ({one.n_groups})",
        percent(one.score_a),
        percent(one.score_b),
        f"{signed(one.delta)} [{signed(one.ci_low)}, {signed(one.ci_high)}]",
        p_text(one.p_bootstrap),
        f"{'' if one.sign_flip_exact else '≈ '}{p_text(one.p_sign_flip)}",
        " / ".join(map(str, one.both_only_a_only_b_neither or ())) or "–",
        f"{span([one.kv_bytes_a], MIB)} / {span([one.kv_bytes_b], MIB)}",
        "both" if len(passed) == 2 else f"{passed[0]} only" if passed else "neither",
        "–" if one.metric != "em" else percent(least) if least else "none: too few",
    ]


def reported_table(rows: list[dict], n_resamples: int, seed: int) -> str:
    """The thesis's main table with ours under each line of it."""
    table = []
    for config, (*scores, f1, memory, itl) in REPORTED.items():
        table.append([config, REPORTED_BY, *scores, f1, memory, itl])
        own = [row for row in rows if row["arm"] == config and row["task"] in TASK_NAMES]
        for (model, hardware, haystack), group in grouped(own, "model", "hardware", "haystack"):
            pools = {
                column: [row for row in group if row["task"] == task and row["context_length"] in lengths]
                for column, (task, lengths) in REPORTED_COLUMNS.items()
            }
            cells = {column: make_cell(pool, n_resamples, seed) for column, pool in pools.items() if pool}
            squad = cells.get("SQuAD 8k")
            memory = [end for cell in cells.values() for end in cell.peak_memory_bytes or ()]
            table.append([
                config,
                f"ours: {model}, {hardware}{f', {haystack}' if haystack else ''}",
                *(em_text(cells.get(column)) for column in REPORTED_COLUMNS),
                f"{percent(squad.f1)} ({signed(squad.f1 - squad.n_right / squad.n)})" if squad and squad.f1 is not None else "–",
                f"{span(memory, GIB, 2)} GiB" if memory else "–",
                span([cell.itl_ms for name, cell in cells.items() if name.startswith("NIAH")]),
            ])
    return markdown_table(["Config", "Source", *REPORTED_COLUMNS, "SQuAD F1 (gap)", "Peak memory", "ITL ms, NIAH"], table)


def pairings_table() -> str:
    """Every pairing the thesis's counts allow, and whether it gives the interval reported there."""
    table = []
    for benchmark, (n, n_right_a, n_right_b, interval, p) in REPORTED_PAIRED.items():
        for pairing in thesis_pairings(n, n_right_a, n_right_b):
            ends = pairing["ci_low"], pairing["ci_high"]
            fits = all(f"{100 * end:.1f}" == f"{reported:.1f}" for end, reported in zip(ends, interval, strict=True))
            table.append([
                benchmark,
                f"[{interval[0]:+.1f}, {interval[1]:+.1f}], {p:.3f}",
                f"{pairing['gained']} / {pairing['lost']}",
                f"{signed(pairing['delta'])} [{', '.join(map(signed, ends))}]",
                *(p_text(pairing[name]) for name in ("p_bootstrap", "p_shifted", "p_sign_flip")),
                "yes" if fits else "no",
            ])
    header = ["Benchmark", "Reported interval, p", "Only L3 / only L4", "Δ pp [95 %]", "p bootstrap", "p shifted", "p sign flip"]
    return markdown_table([*header, "Interval as reported"], table)


# --- pictures ----------------------------------------------------------------------------------------------------------------


def grid(n_panels: int, width: float, height: float, n_columns: int = 3) -> tuple[Figure, list]:
    """A figure of equal panels, `width` × `height` inches each; the unused places stay empty."""
    from matplotlib.figure import Figure  # not pyplot: no display, no global state, and nothing loaded when nothing is drawn

    n_columns = min(n_columns, n_panels)
    n_rows = math.ceil(n_panels / n_columns)
    figure = Figure(figsize=(max(width * n_columns, MIN_WIDTH), height * n_rows + 0.6), layout="constrained")
    axes = list(figure.subplots(n_rows, n_columns, squeeze=False).flat)
    for unused in axes[n_panels:]:
        unused.set_axis_off()
    return figure, axes[:n_panels]


def finish(figure: Figure, axes: list, title: str, x_label: str, y_label: str) -> Figure:
    """Labels, title, and one legend for all panels."""
    for axis in axes:
        axis.set_xlabel(x_label, fontsize=9)
        axis.tick_params(labelsize=9)
    figure.supylabel(y_label, fontsize=9)
    figure.suptitle(title, fontsize=10)
    handles = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    if handles:
        shown = dict(sorted(handles.items()))
        for n_columns in range(min(len(shown), 7), 0, -1):  # as many as the figure is wide
            legend = figure.legend(
                shown.values(), shown.keys(), loc="outside lower center", ncols=n_columns, fontsize=9, frameon=False
            )
            if n_columns == 1 or legend.get_window_extent().width <= figure.bbox.width:
                break
            legend.remove()
        n_rows = math.ceil(len(shown) / n_columns)
        figure.set_figheight(figure.get_figheight() + 0.2 * max(n_rows - 2, 0))
    return figure


def arm_style(arm: str, arms: list[str]) -> dict:
    """Marker and line of an arm: told apart by shape, so that a black and white print loses nothing."""
    lap, place = divmod(arms.index(arm), len(MARKERS))
    return {"marker": MARKERS[place], "linestyle": LINE_STYLES[place % len(LINE_STYLES)], "linewidth": 1.2,
            "markersize": 7, "color": "black", "markerfacecolor": "white" if (place + lap) % 2 else "0.35"}


def draw_heatmap(rows: list[dict], title: str) -> Figure:
    """Depth × length, a panel per arm, right/n in each field: white = all right, dark = all wrong, hatched = none finished."""
    arms, lengths = sorted({row["arm"] for row in rows}), sorted({row["context_length"] for row in rows})
    lows = range(0, 100, 10)
    width = max(0.7 + 0.55 * len(lengths), 0.09 * max(map(len, arms)))  # inches; the arm's name has to fit
    figure, axes = grid(len(arms), width, 3.3, n_columns=max(1, min(7, int(15 / width))))
    for axis, arm in zip(axes, arms, strict=True):
        shade = np.full((len(lows), len(lengths)), np.nan)
        for i, low in enumerate(lows):
            for j, length in enumerate(lengths):
                field = [row for row in rows if row["arm"] == arm and row["context_length"] == length
                         and min(row["depth_percent"] // 10 * 10, 90) == low]
                done = [row["em"] for row in field if row["error"] is None]
                shade[i, j] = np.mean(done) if done else np.nan
                text = f"{sum(done):.0f}/{len(done)}" if done else "fail" if field else ""
                box = None if done else {"facecolor": "white", "edgecolor": "none", "pad": 1}
                axis.text(
                    j, i, text, ha="center", va="center", fontsize=8, color="white" if shade[i, j] < 0.5 else "black", bbox=box
                )
        axis.patch.set(facecolor="white", edgecolor="0.6", hatch="////")
        axis.imshow(shade, cmap="gray", vmin=-0.25, vmax=1, aspect="auto")  # never quite black: the text has to show
        axis.set_title(arm, fontsize=10)
        axis.set_xticks(range(len(lengths)), [length_name(length) for length in lengths])
        axis.set_yticks(range(len(lows)), [f"{low}–{low + 10}" for low in lows])
        axis.set_xticks(np.arange(len(lengths) - 1) + 0.5, minor=True)
        axis.set_yticks(np.arange(len(lows) - 1) + 0.5, minor=True)
        axis.grid(which="minor", color="0.5", linewidth=0.6)
        axis.tick_params(which="minor", length=0)
        axis.tick_params(labelleft=axis.get_subplotspec().is_first_col())  # the depths stand once, at the left
    return finish(figure, axes, title, "context length", "needle depth, %")


def draw_pareto(cells: list[Cell], title: str) -> Figure:
    """EM with Wilson bars against the KV bytes held while decoding, a panel per task and length; grey line = the Pareto front."""
    arms = sorted({cell.arm for cell in cells})
    figure, axes = grid(len(columns_of(cells)), 3.1, 2.7)
    for axis, column in zip(axes, columns_of(cells), strict=True):
        shown = [cell for cell in cells if (cell.task, cell.haystack, cell.context_length) == column]
        size = {cell.arm: cell.kv_bytes_decode / MIB for cell in shown}
        score = {cell.arm: 100 * cell.n_right / cell.n for cell in shown}
        widest = max(size.values())
        for cell in shown:
            # Arms of one size would hide one another, so those stand side by side around their true place.
            alike = [arm for arm in size if abs(size[arm] - size[cell.arm]) < 0.03 * widest]
            x = size[cell.arm] + 0.04 * widest * (alike.index(cell.arm) - (len(alike) - 1) / 2)
            bars = [[score[cell.arm] - 100 * cell.em_low], [100 * cell.em_high - score[cell.arm]]]
            axis.errorbar(x, score[cell.arm], yerr=np.maximum(bars, 0), elinewidth=0.8, capsize=2, label=cell.arm,
                          **arm_style(cell.arm, arms) | {"linestyle": ""})
        by_size = sorted(size, key=lambda arm: (size[arm], -score[arm]))
        front = [arm for place, arm in enumerate(by_size) if all(score[arm] > score[smaller] for smaller in by_size[:place])]
        axis.step([size[arm] for arm in front], [score[arm] for arm in front], where="post", color="0.7", linewidth=3, zorder=0)
        axis.set(xlim=(0, widest * 1.15), ylim=(-6, 106))
        axis.set_title(task_name(*column), fontsize=10)
    return finish(figure, axes, title, "KV cache while decoding, MiB", "EM, % (95 % Wilson)")


def way_of_pruning(row: dict) -> str | None:
    """What scores an entry, and what then stays: those above a threshold, or a share of each head's or of all heads' together."""
    if not row.get("scorer"):
        return None
    return f"{row['scorer']}, {'threshold' if row['keep'] is None else 'pooled' if row['pooled'] else 'per head'}"


def draw_removed(rows: list[dict], title: str) -> Figure:
    """EM with Wilson bars against the fraction of KV entries removed, a line per way of pruning, a panel per task and length.

    The grey line is the full cache (L2), on the cases that were pruned.
    """
    ways = sorted({way for row in rows if (way := way_of_pruning(row))})
    columns = sorted({(row["task"], row["haystack"], row["context_length"]) for row in rows if way_of_pruning(row)}, key=str)
    figure, axes = grid(len(columns), 3.4, 2.9)
    for axis, column in zip(axes, columns, strict=True):
        here = [row for row in rows if (row["task"], row["haystack"], row["context_length"]) == column and row["error"] is None]
        for way in ways:
            points = []
            for _, members in grouped([row for row in here if way_of_pruning(row) == way], "arm"):
                n_right, n = int(sum(row["em"] for row in members)), len(members)
                removed = 100 * np.mean([row["compression_ratio"] for row in members])
                points.append((removed, 100 * n_right / n, *(100 * end for end in wilson(n_right, n))))
            if points:
                x, y, low, high = np.array(sorted(points)).T
                axis.errorbar(x + 0.4 * (ways.index(way) - len(ways) / 2), y, yerr=np.maximum([y - low, high - y], 0),
                              elinewidth=0.6, capsize=2, label=way, **arm_style(way, ways))
        pruned = {row["case_id"] for row in here if way_of_pruning(row)}
        full = [row["em"] for row in here if row["arm"] == "L2" and row["case_id"] in pruned]
        if full:
            axis.axhline(100 * np.mean(full), color="0.6", linewidth=3, zorder=0, label="L2, full cache")
        axis.set(xlim=(-3, 103), ylim=(-6, 106))
        axis.set_title(task_name(*column), fontsize=10)
    return finish(figure, axes, title, "KV entries removed, %", "EM, % (95 % Wilson)")


def draw_itl(cells: list[Cell], title: str) -> Figure:
    """Mean inter-token latency against context length, bars = quartiles over the cases, a panel per task."""
    arms, tasks = sorted({cell.arm for cell in cells}), sorted({cell.task for cell in cells}, key=task_order)
    figure, axes = grid(len(tasks), 3.4, 2.9)
    for axis, task in zip(axes, tasks, strict=True):
        in_task = sorted((cell for cell in cells if cell.task == task), key=lambda cell: cell.context_length)
        for arm in (arm for arm in arms if any(cell.arm == arm for cell in in_task)):
            own = [cell for cell in in_task if cell.arm == arm]
            # Lengths grow by doubling, hence log2; arms stand side by side so that their bars can be told apart.
            x = [math.log2(cell.context_length) + 0.04 * (arms.index(arm) - (len(arms) - 1) / 2) for cell in own]
            y = np.array([cell.itl_ms for cell in own])
            low, high = np.array([cell.itl_ms_quartiles for cell in own]).T  # (2, lengths)
            axis.errorbar(
                x, y, yerr=np.maximum([y - low, high - y], 0), elinewidth=0.8, capsize=2, label=arm, **arm_style(arm, arms)
            )
        lengths = sorted({cell.context_length for cell in in_task})
        axis.set_xticks([math.log2(length) for length in lengths], [length_name(length) for length in lengths])
        axis.set(xlim=(math.log2(lengths[0]) - 0.4, math.log2(lengths[-1]) + 0.4))
        axis.set_ylim(0, 1.15 * max(max(cell.itl_ms, *cell.itl_ms_quartiles) for cell in in_task))
        axis.set_title(task_name(task, cells[0].haystack), fontsize=10)
    return finish(figure, axes, title, "context length, tokens", "inter-token latency, ms")


def draw_traces(traces: dict[str, list[dict]], title: str) -> Figure:
    """KV bytes against tokens seen, a line per file: the first case that all of them traced, else the first of each."""
    figure, (axis,) = grid(1, 6.2, 3.4)
    common = set.intersection(*({row["case_id"] for row in rows} for rows in traces.values()))
    for place, (name, rows) in enumerate(sorted(traces.items())):
        case = min(common or {row["case_id"] for row in rows})
        steps = sorted((row for row in rows if row["case_id"] == case), key=lambda row: row["step"])
        look = {"color": ("0.0", "0.55")[place % 2], "markerfacecolor": "white", "markersize": 4}
        axis.plot([row["n_seen"] for row in steps], [row["kv_bytes"] / MIB for row in steps], linewidth=1.4,
                  linestyle=LINE_STYLES[place % len(LINE_STYLES)], label=name if common else f"{name}, {case}", **look)
        for event, marker in (("evict", "v"), ("page_in", "^")):
            moved = [row for row in steps if row["event"] == event]
            axis.plot([row["n_seen"] for row in moved], [row["kv_bytes"] / MIB for row in moved], marker, **look)
    axis.set_ylim(bottom=0)
    if common:
        title += f": {min(common)}"
    return finish(figure, [axis], title, "tokens seen (▽ evicted, △ paged in)", "KV cache, MiB")


def save_figure(figure: Figure, folder: Path, *name: str | None) -> list[str]:
    """PNG and SVG under one name, the same bytes on every run."""
    from matplotlib import rc_context

    stem = folder / re.sub(r"[^A-Za-z0-9]+", "-", "-".join(filter(None, name))).strip("-").lower()
    with rc_context({"svg.hashsalt": "cognito"}), file_access("write", folder, "choose another --plots"):
        folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(f"{stem}.png", dpi=160)
        figure.savefig(f"{stem}.svg", metadata={"Date": None})
    return [f"{stem}.png", f"{stem}.svg"]


def draw_group(rows: list[dict], cells: list[Cell], folder: Path, title: str, name: tuple) -> list[str]:
    """The pictures of one model, hardware and haystack; what has no data is not drawn."""
    written = []
    for task in sorted(NEEDLE_TASKS):
        needles = [row for row in rows if row["task"] == task and row["depth_percent"] is not None]
        if needles:
            heatmap = draw_heatmap(needles, f"{TASK_NAMES[task]}: cases right\n{title}")
            written += save_figure(heatmap, folder, task, "heatmap", *name)
    weighed = [cell for cell in cells if cell.n and cell.kv_bytes_decode is not None]
    if weighed:
        written += save_figure(
            draw_pareto(weighed, f"EM against KV bytes (arms of equal size side by side)\n{title}"), folder, "pareto", *name
        )
    if any(row.get("scorer") for row in rows):
        written += save_figure(draw_removed(rows, f"EM by what is removed\n{title}"), folder, "removed", *name)
    timed = [cell for cell in cells if cell.itl_ms is not None]
    if timed:
        written += save_figure(draw_itl(timed, f"Inter-token latency\n{title}"), folder, "itl", *name)
    return written


def draw_trace_folders(traces: dict[Path, list[dict]], folder: Path) -> list[str]:
    """One picture per folder of traces, named as the folder's last two parts (task and model)."""
    written = []
    for source in sorted({path.parent for path, rows in traces.items() if rows}):
        here = {path.name.removesuffix(".trace.jsonl"): rows for path, rows in traces.items() if path.parent == source and rows}
        figure = draw_traces(here, f"KV cache of one case\n{source.parent.name}, {source.name}")
        written += save_figure(figure, folder, "trace", source.parent.name, source.name)
    return written


# --- the report --------------------------------------------------------------------------------------------------------------


def grouped(rows: list[dict], *fields: str) -> list[tuple[tuple, list[dict]]]:
    """Rows by the values of some fields, in sorted order."""

    def key(row: dict) -> tuple:
        return tuple(row[field] or "" for field in fields)

    return [(tuple(part or None for part in values), list(group)) for values, group in groupby(sorted(rows, key=key), key)]


def group_sections(rows: list[dict], cells: list[Cell], title: str) -> list[str]:
    """The heading and the tables of one model, hardware and haystack."""
    threads = sorted({str(row["threads"]) for row in rows if row["threads"] is not None})
    memory_kinds = ", ".join(sorted({row["memory_kind"] for row in rows if row["memory_kind"]})) or "unknown"
    subtitle = f"EM % [95 % Wilson] right/n; threads: {' and '.join(threads) or 'unknown'}."
    return [f"### {title}", subtitle, main_table(cells, memory_kinds), f1_table(cells)]


def compare_tasks(rows: list[dict], arms: tuple[str, str], n_resamples: int, seed: int) -> list[Comparison]:
    """Every comparison of one model, hardware and haystack; a task that neither arm ran has none."""
    comparisons = []
    for (task,), members in grouped(rows, "task"):
        if not {row["arm"] for row in members}.isdisjoint(arms):
            metrics = ("em", "f1") if task in F1_TASKS else ("em",)
            comparisons += [compare(members, metric, arms, n_resamples, seed) for metric in metrics]
    return comparisons


def thesis_sections(rows: list[dict], arms: tuple[str, str], n_resamples: int, seed: int) -> list[str]:
    """Our figures under the thesis's; an ablation has nothing to stand beside."""
    compared = {arm.partition("-")[0] for arm in arms}
    if not compared <= REPORTED.keys() or not any(row["config"] in REPORTED for row in rows):
        return []
    beside = reported_table(rows, n_resamples, seed)
    return ["### Beside the thesis", REPORTED_NOTE, beside, PAIRINGS_NOTE, pairings_table()]


def count_sentence(n_rows: int, n_files: int, tally: Counter) -> str:
    left_out = "; ".join(f"{count} {what}" for what, count in tally.items()) or "nothing left out"
    return f"{n_rows} cases of {n_files} files: {left_out}."


def marker_lines(block: str) -> tuple[bytes, bytes]:
    """What stands around the tables in a page; a name tells several blocks of one page apart."""
    name = f" {block}" if block else ""
    return f"<!-- bootstrap:begin{name} -->".encode(), f"<!-- bootstrap:end{name} -->".encode()


def write_block(path: Path, block: str, report: str) -> None:
    """Put the report between two marker lines, leaving every other byte of the file alone."""
    opening, closing = marker_lines(block)
    with file_access("write", path, "choose another --markdown"):
        text = path.read_bytes() or opening + b"\n" + closing + b"\n"
        before, begin, rest = text.partition(opening)
        _, end, after = rest.partition(closing)
        if not (begin and end):
            raise Refusal(f"{path} has no lines {opening.decode()} and {closing.decode()} in this order; "
                          "add them where the tables should stand")
        path.write_bytes(before + begin + f"\n{report}\n".encode() + end + after)


def write_files(args: Args, report: str, results: dict) -> list[str]:
    """The tables and the figures behind them, where they were asked for."""
    if args.markdown:
        write_block(args.markdown, args.block, report)
    if args.json:
        with file_access("write", args.json, "choose another --json"):
            args.json.write_text(json.dumps(results, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return [str(path) for path in (args.markdown, args.json) if path]


# --- the run -----------------------------------------------------------------------------------------------------------------


def check_args(args: Args) -> None:
    """Refuse options that no report can be made with, before anything is read."""
    if args.n_resamples < 100:
        raise Refusal(f"--n-resamples {args.n_resamples} is too few; "
                      "expected at least 100, since a 95 % interval needs its tails")
    if args.seed < 0:
        raise Refusal(f"--seed {args.seed} is negative; expected 0 or more")
    if args.block and not args.markdown:
        raise Refusal(f"--block {args.block} names marker lines of no file; pass --markdown too")
    if not re.fullmatch(r"[\w-]*", args.block):
        raise Refusal(f"--block {args.block!r} is no name; expected letters, digits and dashes")


def check_outputs(args: Args) -> None:
    for path, flag in ((args.markdown, "--markdown"), (args.json, "--json")):
        if path:
            check_writable(path, flag)


def read_input(paths: tuple[Path, ...], tally: Counter) -> tuple[list[dict], dict[Path, list[dict]], int]:
    """One row per case, the traces, and how many record files the rows came from."""
    record_files, trace_files = find_files(paths, tally)
    rows, traces = settle(read_records(record_files, tally), tally), read_traces(trace_files, tally)
    if not rows:
        names = ", ".join(map(str, paths))
        raise Refusal(f"there is no record in {names} ({len(record_files)} record files); run an eval script first")
    return rows, traces, len(record_files)


def choose_arms(named: tuple[str, str] | None, rows: list[dict]) -> tuple[str, str]:
    """The two arms to compare; only those that were named have to be there."""
    known_arms = {row["arm"] for row in rows}
    unknown = set(named or ()) - known_arms
    if unknown:
        raise Refusal(f"--compare names {', '.join(sorted(unknown))}; expected two of {', '.join(sorted(known_arms))}")
    return named or DEFAULT_ARMS


def main(args: Args) -> int:
    check_args(args)
    tally: Counter = Counter()
    rows, traces, n_files = read_input(args.paths, tally)
    arms, drawing = choose_arms(args.compare, rows), (args.n_resamples, args.seed)
    check_outputs(args)

    sections, comparisons, all_cells, pictures = [], [], [], []
    for (model, hardware, haystack), group in grouped(rows, "model", "hardware", "haystack"):
        title = f"{model}, {hardware}{f', haystack {haystack}' if haystack else ''}"
        cells = [make_cell(members, *drawing) for _, members in grouped(group, "task", "context_length", "arm")]
        sections += group_sections(group, cells, title)
        comparisons += compare_tasks(group, arms, *drawing)
        all_cells += [{"model": model, "hardware": hardware} | asdict(cell) for cell in cells]
        if args.plots:
            pictures += draw_group(group, cells, args.plots, title, (model, hardware, haystack))
    if args.plots:
        pictures += draw_trace_folders(traces, args.plots)

    left_out = Counter({what: count for what, count in sorted(tally.items()) if count})
    sections += [comparison_report(comparisons, arms, *drawing), *thesis_sections(rows, arms, *drawing)]
    sections += [count_sentence(len(rows), n_files, left_out)]
    report = "\n\n".join(filter(None, sections))
    results = {"rows": len(rows), "comparisons": [asdict(one) for one in comparisons], "left_out": left_out}
    written = pictures + write_files(args, report, results | {"cells": all_cells})
    with file_access("write", "standard output", "send it to a file, or to a program that reads all of it"):
        print(report)
        print(json.dumps(results | {"written": written}, allow_nan=False))
    return 0


if __name__ == "__main__":
    import tyro

    sys.exit(run_main(main, tyro.cli(Args)))
