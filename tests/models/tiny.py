"""Random two-layer models of several architectures: small enough for a test, with attention far from uniform."""

import inspect

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

VOCABULARY = 101
#: what a model's forward calls its cache; renamed in transformers 5.24
CACHE = ({"cache", "past_key_values"} & set(inspect.signature(transformers.LlamaForCausalLM.forward).parameters)).pop()
_COMMON = {"vocab_size": VOCABULARY, "num_hidden_layers": 2, "max_position_embeddings": 64, "pad_token_id": 0}
_LLAMA = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def llama(**changes):
    return _build("Llama", **_COMMON, **_LLAMA, **changes)


def qwen2(**changes):
    return _build("Qwen2", **_COMMON, **{k: v for k, v in _LLAMA.items() if k != "head_dim"}, **changes)


def gemma3(**changes):
    options = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 9}
    return _build("Gemma3", "Gemma3TextConfig", **_COMMON, **_LLAMA, **options, **changes)


def gpt2(**changes):
    return _build("GPT2", vocab_size=VOCABULARY, n_embd=24, n_layer=2, n_head=3, n_positions=64, **changes)


def gpt_neox(**changes):
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    return _build(
        "GPTNeoX",
        **_COMMON,
        hidden_size=32,
        intermediate_size=40,
        num_attention_heads=2,
        rope_parameters=rope,
        **changes,
    )


def cohere(**changes):
    return _build("Cohere", **_COMMON, **{k: v for k, v in _LLAMA.items() if k != "head_dim"}, **changes)


def phi3(**changes):
    return _build("Phi3", **_COMMON, **{k: v for k, v in _LLAMA.items() if k != "head_dim"}, **changes)


def opt(**changes):
    return _build(
        "OPT",
        **_COMMON,
        hidden_size=24,
        ffn_dim=40,
        num_attention_heads=3,
        word_embed_proj_dim=24,
        dropout=0.0,
        **changes,
    )


def yarn(**changes):
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
    return llama(rope_parameters=rope, **changes)


ARCHITECTURES = {f.__name__: f for f in (llama, qwen2, gemma3, gpt2, gpt_neox, cohere, phi3, opt, yarn)}
#: where each keeps its keys before rotation (the module whose output they are), if one does
KEY_OUTPUT = {"llama": "k_proj", "qwen2": "k_proj", "gemma3": "k_norm", "yarn": "k_proj"}


def _build(family, config=None, attention="sdpa", **options):
    model_class = getattr(transformers, "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM")
    torch.manual_seed(0)
    built = model_class(getattr(transformers, config or f"{family}Config")(**options, attn_implementation=attention))
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            # the usual initial weights of 0.02 make attention uniform, and biases of 0 hide that they are lost
            parameter.normal_(1.0 if "norm" in name or "ln_" in name else 0.0, 0.3)
    return built.eval()


def tokens(count=24, seed=1):
    return torch.randint(3, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).numpy()


class Words:
    """A tokenizer in one line: each word is its number; `bos` comes first if given."""

    def __init__(self, bos=None):
        self.bos_token_id = bos

    def __call__(self, text):
        return {
            "input_ids": ([] if self.bos_token_id is None else [self.bos_token_id]) + [int(w) for w in text.split()]
        }
