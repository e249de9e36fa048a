"""bootstrap.py: its statistics against independent ones, its tables from synthetic records, and what it does with damage."""

import itertools
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

import bootstrap

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "bootstrap.py"


def record(config, case, em, **changes):
    """One record of the contract; the case's number also gives its answer and its depth."""
    length = changes.get("context_length", 4096)
    fields = dict(
        task="niah", config=config, model="smollm2", case_id=f"{length}-{case:03d}", group_id=None, seed=0, haystack="noise",
        context_length=length, depth_percent=100 * (case % 15) / 14, n_prompt_tokens=length - 50, n_new_tokens=9,
        answers=[str(1000000 + case)], prediction="", em=em, f1=None, question_aware=True, compression_ratio=0.6,
        kv_bytes_full=length * 46080, kv_bytes_peak=length * 46080, kv_bytes_decode=length * 18432, peak_memory_bytes=2**30,
        memory_kind="peak RSS", ttft_s=1.0, prefill_tokens_per_s=1000.0, itl_ms_mean=20.0 + case % 3, itl_ms_p95=30.0,
        evictions=0, finish_reason="stop", error=None, device="cpu", dtype="bfloat16", quant=None, threads=2,
        versions={}, script_sha256="0", settings_hash=config, created="2026-01-01T00:00:00Z",
    )
    assert changes.keys() <= fields.keys()
    return fields | changes


def arm(config, scores, **changes):
    return [record(config, case, score, **changes) for case, score in enumerate(scores)]


def out_of_memory(config, case, **changes):
    unknown = dict.fromkeys(("compression_ratio", "kv_bytes_peak", "kv_bytes_decode", "peak_memory_bytes", "itl_ms_mean"))
    return record(config, case, None, error="OutOfMemoryError: CUDA out of memory", **unknown | changes)


def write(path, rows):
    """Rows, or lines as they should stand in the file, to `path`; its folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows), encoding="utf-8", newline=""
    )
    return path


@pytest.fixture
def two_arms(tmp_path):
    """results/niah/smollm2/{L3,L4}.jsonl, 12 cases each, L4 wrong on the first 8; returns their folder."""
    write(tmp_path / "results/niah/smollm2/L3.jsonl", arm("L3", [1] * 12))
    write(tmp_path / "results/niah/smollm2/L4.jsonl", arm("L4", [0] * 8 + [1] * 4))
    return tmp_path / "results/niah/smollm2"


def run(*args):
    """The command line, as a user types it."""
    return subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, args)], capture_output=True, text=True, timeout=120, encoding="utf-8"
    )


def refusal(*args):
    """The one sentence on stderr of a run that must be refused."""
    result = run(*args)
    assert (result.returncode, result.stdout) == (2, ""), result
    assert "Traceback" not in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("error: ") and not result.stderr.endswith(".\n")
    return result.stderr


@pytest.fixture
def report(capsys):
    """Runs main in this process; returns the printed text and the object of its last line."""

    def call(*paths, **options):
        assert bootstrap.main(bootstrap.Args(paths=tuple(paths), **options)) == 0
        text = capsys.readouterr().out
        return text, json.loads(text.splitlines()[-1])

    return call


def comparison(results, task="niah", metric="em"):
    (one,) = (one for one in results["comparisons"] if (one["task"], one["metric"]) == (task, metric))
    return one


# --- the contract of a row ---------------------------------------------------------------------------------------------------


def test_the_rows_of_these_tests_keep_the_contract():
    for row in (record("L3", 0, 1), record("L3", 1, 0, f1=0.5), out_of_memory("L3", 2)):
        assert bootstrap.row_fault(row) is None


def test_the_committed_rows_keep_the_contract():
    files = [path for path in sorted((ROOT / "results").rglob("*.jsonl"))
             if not path.name.endswith(".trace.jsonl") and path.parent.name != "bench"]
    rows = [(path, json.loads(line)) for path in files for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
    assert {fault for path, row in rows if (fault := (path.name, bootstrap.row_fault(row)))[1]} == set()
    assert len(rows) > 2000


def test_the_fields_that_are_read_are_in_the_schema():
    source = SCRIPT.read_text(encoding="utf-8")
    reading = source[source.index("# --- reading ---") :]
    read = set(re.findall(r'\b(?:row|rows\[0\])(?:\[|\.get\()"(\w+)"', reading))
    read |= set(re.findall(r'\b(?:known|mean_of)\(\w+, "(\w+)"\)', reading)) | set(bootstrap.ONE_PER_FILE)
    made = {"arm", "where"}  # by read_records
    of_traces = {"event", "step", "n_seen", "kv_bytes"}
    assert {"em", "hardware", "scorer", "kv_bytes_decode", "settings_hash"} <= read
    assert read - made - of_traces <= bootstrap.SCHEMA.keys()


# --- the thesis's counts -----------------------------------------------------------------------------------------------------


def paired_scores(n, n_right_a, n_right_b, lost):
    """Scores of two arms over n cases, `lost` of which only B has right."""
    gained = n_right_a - n_right_b + lost
    both = n_right_b - lost
    neither = n - gained - lost - both
    return [1] * (gained + both) + [0] * (lost + neither), [0] * gained + [1] * (both + lost) + [0] * neither


@pytest.mark.parametrize("least_favourable", [False, True])
def test_thesis_counts_give_its_deltas(tmp_path, least_favourable):
    """As its benchmarks were: NIAH 15 + 15, SQuAD 15, Stress 9 + 9 cases; L4 loses at 8k, where the thesis says it does."""
    lost = {"squad": 4, "stress": 3} if least_favourable else {"squad": 0, "stress": 0}
    for place, config in enumerate(("L3", "L4")):
        for task, lengths, scores in (
            ("niah", (4096, 8192), paired_scores(30, 30, 24, 0)[place][::-1]),
            ("squad", (8192,), paired_scores(15, 11, 6, lost["squad"])[place]),
            ("stress", (16384, 32768), paired_scores(18, 9, 3, lost["stress"])[place]),
        ):
            size = len(scores) // len(lengths)
            rows = [
                record(config, i, em, task=task, f1=float(em), context_length=lengths[i // size]) for i, em in enumerate(scores)
            ]
            write(tmp_path / "results" / task / "smollm2" / f"{config}.jsonl", rows)
    result = run(tmp_path / "results")
    assert result.returncode == 0, result.stderr
    results = json.loads(result.stdout.splitlines()[-1])
    found = {one["task"]: one for one in results["comparisons"] if one["metric"] == "em"}
    assert [f"{100 * found[task]['delta']:+.1f}" for task in ("niah", "squad", "stress")] == ["+20.0", "+33.3", "+33.3"]
    assert found["niah"]["both_only_a_only_b_neither"] == [24, 6, 0, 0]
    assert found["squad"]["both_only_a_only_b_neither"] == ([2, 9, 4, 0] if least_favourable else [6, 5, 0, 4])
    assert found["stress"]["both_only_a_only_b_neither"] == ([0, 9, 3, 6] if least_favourable else [3, 6, 0, 9])
    niah = [round(100 * found["niah"][end], 1) for end in ("ci_low", "ci_high")]
    assert niah == [6.7, 33.3]  # stratified by length; the thesis's [6.7, 36.7] pools the two
    assert "4 comparisons made, so each p is held to α/4 = 0.0125" in result.stdout
    assert (found["squad"]["ci_low"] < 0) is least_favourable


THESIS = {benchmark: counts for benchmark, (*counts, _, _) in bootstrap.REPORTED_PAIRED.items()}


def test_only_the_pairings_without_a_loss_give_the_thesis_intervals():
    for benchmark, (*counts, interval, _) in bootstrap.REPORTED_PAIRED.items():
        fits = [
            pairing["lost"]
            for pairing in bootstrap.thesis_pairings(*counts)
            if (round(100 * pairing["ci_low"], 1), round(100 * pairing["ci_high"], 1)) == interval
        ]
        assert fits == [0], benchmark
    assert [len(bootstrap.thesis_pairings(*counts)) for counts in THESIS.values()] == [1, 5, 4]


def test_thesis_p_is_the_shifted_bootstraps():
    """Within 3 standard errors of 2000 resamples the shifted p gives every reported p; the percentile p does not give NIAH's."""
    for benchmark, (*counts, _, reported) in bootstrap.REPORTED_PAIRED.items():
        best = bootstrap.thesis_pairings(*counts)[0]
        assert abs(best["p_shifted"] - reported) < 3 * np.sqrt(best["p_shifted"] / 2000), benchmark
        assert best["p_sign_flip"] > 0.0125, benchmark
    niah = bootstrap.thesis_pairings(*THESIS["NIAH 4k/8k"])[0]
    chance = stats.binom.sf(9, 2000, niah["p_bootstrap"] / 2)  # 0.010 = 2 · 10/2000
    assert 1e-4 < chance < 1e-3
    docstring = [niah["p_bootstrap"], niah["p_shifted"], niah["p_sign_flip"]]
    assert [f"{p:.4f}" for p in docstring] == ["0.0025", "0.0107", "0.0312"]


@pytest.mark.parametrize("counts", THESIS.values(), ids=THESIS.keys())
def test_the_bootstrap_draws_from_the_exact_distribution(counts):
    for pairing in bootstrap.thesis_pairings(*counts):
        n, gained, lost = counts[0], pairing["gained"], pairing["lost"]
        values = np.array([1.0] * gained + [-1.0] * lost + [0.0] * (n - gained - lost))
        deltas = bootstrap.resampled_means(values, np.zeros(n), np.arange(n), 20_000, seed=0)
        assert bootstrap.bootstrap_p(deltas) == pytest.approx(pairing["p_bootstrap"], abs=0.01)
        for end, quantile in (("ci_low", 0.025), ("ci_high", 0.975)):
            below, upto = np.mean(deltas < pairing[end] - 1e-9), np.mean(deltas < pairing[end] + 1e-9)
            assert below - 0.005 < quantile < upto + 0.005


# --- the statistics against independent ones ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["em", "f1"])
def test_agrees_with_scipys_paired_bootstrap(kind):
    rng = np.random.default_rng(7)
    for n in (40, 100):
        a, b = rng.random(n), rng.random(n) * 0.8
        if kind == "em":
            a, b = (a > 0.3).astype(float), (b > 0.4).astype(float)
        deltas = bootstrap.resampled_means(a - b, np.zeros(n), np.arange(n), 9999, seed=1)
        ours = bootstrap.percentile_interval(deltas)
        theirs = stats.bootstrap(
            (a, b), lambda x, y, axis: np.mean(x - y, axis=axis), paired=True, method="percentile", n_resamples=9999, rng=2
        ).confidence_interval
        lattice = 1 / n if kind == "em" else 0  # ends of a difference of counts jump by whole cases
        assert np.abs(np.subtract(ours, theirs)).max() <= max(0.01, lattice) + 1e-9


@pytest.mark.parametrize("group_size", [1, 4])
def test_coverage_of_the_interval(group_size):
    """500 sets of 100 groups with a known ΔEM = 0.2: the 95 % interval holds it in 93 to 97 % of them."""
    rng = np.random.default_rng(0)
    n = 100 * group_size
    groups, strata = np.arange(n) // group_size, (np.arange(n) // group_size) % 2
    held = 0
    for seed in range(500):
        per_group = rng.choice([-1.0, 0.0, 1.0], p=[0.1, 0.6, 0.3], size=100)  # the cases of a group agree: the hard case
        deltas = bootstrap.resampled_means(per_group[groups], strata, groups, 1000, seed)
        low, high = bootstrap.percentile_interval(deltas)
        held += low <= 0.2 <= high
    assert 0.93 <= held / 500 <= 0.97, held / 500


def test_groups_are_resampled_whole():
    """60 cases in 20 groups of equal cases say as much as 20 cases: ignoring the groups would claim √3 times the precision."""
    per_group = np.random.default_rng(3).choice([-1.0, 0.0, 1.0], size=20)
    cases, groups = np.repeat(per_group, 3), np.repeat(np.arange(20), 3)
    one = bootstrap.resampled_means(per_group, np.zeros(20), np.arange(20), 4000, seed=0)
    whole = bootstrap.resampled_means(cases, np.zeros(60), groups, 4000, seed=0)
    apart = bootstrap.resampled_means(cases, np.zeros(60), np.arange(60), 4000, seed=0)
    assert whole == pytest.approx(one)
    assert np.std(whole) / np.std(apart) == pytest.approx(np.sqrt(3), rel=0.05)


def test_strata_keep_their_weight():
    """All the difference is between strata, so resampling inside them moves nothing."""
    strata = np.array([4096] * 5 + [8192] * 15)
    deltas = bootstrap.resampled_means((strata == 8192).astype(float), strata, np.arange(20), 200, seed=0)
    assert deltas == pytest.approx(0.75)


def test_p_is_never_zero_and_one_when_all_pairs_are_equal(two_arms, report):
    assert bootstrap.bootstrap_p(np.full(2000, 0.5)) == 2 / 2001
    write(two_arms / "L4.jsonl", arm("L4", [1] * 12))
    _, results = report(two_arms)
    one = comparison(results)
    assert (one["delta"], one["ci_low"], one["ci_high"], one["p_bootstrap"], one["p_sign_flip"]) == (0, 0, 0, 1, 1)


@pytest.mark.parametrize(("gained", "lost"), [(6, 0), (5, 0), (9, 4), (1, 0), (3, 3), (14, 0)])
def test_sign_flip_is_mcnemars_exact_test(gained, lost):
    p, exact = bootstrap.sign_flip_p(np.array([1.0] * gained + [-1.0] * lost + [0.0] * 9), seed=0)
    assert exact
    assert p == pytest.approx(stats.binomtest(gained, gained + lost).pvalue)


def test_sign_flip_beyond_enumeration_says_so():
    p, exact = bootstrap.sign_flip_p(np.array([1.0] * 20 + [-1.0] * 8), seed=0)
    assert not exact
    assert p == pytest.approx(stats.binomtest(20, 28).pvalue, abs=0.01)


@pytest.mark.parametrize("n", [5, 6, 15, 30, 60])
@pytest.mark.parametrize("n_comparisons", [1, 3, 4, 20])
def test_least_delta_is_the_least(n, n_comparisons):
    alpha = 0.05 / n_comparisons
    shown = [k for k in range(1, n + 1) if stats.binomtest(k, k).pvalue <= alpha]
    assert bootstrap.least_delta(n, n, alpha) == (min(shown) / n if shown else None)


def test_wilson_keeps_its_width_at_the_ends():
    low, high = bootstrap.wilson(15, 15)
    z2 = stats.norm.ppf(0.975) ** 2
    assert (low, high) == pytest.approx((15 / (15 + z2), 1))
    assert bootstrap.wilson(0, 15) == pytest.approx((0, z2 / (15 + z2)))


# --- nothing but the rows reaches a digit ------------------------------------------------------------------------------------


def test_line_and_file_order_change_nothing(tmp_path, report):
    rng, order = np.random.default_rng(5), random.Random(5)
    arms = {
        config: [
            record(config, i, int(rng.random() < 0.6), task="squad", f1=rng.random(), group_id=f"p{i // 3}") for i in range(30)
        ]
        for config in ("L2", "L3", "L4")
    }
    texts = []
    for place in ("first", "second", "third"):
        folder = tmp_path / place
        for config, rows in arms.items():
            write(folder / f"{config}.jsonl", rows)
            order.shuffle(rows)
        files = sorted(folder.iterdir(), reverse=place == "third")
        texts.append(report(*files)[0])
    assert texts[0] == texts[1] == texts[2]


def test_same_seed_same_digits(two_arms, report):
    texts = [report(two_arms, seed=seed)[0] for seed in (0, 0, 1)]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


def test_another_comparison_changes_no_interval(two_arms, report):
    alone = comparison(report(two_arms)[1])
    for config, scores in (("L3", [1, 0, 1]), ("L4", [0, 1, 1])):
        write(two_arms.parents[1] / f"stress/smollm2/{config}.jsonl", arm(config, scores, task="stress", context_length=16384))
    text, results = report(two_arms.parents[1])
    assert comparison(results) == alone
    assert "2 comparisons made, so each p is held to α/2 = 0.0250" in text


# --- what is kept apart ------------------------------------------------------------------------------------------------------


def test_haystacks_share_no_cell(two_arms, report):
    write(two_arms / "L3-prose.jsonl", arm("L3", [0] * 12, haystack="prose", settings_hash="prose"))
    write(two_arms / "L4-prose.jsonl", arm("L4", [0] * 12, haystack="prose", settings_hash="prose"))
    text, results = report(two_arms)
    assert "| L3     | 100.0 [75.8, 100.0] 12/12 |" in text
    assert "| L3     | 0.0 [0.0, 24.2] 0/12 |" in text
    assert re.search(r"\| Config \| NIAH 4k noise +\| Peak", text)
    assert re.search(r"\| Config \| NIAH 4k prose +\| Peak", text)
    assert [(one["haystack"], one["arm_a"], one["delta"] > 0) for one in results["comparisons"]] == [
        ("noise", "L3", True),
        ("prose", "L3", False),
    ]


def test_a_haystack_with_dashes_is_no_part_of_the_arm(two_arms, report):
    """results/squad/<model>/L3-dev-v1.1-part2.jsonl is arm L3 on that set."""
    for config in ("L3", "L4"):
        write(two_arms / f"{config}-dev-v1.1-part2.jsonl", arm(config, [1] * 12, haystack="dev-v1.1-part2"))
    assert "L3-" not in str(report(two_arms))


def test_variants_are_arms_of_their_own(two_arms, report):
    write(two_arms / "L3-chunk.jsonl", arm("L3", [1] * 11 + [0], settings_hash="chunk"))
    text, results = report(two_arms, compare=("L3", "L3-chunk"))
    assert re.search(r"\| L3-chunk \| 91.7 \[64.6, 98.5\] 11/12 +\|", text)
    assert (comparison(results)["arm_b"], comparison(results)["both_only_a_only_b_neither"]) == ("L3-chunk", [11, 1, 0, 0])
    assert "L3, L3-chunk, L4" in refusal(two_arms, "--compare", "L3", "L9")


def test_models_and_hardware_are_not_pooled(two_arms, report):
    write(two_arms.parent / "mistral/L3.jsonl", arm("L3", [1, 0], model="mistral", device="cuda", dtype="float16", quant="nf4"))
    write(two_arms.parent / "again/L3.jsonl", arm("L3", [1, 0], dtype="float32"))
    text, _ = report(two_arms.parent)
    headings = [line for line in text.splitlines() if line.startswith("### ")]
    assert headings[:3] == [
        "### mistral, cuda float16 nf4, haystack noise",
        "### smollm2, cpu bfloat16, haystack noise",
        "### smollm2, cpu float32, haystack noise",
    ]
    assert "Not compared: mistral, cuda float16 nf4, NIAH noise, EM: 0 finished pairs, at least 2 are needed." in text


def test_out_of_memory_is_counted_beside_em(two_arms, report):
    rows = [*arm("L1", [1, 0], context_length=8192), *(out_of_memory("L1", case, context_length=8192) for case in (2, 3, 4))]
    rows.append(record("L1", 5, None, context_length=8192, error="ValueError: other"))
    write(two_arms / "L1.jsonl", rows)
    write(two_arms / "L2.jsonl", [out_of_memory("L2", case, context_length=8192) for case in range(15)])
    text, _ = report(two_arms)
    assert "50.0 [9.5, 90.5] 1/2, OOM ×3, error ×1" in text
    assert re.search(r"\| L2 +\| – +\| OOM ×15 ", text)


def test_f1_table_and_comparison(tmp_path, report):
    f1 = {"L3": [1.0, 0.8, 0.4, 0.0, 1.0, 0.5], "L4": [1.0, 0.2, 0.0, 0.0, 0.5, 0.5]}
    for config, scores in f1.items():
        rows = [record(config, i, int(score == 1), task="squad", f1=score, context_length=8192) for i, score in enumerate(scores)]
        write(tmp_path / f"{config}.jsonl", rows)
    text, results = report(tmp_path)
    assert re.search(r"\| SQuAD 8k noise \| L3 +\| 6 \| 33.3 \| 61.7 \[.*\] \| \+28.3 pp", text)
    one = comparison(results, "squad", "f1")
    assert one["delta"] == pytest.approx(1.5 / 6)
    assert one["p_sign_flip"] == 2 / 2**3  # three cases differ, all for L3
    assert "2 comparisons made" in text


def test_thesis_figures_are_labelled_as_reported(two_arms, report):
    text, _ = report(two_arms)
    assert "they were not measured by us" in text
    assert re.search(r"\| L4 +\| reported: T4, Mistral-7B NF4 +\| 100 +\| 60 +\| 40 +\| 16.7", text)
    assert re.search(r"\| L4 +\| ours: smollm2, cpu bfloat16, noise +\| 33.3 ", text)
    reported = [line for line in text.splitlines() if line.endswith("| yes                  |")]
    assert len(reported) == 3


# --- damage: handled and counted, or refused with file and line --------------------------------------------------------------


def damaged(two_arms, edit):
    """L3.jsonl after `edit` of its text."""
    path = two_arms / "L3.jsonl"
    path.write_bytes(edit(path.read_text(encoding="utf-8")).encode("utf-8"))
    return two_arms


@pytest.mark.parametrize(
    ("edit", "counted", "n_pairs"),
    [
        (lambda text: text[:-40], "torn last lines dropped", 11),
        (lambda text: text.replace("\n", "\n\n", 1), "blank lines skipped", 12),
        (lambda text: "\ufeff" + text, "byte-order marks skipped", 12),
        (lambda text: text.replace("\n", "\r\n"), "files with CRLF line ends", 12),
        (lambda text: text + text.splitlines(keepends=True)[4], "identical rows counted once", 12),
        (lambda text: json.dumps(out_of_memory("L3", 3)) + "\n" + text, "failed tries replaced by a later try", 12),
        (lambda text: text[:-1], None, 12),  # only the line end is missing: the row is whole
    ],
)
def test_damage_that_is_handled(two_arms, report, edit, counted, n_pairs):
    text, results = report(damaged(two_arms, edit))
    assert results["left_out"] == ({counted: 1} if counted else {})
    assert (f"1 {counted}." if counted else "nothing left out.") in text
    assert comparison(results)["n_pairs"] == n_pairs


def change(line, **fields):
    """Edits one line's record."""

    def edit(text):
        lines = text.splitlines(keepends=True)
        lines[line - 1] = json.dumps(json.loads(lines[line - 1]) | fields) + "\n"
        return "".join(lines)

    return edit


@pytest.mark.parametrize(
    ("edit", "place", "fault"),
    [
        (lambda text: text.replace("}\n{", "}{", 1), "L3.jsonl:1", "more than one JSON value"),
        (lambda text: text.replace("}\n{", "}{").rstrip("\n"), "L3.jsonl:1", "more than one JSON value"),
        (lambda text: text.replace(":", "", 1), "L3.jsonl:1", "no valid JSON"),
        (lambda text: text[:-40] + "\n", "L3.jsonl:12", "no valid JSON"),
        (lambda text: "[1]\n" + text, "L3.jsonl:1", "a JSON list; expected one object a line"),
        (lambda text: text.replace('"em": ', '"m": ', 1), "L3.jsonl:1", "lacks em;"),
        (change(2, em=float("nan")), "L3.jsonl:2", "NaN"),
        (change(2, em="1"), "L3.jsonl:2", "em is '1'"),
        (change(2, em=0.5), "L3.jsonl:2", "em is 0.5"),
        (change(2, em=None), "L3.jsonl:2", "em is None"),
        (change(2, f1=1.5), "L3.jsonl:2", "f1 is 1.5, expected a number from 0 to 1 or null;"),
        (change(2, kv_bytes_decode="12"), "L3.jsonl:2", "kv_bytes_decode is '12'"),
        (lambda text: text.replace('"itl_ms_mean": 20.0', '"itl_ms_mean": 1e999', 1), "L3.jsonl:1", "itl_ms_mean is inf"),
        (change(3, settings_hash="other"), "L3.jsonl:3", "settings_hash is 'other' but 'L3' above"),
        (change(3, model="mistral"), "L3.jsonl:3", "model is 'mistral' but 'smollm2' above"),
        (change(3, task="squad"), "L3.jsonl:3", "task is 'squad'"),
        (lambda text: text + change(1, em=0)(text.splitlines(keepends=True)[0]), "L3.jsonl:13", "finished already at"),
        (change(4, answers=["7"]), "L4.jsonl:4", "not the same case"),
    ],
)
def test_damage_that_is_refused(two_arms, edit, place, fault):
    with pytest.raises(bootstrap.Refusal) as refused:
        bootstrap.main(bootstrap.Args(paths=(damaged(two_arms, edit),)))
    assert place in str(refused.value)
    assert fault in str(refused.value)
    assert "\n" not in str(refused.value)


def test_two_settings_in_one_arm_are_refused(two_arms):
    write(two_arms / "old/L3.jsonl", arm("L3", [1] * 3, settings_hash="old"))
    assert re.search(r"L3\.jsonl:1 has other settings than .*L3\.jsonl:1", refusal(two_arms))


def test_a_file_named_twice_counts_once(two_arms, report):
    assert report(two_arms, two_arms / "L3.jsonl", two_arms.parent)[1]["rows"] == 24


def test_a_case_missing_or_failed_in_one_arm_makes_no_pair(two_arms, report):
    write(two_arms / "L4.jsonl", [*arm("L4", [0] * 8), out_of_memory("L4", 8), record("L4", 9, None, error="ValueError: other")])
    text, results = report(two_arms)
    one = comparison(results)
    assert (one["n_pairs"], one["n_in_one_arm"], one["n_failed"]) == (8, 2, 2)
    assert "Left out of smollm2, cpu bfloat16, NIAH noise: 2 cases in one arm only, 2 failed in either." in text


@pytest.mark.parametrize("n", [0, 1])
def test_no_pair_and_one_pair(two_arms, report, n):
    write(two_arms / "L4.jsonl", [*arm("L4", [0] * n), *(out_of_memory("L4", case) for case in range(n, 12))])
    text, results = report(two_arms)
    assert f"EM: {n} finished pair{'s' if n == 0 else ''}, at least 2 are needed." in text
    assert comparison(results)["p_bootstrap"] is None


def test_one_group_gives_no_interval(two_arms, report):
    for config in ("L3", "L4"):
        write(two_arms / f"{config}.jsonl", arm(config, [1, 0, 1], group_id="the only haystack"))
    assert "one group only at 4k, so nothing there can be resampled" in report(two_arms)[0]


def test_no_rows(tmp_path):
    assert "does not exist; run an eval script first" in refusal(tmp_path / "results")
    write(tmp_path / "empty/L3.jsonl", [])
    assert f"no record in {tmp_path / 'empty'} (1 record files); run an eval script first" in refusal(tmp_path / "empty")


def test_other_files_are_ignored_and_counted(two_arms, report):
    write(two_arms / "training.jsonl", [{"epoch": 1}])
    assert report(two_arms)[1]["left_out"] == {"other .jsonl files ignored": 1}
    assert "lacks task" in refusal(two_arms / "training.jsonl")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--n-resamples", "50"), "--n-resamples 50 is too few; expected at least 100, since a 95 % interval needs its tails"),
        (("--seed", "-1"), "--seed -1 is negative; expected 0 or more"),
        (("--block", "ablation"), "--block ablation names marker lines of no file; pass --markdown too"),
        (("--block", "a -->", "--markdown", "page.md"), "--block 'a -->' is no name; expected letters, digits and dashes"),
    ],
)
def test_senseless_options(two_arms, options, sentence):
    assert refusal(two_arms, *options) == f"error: {sentence}\n"


# --- what is written ---------------------------------------------------------------------------------------------------------


def test_markdown_block(two_arms, report):
    path = two_arms / "README.md"
    text, results = report(two_arms, markdown=path)
    tables = text.removesuffix("\n").rpartition("\n")[0]
    begin, end = "<!-- bootstrap:begin -->", "<!-- bootstrap:end -->"
    assert path.read_text(encoding="utf-8") == f"{begin}\n{tables}\n{end}\n"
    assert results["written"] == [str(path)]

    around = f"# Title\r\n\r\n{begin}\nold\n{end}\r\nend".encode()
    path.write_bytes(around)
    report(two_arms, markdown=path)
    assert path.read_bytes() == around.replace(b"old", tables.encode())

    path.write_text(f"{end} {begin}", encoding="utf-8")
    assert "add them where the tables should stand" in refusal(two_arms, "--markdown", path)
    assert path.read_text(encoding="utf-8") == f"{end} {begin}"


def test_one_page_holds_several_blocks(two_arms, report):
    page = two_arms / "README.md"
    report(two_arms, markdown=page, block="ablation")
    named = page.read_text(encoding="utf-8")
    assert named.startswith("<!-- bootstrap:begin ablation -->\n###") and named.endswith("\n<!-- bootstrap:end ablation -->\n")
    assert "has no lines <!-- bootstrap:begin --> and <!-- bootstrap:end --> in this" in refusal(two_arms, "--markdown", page)

    page.write_text(f"{named}\n<!-- bootstrap:begin -->\nold\n<!-- bootstrap:end -->\n", encoding="utf-8")
    report(two_arms / "L3.jsonl", markdown=page)
    text = page.read_text(encoding="utf-8")
    assert text.startswith(named) and "old" not in text
    assert text.endswith("12 cases of 1 files: nothing left out.\n<!-- bootstrap:end -->\n")

    plain = text.removeprefix(named)
    report(two_arms / "L4.jsonl", markdown=page, block="ablation")
    assert page.read_text(encoding="utf-8") != text and page.read_text(encoding="utf-8").endswith(plain)


def test_json_file_and_unwritable_output(two_arms, report):
    path = two_arms / "all.json"
    report(two_arms, json=path)
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    assert [(cell["arm"], cell["n_right"], cell["n"]) for cell in cells] == [("L3", 12, 12), ("L4", 4, 12)]
    for flag in ("--json", "--markdown", "--plots"):
        inside = two_arms / "L3.jsonl" / "all"
        assert re.fullmatch(rf"error: cannot write {inside} \(.+\); choose another {flag}\n", refusal(two_arms, flag, inside))


def test_what_cannot_be_read_is_one_sentence(two_arms):
    (two_arms / "L5.jsonl").mkdir()
    assert re.search(r"cannot read .*L5\.jsonl \(Is a directory\); name files that can be read", refusal(two_arms))
    too_long = two_arms / ("x" * 300)
    assert f"cannot read {too_long} (File name too long); name files that can be read" in refusal(too_long)


ABLATION = [*(f"results/{task}/smollm2/ablation" for task in ("niah", "squad", "stress")), "results/niah/smollm2/L2.jsonl",
            "results/niah/smollm2/L2-prose.jsonl", "results/squad/smollm2/L2-squad_cognito.jsonl",
            "results/stress/smollm2/L2.jsonl"]


@pytest.mark.parametrize("block, paths, arms", [
    ("", ["results"], None),
    ("ablation", ABLATION, ("L6-kvzap-mlp-keep0.4-pooled", "L6-key-norm-keep0.4")),
])
def test_tables_are_those_of_the_committed_rows(block, paths, arms, report):
    page = "results/README.md"
    begin, end = (line.decode() for line in bootstrap.marker_lines(block))
    text = (ROOT / page).read_text(encoding="utf-8")
    tables = text.partition(begin + "\n")[2].partition("\n" + end)[0]
    printed = report(*(ROOT / path for path in paths), compare=arms)[0].removesuffix("\n").rpartition("\n")[0]
    assert tables == printed, f"the tables are old: benchmarks/reference.sh has the command that writes them to {page}"


def trace(case, eviction):
    rows, n_seen, held = [], 0, 0
    events = ["prefill_chunk"] * 8 + eviction + ["decode"] * 3 + ["page_in"]
    for step, event in enumerate(events):
        change = {"prefill_chunk": 256, "evict": -200, "decode": 1, "page_in": 200}[event]
        n_seen, held = n_seen + max(0, change) * (event != "page_in"), held + change
        rows.append({"event": event, "case_id": case, "step": step, "n_seen": n_seen, "kv_bytes": 2**14 * held})
    return rows


@pytest.fixture
def drawn(two_arms, report):
    """A folder with every picture of two haystacks, failed cases, a Hub id of a model and two traces."""
    for haystack in ("noise", "prose"):
        for length in (4096, 8192, 16384, 32768):
            for config in ("L1", "L2", "L3", "L4", "L5"):
                rows = [*arm(config, [1, 0, 1] * 4, context_length=length), out_of_memory(config, 12, context_length=length)]
                rows = [row | {"model": "mistralai/Mistral-7B-Instruct-v0.3", "haystack": haystack} for row in rows]
                write(two_arms / f"{length}/{config}-{haystack}.jsonl", rows)
    write(two_arms / "L2.trace.jsonl", trace("a", []))
    write(two_arms / "L3.trace.jsonl", [*trace("a", ["evict"] * 3), *trace("b", ["evict"])])
    _, results = report(two_arms, plots=two_arms / "plots")
    return two_arms / "plots", results["written"]


def test_pictures(drawn):
    folder, written = drawn
    assert sorted(map(str, folder.iterdir())) == sorted(written)
    stems = {Path(path).stem for path in written}
    for stem in ("niah-heatmap-smollm2-cpu-bfloat16-noise", "pareto-smollm2-cpu-bfloat16-noise", "trace-niah-smollm2"):
        assert stem in stems
    assert "itl-mistralai-mistral-7b-instruct-v0-3-cpu-bfloat16-prose" in stems
    for stem in stems:
        assert (folder / f"{stem}.png").read_bytes().startswith(b"\x89PNG")
        assert "</svg>" in (folder / f"{stem}.svg").read_text(encoding="utf-8")


def test_pictures_have_room_for_their_text(two_arms, report, monkeypatch):
    """Every text lies inside its figure, and no title, label, tick or legend lies on another."""
    figures = []
    monkeypatch.setattr(bootstrap, "save_figure", lambda figure, folder, *name: figures.append((name, figure)) or [])
    write(two_arms / "L3-chunk.jsonl", arm("L3", [1] * 11 + [0], settings_hash="chunk"))
    for config in ("L1", "L2", "L3", "L4", "L5"):
        lengths = (4096,) if config == "L5" else (4096, 8192, 16384, 32768)
        rows = [row for length in lengths for row in arm(config, [1, 0, 1] * 4, context_length=length)]
        write(two_arms / f"mistral/{config}.jsonl", [row | {"model": "mistralai/Mistral-7B-Instruct-v0.3"} for row in rows])
    for scorer, pooled in itertools.product(("kvzap-mlp", "kvzap-linear", "key-norm", "kvzip+", "random"), (False, True)):
        rows = [row for length in (4096, 8192) for row in arm("L6", [1, 0, 1] * 4, context_length=length, haystack="prose")]
        name = f"L6-{scorer}-keep0.4" + "-pooled" * pooled
        write(two_arms / f"ablation/{name}-prose.jsonl", [row | {"scorer": scorer, "keep": 0.4, "pooled": pooled} for row in rows])
    write(two_arms / "L2.trace.jsonl", trace("a", []))
    report(two_arms, two_arms / "ablation", plots=two_arms / "plots")
    assert len(figures) == 11
    for name, figure in figures:
        figure.draw_without_rendering()
        texts = [figure._suptitle, figure._supylabel, *figure.legends]
        for axis in (axis for axis in figure.axes if axis.axison):
            texts += [axis.title, axis.xaxis.label]
            for side, ends in ((axis.xaxis, axis.get_xlim()), (axis.yaxis, axis.get_ylim())):
                ticks = zip(side.get_ticklocs(), side.get_ticklabels(), strict=False)  # inner panels have none
                texts += [label for place, label in ticks if min(ends) <= place <= max(ends)]
        boxes = [(text, text.get_window_extent()) for text in texts if text in figure.legends or text.get_text()]
        width, height = figure.canvas.get_width_height()
        for place, (text, box) in enumerate(boxes):
            assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height, (name, text)
            for other, other_box in boxes[place + 1 :]:
                assert not box.overlaps(other_box), (name, text, other)


def test_removed_fraction_of_each_way_of_pruning(two_arms):
    """A line per scorer and rule through its levels, in order of what is removed; the full cache is a line across."""
    full = arm("L2", [1] * 12 + [0] * 12)
    rows = [row | {"arm": "L2", "hardware": "cpu", "scorer": None} for row in full]  # half of them on cases that none pruned
    each = (("random", 0.2, False, 0.8, 3), ("random", 0.6, False, 0.4, 9), ("random", 0.5, True, 0.5, 6),
            ("kvzap-mlp", None, False, 0.6, 12))
    for scorer, keep, pooled, level, n_right in each:
        pruned = arm("L6", [1.0] * n_right + [0.0] * (12 - n_right), compression_ratio=level)
        how = {"hardware": "cpu", "scorer": scorer, "keep": keep, "pooled": pooled}
        rows += [row | how | {"arm": f"L6-{scorer}-{level}"} for row in pruned]
    (axis,) = bootstrap.draw_removed(rows, "title").axes
    lines = {container.get_label(): container.lines[0].get_ydata().tolist() for container in axis.containers}
    assert lines == {"kvzap-mlp, threshold": [100], "random, per head": [75, 25], "random, pooled": [50]}
    assert [line.get_ydata()[0] for line in axis.lines if line.get_label() == "L2, full cache"] == [100]


def test_ablations_and_peers_are_read_where_they_are_named(two_arms, report):
    pruned = [row | {"scorer": "random", "keep": 0.4, "pooled": False} for row in arm("L6", [1] * 12)]
    write(two_arms / "ablation/L6-random-keep0.4.jsonl", pruned)
    for method in ("knorm", "snapkv"):  # a peer names its files by its own methods
        write(two_arms / f"peer/{method}.jsonl", arm(f"kvpress-{method}", [1] * 12))
    for parent in (two_arms, two_arms.parents[1]):
        text, results = report(parent)
        assert results["left_out"] == {
            "ablation files ignored (name that folder to read them)": 1,
            "peer files ignored (name that folder to read them)": 2,
        }
        assert "1 ablation files ignored (name that folder to read them); 2 peer files ignored" in text
        assert results["rows"] == 24 and "L6-random-keep0.4" not in text and "knorm" not in text

    text, results = report(two_arms / "ablation")
    assert "| L6-random-keep0.4 " in text and results["left_out"] == {}
    text, results = report(two_arms / "peer")
    assert "| knorm " in text and "| snapkv " in text and results["left_out"] == {}
    assert "| knorm " in report(two_arms / "peer/knorm.jsonl")[0]
    text, results = report(two_arms, two_arms / "ablation")
    assert results["left_out"] == {"peer files ignored (name that folder to read them)": 2} and results["rows"] == 36
    text, _ = report(two_arms / "ablation", two_arms / "L3.jsonl", compare=("L3", "L6-random-keep0.4"))
    assert "| L3 " in text and "thesis" not in text


def test_pictures_are_the_same_bytes_every_time(two_arms, report):
    for folder in ("one", "two"):
        report(two_arms, plots=two_arms / folder)
    for path in sorted((two_arms / "one").iterdir()):
        assert path.read_bytes() == (two_arms / "two" / path.name).read_bytes(), path.name


def test_no_two_of_twenty_arms_look_alike():
    arms = [f"arm{i}" for i in range(20)]
    looks = [bootstrap.arm_style(arm, arms) for arm in arms]
    assert len({(look["marker"], look["markerfacecolor"]) for look in looks}) == 20


def test_bad_trace_is_refused(two_arms):
    write(two_arms / "L3.trace.jsonl", [{"event": "evict", "case_id": "a", "step": 0, "n_seen": 256}])
    assert "L3.trace.jsonl:1 is no trace row" in refusal(two_arms)


def test_starts_without_the_libraries_it_may_not_need():
    names = ("matplotlib", "tyro", "torch", "transformers")
    code = f"import sys, bootstrap; print([name for name in {names} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.stdout == "[]\n", result.stderr
