"""What the classes' defaults lack for a tiny model of a type that takes videos: sizes that fit, tokens, places.

Keys of a type, all optional:
    config: values of its configuration, by dotted names.
    video, image: settings of the video and the image processor.
    ids: special tokens by the names of the configuration's values, where the processor has other names.
    tokens: of its tokenizer, by the names under which the processor reads them.
    places: what its published chat template writes for a video and an image, around {token}.
    Others are arguments of the processor itself.
"""

_SIDE = 56
_SQUARE = {"size": {"height": _SIDE, "width": _SIDE}}
_CROPPED = {"size": {"shortest_edge": _SIDE}, "crop_size": {"height": _SIDE, "width": _SIDE}}
_QWEN_PIXELS = {"size": {"shortest_edge": 4 * 28 * 28, "longest_edge": 16 * 28 * 28}}
_QWEN = {
    "video": {**_QWEN_PIXELS, "cap_pixels_per_frame": False},
    "image": _QWEN_PIXELS,
    "places": ("<|vision_start|>{token}<|vision_end|>",) * 2,
}
_QWEN3_PIXELS = {"size": {"shortest_edge": 4 * 32 * 32, "longest_edge": 64 * 32 * 32}}
_QWEN3 = {
    "video": {**_QWEN3_PIXELS, "cap_pixels_per_frame": False},
    "image": {**_QWEN3_PIXELS, "patch_size": 16},
    "places": ("<|vision_start|>{token}<|vision_end|>",) * 2,
}
_MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
_CLIP_TOWER = {"vision_config.image_size": _SIDE, "vision_config.patch_size": 14}
_GLM = {
    "ids": {"video_start_token_id": "<|begin_of_video|>", "video_end_token_id": "<|end_of_video|>"},
    "places": ("<|begin_of_video|>{token}<|end_of_video|>", "<|begin_of_image|>{token}<|end_of_image|>"),
    "video": {"size": {"shortest_edge": 2 * 56 * 56, "longest_edge": 20 * 56 * 56}},
    "image": {"size": {"shortest_edge": 2 * 56 * 56, "longest_edge": 20 * 56 * 56}},
}

_GEMMA = {
    "tokens": {"audio_token": "<audio>", "boa_token": "<boa>", "eoa_token": "<eoa>"},
    "image": {"max_soft_tokens": 70},
}
_MINICPM = {
    "image": {"scale_resolution": 112},
    "video": {"scale_resolution": 112},
    "config": {"vision_config.image_size": 112, "vision_config.patch_size": 14, "patch_size": 14},
}
_GEMMA_VISION = {
    "model_type": "gemma4_vision",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "position_embedding_size": 64,
}


def _sizes(part: str, **more) -> dict:
    """The sizes of a part of a configuration whose default sizes cannot be changed one by one."""
    common = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 512,
    }
    return {f"{part}.{name}": value for name, value in (common | more).items() if value is not None}


_NO_TEXT = {"num_key_value_heads": None, "head_dim": None, "vocab_size": None}

SETTINGS: dict[str, dict] = {
    "cohere_compass": {
        "video": _QWEN3["video"],
        "image": {**_QWEN3_PIXELS, "patch_size": 16},
        "config": {
            "text_config.rope_parameters": {
                name: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
                for name in ("full_attention", "sliding_attention")
            },
            "vision_config.deepstack_visual_indexes": [0],
        },
    },
    "cosmos3_edge": {
        "config": {
            **_sizes("text_config", rope_parameters={**_MROPE, "mrope_section": [4, 2, 2]}),
            **_sizes("vision_config", **_NO_TEXT),
            "projector_hidden_size": 64,
        },
    },
    "cosmos3_omni": {
        "processor": "Qwen3VLProcessor",
        **_QWEN3,
        "config": {"text_config.rope_parameters": _MROPE, "vision_config.deepstack_visual_indexes": [0]},
    },
    "diffusion_gemma": _GEMMA,
    "dots3_note": {
        "video": {**_QWEN3["video"], "patch_size": 14, "temporal_patch_size": 1},
        "image": {**_QWEN_PIXELS, "patch_size": 14, "temporal_patch_size": 1},
    },
    "ernie4_5_vl_moe": {
        "places": (
            "<video_start_token>{token}<video_end_token>",
            "<image_start_token>{token}<image_end_token>",
        ),
        "video": {**_QWEN_PIXELS, "draw_on_frames": False},  # drawing takes the checkpoint's font
        "image": _QWEN_PIXELS,
        "config": {"text_config.rope_parameters": {**_MROPE, "mrope_section": [3, 3, 2]}},
    },
    "exaone4_5": _QWEN,
    "gemma4": {**_GEMMA, "config": {"vision_config": _GEMMA_VISION}},
    "gemma4_unified": {**_GEMMA, "config": {"vision_config": {"mm_embed_dim": 64, "output_proj_dims": 64}}},
    "glm5_next": _GLM,
    "glmga": {"processor": "Glm46VProcessor", **_GLM, "config": {"text_config.rope_parameters": _MROPE}},
    "hyperclovax_vision_v2": _QWEN,
    "lfm3_vl": {
        "video": _QWEN3["video"],
        "image": _QWEN3["image"],
        "config": {
            "text_config.layer_types": ["conv", "full_attention"],
            "vision_config.layer_types": ["conv", "full_attention"],
        },
    },
    "minicpm_ocr": _MINICPM,
    "minicpmv4_6": _MINICPM,
    "minicpmv4_7": _MINICPM,
    "molmo2": {
        "ids": {
            "image_start_token_id": "<im_start>",
            "low_res_image_start_token_id": "<low_res_im_start>",
            "image_end_token_id": "<im_end>",
            "image_patch_id": "<im_patch>",
            "frame_start_token_id": "<frame_start>",
            "frame_end_token_id": "<frame_end>",
        },
        "video": _SQUARE,
        "image": {**_SQUARE, "max_crops": 2},
        "config": {
            **_sizes("text_config", rope_scaling_layers=None, additional_vocab_size=0),
            **_sizes("vision_config", num_key_value_heads=4, vocab_size=None),
            **_sizes("adapter_config", num_key_value_heads=4, vocab_size=None, num_hidden_layers=None),
            "adapter_config.text_hidden_size": 64,
            "adapter_config.vision_feature_layer": [1, 0],
            "vision_config.image_size": [56, 56],
            "vision_config.num_position_embeddings": 16,
        },
    },
    "muse_glimmer": {"config": {"out_hidden_size": 256}},
    "muse_spark": {
        "config": {
            **_sizes(
                "text_config",
                moe_intermediate_size=128,
                moe_hidden_size=64,
                num_local_experts=4,
                num_experts_per_tok=2,
                layer_types=["sliding_attention", "full_attention"],
                mlp_layer_types=["sparse", "sparse"],
                layer_rope_theta=[500000.0, 0],
            ),
            **_sizes("vision_config", **_NO_TEXT, layer_types=["window_attention", "full_attention"]),
            "out_hidden_size": 256,
            "projector_hidden_size": 64,
            "audio_config.patch_sizes": [16, 6],
            "audio_config.hidden_sizes": [32, 64],
            "audio_config.depths": [1, 1],
            "audio_config.num_hidden_layers": 2,
            "audio_config.out_hidden_size": 64,
        },
    },
    "glm46v": {**_GLM, "config": {"text_config.rope_parameters": _MROPE}},
    "glm4v": {**_GLM, "config": {"text_config.rope_parameters": _MROPE}},
    "glm4v_moe": {**_GLM, "config": {"text_config.rope_parameters.mrope_section": [2, 1, 1]}},
    "internvl": {
        "image_seq_length": 4,
        "video": _SQUARE,
        "image": _SQUARE,
        "config": {"vision_config.image_size": [_SIDE, _SIDE], "image_seq_length": 4},
    },
    "llava_next_video": {
        "patch_size": 14,
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
        "video": _CROPPED,
        "image": {**_CROPPED, "image_grid_pinpoints": [[56, 112], [112, 56]]},
        "config": {**_CLIP_TOWER, "image_grid_pinpoints": [[56, 112], [112, 56]]},
    },
    "llava_onevision": {
        "num_image_tokens": 16,
        "vision_feature_select_strategy": "full",
        "video": _SQUARE,
        "image": {**_SQUARE, "image_grid_pinpoints": [[56, 56], [56, 112]]},
        "config": {
            **_CLIP_TOWER,
            "vision_config.vision_use_head": False,
            "image_grid_pinpoints": [[56, 56], [56, 112]],
        },
    },
    "perception_lm": {
        "patch_size": 14,
        "video": _SQUARE,
        "image": {"tile_size": _SIDE, "max_num_tiles": 2},
        "config": {
            "projector_pooling_ratio": 2,
            "vision_config": {
                "model_type": "timm_wrapper",
                "architecture": "vit_pe_core_large_patch14_336",
                "do_pooling": False,
                "model_args": {
                    "embed_dim": 64,
                    "depth": 2,
                    "num_heads": 4,
                    "img_size": [_SIDE, _SIDE],
                    "ref_feat_shape": [4, 4],
                    "global_pool": "",
                },
            },
        },
    },
    "qwen2_5_vl": {
        **_QWEN,
        "config": {
            "text_config.rope_parameters": _MROPE,
            "vision_config.fullatt_block_indexes": [1],
            "vision_config.window_size": 56,
        },
    },
    "qwen2_vl": {**_QWEN, "config": {"text_config.rope_parameters": _MROPE}},
    "qwen3_5": _QWEN3,
    "qwen3_5_moe": _QWEN3,
    "qwen3_vl": {**_QWEN3, "config": {"vision_config.deepstack_visual_indexes": [0]}},
    "qwen3_vl_moe": {**_QWEN3, "config": {"vision_config.deepstack_visual_indexes": [0]}},
    "qwen4_exp": {
        **_QWEN3,
        "config": {
            "text_config.indexer_n_heads": 4,
            "text_config.indexer_kv_heads": 1,
            "text_config.indexer_head_dim": 16,
            "text_config.indexer_budget": 64,
            "text_config.indexer_compress_ratio": 16,
        },
    },
    "smolvlm": {
        "image_seq_len": 16,
        "video": {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 64}},
        "image": {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 64}},
        "config": {"vision_config.image_size": 64, "vision_config.patch_size": 8},
    },
    "video_llama_3": {
        "video": {"size": {"shortest_edge": 4 * 28 * 28, "longest_edge": 64 * _SIDE * _SIDE}},
        "image": _QWEN_PIXELS,
        "config": {"vision_config.patch_size": 14},
    },
    "video_llava": {"video": _CROPPED, "image": _CROPPED, "config": _CLIP_TOWER},
}
