"""Puts the scripts on the path, and offers tiny random models of every supported architecture, and a way to read."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

TINY = dict(vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=512, bos_token_id=1, eos_token_id=2, pad_token_id=0)
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 32,
            "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0]}
ARCHITECTURES = {
    "llama": {},
    "mistral": dict(sliding_window=24),
    "qwen2": {},
    "qwen3": dict(head_dim=16),
    "phi3": dict(rope_parameters=LONGROPE, original_max_position_embeddings=32),
    "gemma": dict(head_dim=16),
    "gemma2": dict(head_dim=16, sliding_window=24, attn_logit_softcapping=5.0, final_logit_softcapping=8.0, query_pre_attn_scalar=16),
    "gemma3_text": dict(head_dim=16, sliding_window=24, layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
}


def tiny_config(architecture: str):
    from transformers import AutoConfig

    return AutoConfig.for_model(architecture, **{**TINY, **ARCHITECTURES[architecture]})


def read(lm, cache, ids, chunk: int | None = None, policy=None):
    """Read `ids` (T,), within `attention`, in chunks or in one, the policy after each; the last token's logits (V,)."""
    import cognito_run as core

    for part in ids.split(chunk or len(ids)):
        logits = core.forward(lm, cache, part)
        if policy is not None:
            policy.after_chunk(cache)
    return logits


@pytest.fixture(params=ARCHITECTURES)
def tiny_model(request):
    """A random fp32 model; big initial weights, so that attention is far from uniform and a fault shows."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = tiny_config(request.param)
    config.initializer_range = 0.2
    if request.param == "phi3":  # what fit_window does where a run passes the original window
        config.rope_parameters = {**config.rope_parameters, "short_factor": config.rope_parameters["long_factor"]}
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def smollm2_tokenizer():
    import cognito_run

    return cognito_run.load_tokenizer("smollm2")


@pytest.fixture(scope="session")
def smollm2(smollm2_tokenizer):
    """The embedded SmolLM2-135M-Instruct in fp32 on the CPU."""
    import cognito_run

    runtime = cognito_run.resolve_runtime("smollm2", "cpu", "float32", "none")
    return cognito_run.load_model(runtime, cognito_run.load_config("smollm2"), smollm2_tokenizer)
