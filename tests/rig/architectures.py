"""Tiny configurations of many architectures, for `tests/plugin/architectures.py` to try.

Each entry adds to (or overrides) the common configuration of `rig.models`. An architecture that the
continuous tests start as well has its configuration there.
"""

from __future__ import annotations

from typing import Any

_GROUPED: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 16}
_EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "apertus": {
        "architectures": ["ApertusForCausalLM"], "model_type": "apertus", **_GROUPED,
        "hidden_act": "xielu",
    },
    "arcee": {
        "architectures": ["ArceeForCausalLM"], "model_type": "arcee", **_GROUPED,
        "hidden_act": "relu2", "mlp_bias": False,
    },
    "cohere": {
        "architectures": ["CohereForCausalLM"], "model_type": "cohere", **_GROUPED,
        "layer_norm_eps": 1e-5, "logit_scale": 0.0625, "use_qk_norm": False,
        "tie_word_embeddings": True,
    },
    "cohere2": {
        "architectures": ["Cohere2ForCausalLM"], "model_type": "cohere2", **_GROUPED,
        "layer_norm_eps": 1e-5, "logit_scale": 0.0625, "sliding_window": 4096,
        "tie_word_embeddings": True,
    },
    "deepseek-v2": {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2",
        "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 32,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
        "first_k_dense_replace": 1, "moe_layer_freq": 1, "moe_intermediate_size": 64,
        "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2,
        "n_group": 1, "topk_group": 1, "topk_method": "greedy", "scoring_func": "softmax",
        "norm_topk_prob": False, "routed_scaling_factor": 1.0,
        "rope_scaling": {
            "type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4096,
            "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
        },
    },
    "ernie4_5": {
        "architectures": ["Ernie4_5_ForCausalLM"], "model_type": "ernie4_5", **_GROUPED,
        "use_bias": False,
    },
    "exaone4": {
        "architectures": ["Exaone4ForCausalLM"], "model_type": "exaone4", **_GROUPED,
        "sliding_window": None, "layer_types": ["full_attention"] * 8,
    },
    "gemma": {
        "architectures": ["GemmaForCausalLM"], "model_type": "gemma", **_GROUPED,
        "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    },
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", **_GROUPED,
        "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 16, "sliding_window": 4096, "tie_word_embeddings": True,
        "attn_logit_softcapping": None, "final_logit_softcapping": None,
    },
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", **_GROUPED,
        "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 16, "sliding_window": 4096, "tie_word_embeddings": True,
        "sliding_window_pattern": 2, "rope_local_base_freq": 10000.0,
    },
    "glm4": {
        "architectures": ["Glm4ForCausalLM"], "model_type": "glm4", **_GROUPED,
        "partial_rotary_factor": 0.5, "pad_token_id": 0,
    },
    "glm4-moe": {
        "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", **_GROUPED,
        "partial_rotary_factor": 0.5, "moe_intermediate_size": 64, "n_routed_experts": 8,
        "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
        "use_qk_norm": False, "num_nextn_predict_layers": 0,
    },
    "gpt-oss": {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", **_GROUPED,
        "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 4, "attention_bias": True,
        "swiglu_limit": 7.0,
    },
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_layer": 8, "n_embd": 64,
        "n_head": 4, "n_positions": 8192, "n_ctx": 8192, "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "n_inner": 128,
    },
    "granite": {
        "architectures": ["GraniteForCausalLM"], "model_type": "granite", **_GROUPED,
        "embedding_multiplier": 6.0, "residual_multiplier": 0.5, "logits_scaling": 4.0,
        "attention_multiplier": 0.25,
    },
    "granite-moe": {
        "architectures": ["GraniteMoeForCausalLM"], "model_type": "granitemoe", **_GROUPED,
        "embedding_multiplier": 6.0, "residual_multiplier": 0.5, "logits_scaling": 4.0,
        "attention_multiplier": 0.25, "num_local_experts": 8, "num_experts_per_tok": 2,
    },
    "hunyuan-dense": {
        "architectures": ["HunYuanDenseV1ForCausalLM"], "model_type": "hunyuan_v1_dense",
        "num_key_value_heads": 4, "head_dim": 16, "attention_head_dim": 16, "use_qk_norm": True,
        "use_cla": False,
        "rope_scaling": None,
    },
    "minicpm3": {
        "architectures": ["MiniCPM3ForCausalLM"], "model_type": "minicpm3",
        "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16, "v_head_dim": 16, "scale_emb": 6.0, "scale_depth": 1.4,
        "dim_model_base": 32,
    },
    "minimax-m2": {
        "architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2", **_GROUPED,
        **_EXPERTS, "rotary_dim": 8, "use_qk_norm": True, "qk_norm_type": "per_layer",
        "scoring_func": "sigmoid", "use_routing_bias": True,
    },
    "mistral": {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", **_GROUPED,
        "sliding_window": None,
    },
    "mixtral": {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", **_GROUPED,
        "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None,
    },
    "olmo": {
        "architectures": ["OlmoForCausalLM"], "model_type": "olmo", "num_key_value_heads": 4,
        "clip_qkv": None,
    },
    "olmo2": {
        "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", **_GROUPED,
    },
    "olmoe": {
        "architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,  # whatever the config says, SGLang takes this
        "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": False, "clip_qkv": None,
    },
    "opt": {
        "architectures": ["OPTForCausalLM"], "model_type": "opt", "ffn_dim": 128,
        "word_embed_proj_dim": 64, "do_layer_norm_before": True, "activation_function": "relu",
        "max_position_embeddings": 2048, "enable_bias": True, "tie_word_embeddings": True,
    },
    "persimmon": {
        "architectures": ["PersimmonForCausalLM"], "model_type": "persimmon",
        "hidden_act": "relu2", "layer_norm_eps": 1e-5, "qk_layernorm": True,
        "partial_rotary_factor": 0.5, "intermediate_size": 256,
    },
    "phi": {
        "architectures": ["PhiForCausalLM"], "model_type": "phi", "num_key_value_heads": 4,
        "intermediate_size": 256,
        "partial_rotary_factor": 0.5, "hidden_act": "gelu_new", "layer_norm_eps": 1e-5,
        "qk_layernorm": False,
    },
    "phi3": {
        "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", **_GROUPED,
        "original_max_position_embeddings": 8192, "pad_token_id": 0, "sliding_window": None,
    },
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_key_value_heads": 2,
    },
    "qwen2-moe": {
        "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe",
        "num_key_value_heads": 2, **_EXPERTS, "shared_expert_intermediate_size": 64,
        "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
    "qwen3-moe": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", **_GROUPED,
        **_EXPERTS, "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
    "stablelm": {
        "architectures": ["StableLmForCausalLM"], "model_type": "stablelm",
        "num_key_value_heads": 2, "partial_rotary_factor": 0.5, "layer_norm_eps": 1e-5,
        "use_qkv_bias": False, "qk_layernorm": False, "use_parallel_residual": False,
    },
    "starcoder2": {
        "architectures": ["Starcoder2ForCausalLM"], "model_type": "starcoder2",
        "num_key_value_heads": 2, "norm_epsilon": 1e-5, "use_bias": True,
        "hidden_act": "gelu_pytorch_tanh", "sliding_window": None,
    },
}  # fmt: skip
