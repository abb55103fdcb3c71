"""Tiny models of many architectures, from transformers configurations with random weights, and how users call them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn

import tsopt
from bench.models import perturbed

ARCHITECTURES: dict[str, Architecture] = {}
Call = Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Architecture:
    """What a model is for, how it is made, and how it is called: by keyword, as the library's processors return it."""

    kind: str
    make: Callable[[], nn.Module]
    call: Call

    def load(self) -> tuple[nn.Module, tsopt.Example]:
        torch.manual_seed(0)
        model = perturbed(self.make()).eval()
        return model, tsopt.example(**self.call())


def add(kind: str, name: str, model: str, call: Call, config: str | None = None, /, **options: Any) -> None:
    """Enters an architecture: the class of the model, a call, the class of its configuration, and its options."""

    def make() -> nn.Module:
        given = {key: value() if callable(value) else value for key, value in options.items()}
        return getattr(transformers, model)(_config(config or f"{model.partition('For')[0]}Config", **given))

    ARCHITECTURES[name] = Architecture(kind, make, call)


def _config(name: str, **options: Any) -> Any:
    return getattr(transformers, name)(**options)


def part(name: str, **options: Any) -> Callable[[], Any]:
    """The configuration of a part of a model."""
    return lambda: _config(name, **options)


# ---- what the models are called with -----------------------------------------------------------------------


def tokens(vocabulary: int = 99, length: int = 16, batch: int = 2) -> dict[str, torch.Tensor]:
    """Two texts, the second one shorter."""
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[-1, length - length // 4 :] = 0
    return {"input_ids": torch.randint(5, vocabulary, (batch, length)), "attention_mask": mask}


def ids(vocabulary: int = 99, length: int = 16, batch: int = 2) -> dict[str, torch.Tensor]:
    return {"input_ids": tokens(vocabulary, length, batch)["input_ids"]}


def pair() -> dict[str, torch.Tensor]:
    """A source text and the beginning of a target."""
    return {**tokens(), "decoder_input_ids": torch.randint(5, 99, (2, 8))}


def image(size: int = 32, channels: int = 3, batch: int = 2) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(batch, channels, size, size)}


def wave(length: int = 2000) -> dict[str, torch.Tensor]:
    return {"input_values": torch.randn(2, length)}


def boxes(length: int = 16) -> dict[str, torch.Tensor]:
    corner = torch.randint(0, 400, (2, length, 2))
    return {"bbox": torch.cat([corner, corner + 100], -1)}


def series(length: int = 24, lags: int = 7) -> dict[str, torch.Tensor]:
    """The past of a series, and the times that its future is asked for."""
    past = length + lags
    return {
        "past_values": torch.randn(2, past),
        "past_time_features": torch.randn(2, past, 2),
        "past_observed_mask": torch.ones(2, past),
        "future_values": torch.randn(2, 8),
        "future_time_features": torch.randn(2, 8, 2),
    }


WIDTH: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
TEXT: dict[str, Any] = {**WIDTH, "vocab_size": 99, "max_position_embeddings": 64}
LLAMA: dict[str, Any] = {**TEXT, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
VISION: dict[str, Any] = {**WIDTH, "image_size": 32, "patch_size": 8}
SEQ2SEQ: dict[str, Any] = {
    **{"d_model": 32, "vocab_size": 99, "max_position_embeddings": 64, "pad_token_id": 1, "decoder_start_token_id": 2},
    **{f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("layers", 2), ("attention_heads", 4))},
    **{"encoder_ffn_dim": 64, "decoder_ffn_dim": 64},
}
T5: dict[str, Any] = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 99}
MOE: dict[str, Any] = {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}
WAVE: dict[str, Any] = {
    **WIDTH,
    "vocab_size": 32,
    "conv_dim": (32, 32, 32),
    "conv_stride": (5, 4, 4),
    "conv_kernel": (10, 4, 4),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
}
BACKBONE = part(
    "ResNetConfig", embedding_size=8, hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1], layer_type="basic",
    out_features=["stage1", "stage2", "stage3", "stage4"],
)  # fmt: skip
SWIN: dict[str, Any] = {
    "image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [1, 2], "num_heads": [2, 4], "window_size": 4,
}  # fmt: skip

# ---- text: encoders ----------------------------------------------------------------------------------------

add("text", "bert", "BertForSequenceClassification", tokens, **TEXT)
add("text", "bert_mlm", "BertForMaskedLM", tokens, **TEXT)
add("text", "roberta", "RobertaForTokenClassification", tokens, **TEXT)
add("text", "distilbert", "DistilBertForQuestionAnswering", tokens,
    dim=32, n_layers=2, n_heads=4, hidden_dim=64, vocab_size=99)  # fmt: skip
add("text", "albert", "AlbertForSequenceClassification", tokens, **TEXT, embedding_size=16)
add("text", "electra", "ElectraForPreTraining", tokens, **TEXT, embedding_size=16)
add("text", "deberta", "DebertaForSequenceClassification", tokens,
    **TEXT, relative_attention=True, pos_att_type=["c2p", "p2c"])  # fmt: skip
add("text", "deberta_v2", "DebertaV2ForTokenClassification", tokens,
    **TEXT, relative_attention=True, pos_att_type=["c2p", "p2c"], position_buckets=8)  # fmt: skip
add("text", "mpnet", "MPNetForSequenceClassification", tokens, **TEXT)
add("text", "xlnet", "XLNetForSequenceClassification", tokens,
    d_model=32, n_layer=2, n_head=4, d_inner=64, vocab_size=99)  # fmt: skip
add("text", "fnet", "FNetForSequenceClassification", ids,
    hidden_size=32, num_hidden_layers=2, intermediate_size=64, vocab_size=99, max_position_embeddings=64)  # fmt: skip
add("text", "funnel", "FunnelForSequenceClassification", tokens,
    vocab_size=99, d_model=32, n_head=4, d_head=8, d_inner=64, block_sizes=[1, 1], num_decoder_layers=1)  # fmt: skip
add("text", "longformer", "LongformerForSequenceClassification", tokens, **TEXT, attention_window=8)
add("text", "big_bird", "BigBirdForSequenceClassification", tokens, **TEXT, attention_type="original_full")
add("text", "convbert", "ConvBertForSequenceClassification", tokens, **TEXT, embedding_size=16)
add("text", "mobilebert", "MobileBertForSequenceClassification", tokens,
    **{**TEXT, "intermediate_size": 32}, embedding_size=16, intra_bottleneck_size=16, true_hidden_size=16)  # fmt: skip
add("text", "squeezebert", "SqueezeBertForSequenceClassification", tokens, **TEXT, embedding_size=32,
    q_groups=2, k_groups=2, v_groups=2, post_attention_groups=1, intermediate_groups=2, output_groups=2)  # fmt: skip
add("text", "nystromformer", "NystromformerForSequenceClassification", tokens,
    **{**TEXT, "max_position_embeddings": 64}, num_landmarks=16, segment_means_seq_len=16)  # fmt: skip
add("text", "roformer", "RoFormerForSequenceClassification", tokens, "RoFormerConfig", **TEXT, embedding_size=32)
add("text", "rembert", "RemBertForSequenceClassification", tokens,
    **TEXT, input_embedding_size=16, output_embedding_size=16)  # fmt: skip
add("text", "canine", "CanineForSequenceClassification", tokens,
    **{**TEXT, "max_position_embeddings": 128}, local_transformer_stride=8, num_hash_buckets=64)  # fmt: skip
add("text", "modernbert", "ModernBertForSequenceClassification", tokens, **TEXT, local_attention=8,
    pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2)  # fmt: skip
add("text", "megatron_bert", "MegatronBertForSequenceClassification", tokens, **TEXT)
add("text", "ernie", "ErnieForSequenceClassification", tokens, **TEXT)
add("text", "esm", "EsmForMaskedLM", tokens, **TEXT, pad_token_id=1, mask_token_id=4, position_embedding_type="rotary")
add("text", "luke", "LukeModel", tokens, "LukeConfig", **TEXT, entity_vocab_size=20, entity_emb_size=16)
add("text", "splinter", "SplinterForQuestionAnswering", tokens, **TEXT)
add("text", "ibert", "IBertForSequenceClassification", tokens, **TEXT)
add("text", "dpr", "DPRQuestionEncoder", tokens, "DPRConfig", **TEXT)
add("text", "reformer", "ReformerForSequenceClassification", tokens, hidden_size=32, num_attention_heads=2,
    attention_head_size=16, feed_forward_size=64, vocab_size=99, attn_layers=["local", "local"], is_decoder=False,
    axial_pos_shape=[4, 4], axial_pos_embds_dim=[16, 16], local_attn_chunk_length=4)  # fmt: skip
add("text", "tapas", "TapasForSequenceClassification",
    lambda: {**tokens(), "token_type_ids": torch.zeros(2, 16, 7, dtype=torch.long)}, **TEXT)  # fmt: skip

# ---- text: decoders ----------------------------------------------------------------------------------------

add("decoder", "gpt2", "GPT2LMHeadModel", tokens, "GPT2Config",
    n_embd=32, n_layer=2, n_head=4, n_positions=64, vocab_size=99)  # fmt: skip
add("decoder", "gpt_neo", "GPTNeoForCausalLM", tokens, hidden_size=32, num_layers=2, num_heads=4, vocab_size=99,
    attention_types=[[["global", "local"], 1]], max_position_embeddings=64, window_size=8)  # fmt: skip
add("decoder", "gpt_neox", "GPTNeoXForCausalLM", tokens, **TEXT)
add("decoder", "gptj", "GPTJForCausalLM", tokens,
    n_embd=32, n_layer=2, n_head=4, n_positions=64, vocab_size=99, rotary_dim=4)  # fmt: skip
add("decoder", "opt", "OPTForCausalLM", tokens, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=64,
    vocab_size=99, max_position_embeddings=64, word_embed_proj_dim=32)  # fmt: skip
add("decoder", "bloom", "BloomForCausalLM", tokens, hidden_size=32, n_layer=2, n_head=4, vocab_size=99)
add("decoder", "llama", "LlamaForCausalLM", tokens, **LLAMA)
add("decoder", "mistral", "MistralForCausalLM", tokens, **LLAMA, sliding_window=8)
add("decoder", "qwen2", "Qwen2ForCausalLM", tokens, **LLAMA)
add("decoder", "qwen3", "Qwen3ForSequenceClassification", tokens, **LLAMA, head_dim=8)
add("decoder", "gemma2", "Gemma2ForCausalLM", tokens, **LLAMA, head_dim=8, query_pre_attn_scalar=8, sliding_window=8)
add("decoder", "gemma3", "Gemma3ForCausalLM", tokens, "Gemma3TextConfig", **LLAMA, head_dim=8, sliding_window=8)
add("decoder", "phi3", "Phi3ForCausalLM", tokens, **LLAMA)
add("decoder", "falcon", "FalconForCausalLM", tokens,
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=99, alibi=True)  # fmt: skip
add("decoder", "mpt", "MptForCausalLM", tokens, d_model=32, n_layers=2, n_heads=4, vocab_size=99, max_seq_len=64)
add("decoder", "stablelm", "StableLmForCausalLM", tokens, **LLAMA)
add("decoder", "olmo2", "Olmo2ForCausalLM", tokens, **LLAMA)
add("decoder", "xglm", "XGLMForCausalLM", tokens,
    d_model=32, num_layers=2, attention_heads=4, ffn_dim=64, vocab_size=99, max_position_embeddings=64)  # fmt: skip
add("decoder", "biogpt", "BioGptForCausalLM", tokens, **TEXT)
add("decoder", "codegen", "CodeGenForCausalLM", tokens,
    n_embd=32, n_layer=2, n_head=4, n_positions=64, vocab_size=99, rotary_dim=4)  # fmt: skip
add("decoder", "ctrl", "CTRLLMHeadModel", tokens, "CTRLConfig",
    n_embd=32, n_layer=2, n_head=4, dff=64, n_positions=64, vocab_size=99)  # fmt: skip
add("decoder", "imagegpt", "ImageGPTForCausalImageModeling", ids, "ImageGPTConfig",
    n_embd=32, n_layer=2, n_head=4, n_positions=64, vocab_size=99)  # fmt: skip

# ---- experts, state spaces ---------------------------------------------------------------------------------

add("experts", "mixtral", "MixtralForCausalLM", tokens, **MOE)
add("experts", "qwen2_moe", "Qwen2MoeForCausalLM", tokens, **LLAMA, num_experts=4, num_experts_per_tok=2,
    moe_intermediate_size=16, shared_expert_intermediate_size=32)  # fmt: skip
add("experts", "olmoe", "OlmoeForCausalLM", tokens, **LLAMA, num_experts=4, num_experts_per_tok=2)
add("experts", "gpt_oss", "GptOssForCausalLM", tokens, **MOE, head_dim=8, sliding_window=8)
add("experts", "deepseek_v3", "DeepseekV3ForCausalLM", tokens, **{**LLAMA, "num_key_value_heads": 4},
    moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1, kv_lora_rank=8,
    q_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8, first_k_dense_replace=1)  # fmt: skip
add("experts", "switch_transformers", "SwitchTransformersForConditionalGeneration", pair, **T5,
    num_experts=4, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, decoder_start_token_id=0)  # fmt: skip
add("state space", "mamba", "MambaForCausalLM", ids,
    hidden_size=32, num_hidden_layers=2, vocab_size=99, state_size=4)  # fmt: skip
add("state space", "mamba2", "Mamba2ForCausalLM", ids, hidden_size=32, num_hidden_layers=2, vocab_size=99, state_size=8,
    num_heads=8, head_dim=8, n_groups=2, chunk_size=8)  # fmt: skip
add("state space", "falcon_mamba", "FalconMambaForCausalLM", ids,
    hidden_size=32, num_hidden_layers=2, vocab_size=99, state_size=4)  # fmt: skip
add("state space", "rwkv", "RwkvForCausalLM", ids,
    hidden_size=32, num_hidden_layers=2, attention_hidden_size=32, vocab_size=99, context_length=64)  # fmt: skip
add("state space", "recurrent_gemma", "RecurrentGemmaForCausalLM", tokens,
    **{**LLAMA, "num_key_value_heads": 1, "num_hidden_layers": 3}, lru_width=32, attention_window_size=8)  # fmt: skip
add("state space", "bamba", "BambaForCausalLM", ids, **LLAMA, attn_layer_indices=[1], mamba_n_heads=8,
    mamba_d_head=8, mamba_d_state=8, mamba_n_groups=1, mamba_expand=2, mamba_chunk_size=8)  # fmt: skip

# ---- encoders with decoders ----------------------------------------------------------------------------------

add("encoder-decoder", "t5", "T5ForConditionalGeneration", pair, **T5, decoder_start_token_id=0)
add("encoder-decoder", "umt5", "UMT5ForConditionalGeneration", pair, **T5, decoder_start_token_id=0)
add("encoder-decoder", "longt5", "LongT5ForConditionalGeneration", pair, **T5, decoder_start_token_id=0, local_radius=4)
add("encoder-decoder", "bart", "BartForConditionalGeneration", pair, **SEQ2SEQ)
add("encoder-decoder", "mbart", "MBartForConditionalGeneration", pair, **SEQ2SEQ)
add("encoder-decoder", "pegasus", "PegasusForConditionalGeneration", pair, **SEQ2SEQ)
add("encoder-decoder", "marian", "MarianMTModel", pair, "MarianConfig", **SEQ2SEQ)
add("encoder-decoder", "blenderbot", "BlenderbotForConditionalGeneration", pair, **SEQ2SEQ)
add("encoder-decoder", "m2m_100", "M2M100ForConditionalGeneration", pair, **SEQ2SEQ)
add("encoder-decoder", "prophetnet", "ProphetNetForConditionalGeneration", pair,
    hidden_size=32, vocab_size=99, encoder_ffn_dim=64, decoder_ffn_dim=64, num_encoder_layers=2, num_decoder_layers=2,
    num_encoder_attention_heads=4, num_decoder_attention_heads=4, max_position_embeddings=64)  # fmt: skip
add("encoder-decoder", "led", "LEDForConditionalGeneration", pair,
    **{k: v for k, v in SEQ2SEQ.items() if k != "max_position_embeddings"},
    max_encoder_position_embeddings=64, max_decoder_position_embeddings=64, attention_window=8)  # fmt: skip

# ---- vision --------------------------------------------------------------------------------------------------

add("vision", "vit", "ViTForImageClassification", image, **VISION)
add("vision", "deit", "DeiTForImageClassificationWithTeacher", image, "DeiTConfig", **VISION)
add("vision", "beit", "BeitForImageClassification", image, **VISION, use_relative_position_bias=True)
add("vision", "dinov2", "Dinov2ForImageClassification", image, **VISION)
add("vision", "swin", "SwinForImageClassification", image, **SWIN)
add("vision", "swinv2", "Swinv2ForImageClassification", image, **SWIN)
add("vision", "convnext", "ConvNextForImageClassification", image, hidden_sizes=[8, 16], depths=[1, 1], num_stages=2)
add("vision", "convnextv2", "ConvNextV2ForImageClassification", image,
    hidden_sizes=[8, 16], depths=[1, 1], num_stages=2)  # fmt: skip
add("vision", "resnet", "ResNetForImageClassification", image,
    embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1])  # fmt: skip
add("vision", "regnet", "RegNetForImageClassification", image,
    embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], groups_width=8)  # fmt: skip
add("vision", "mobilenet_v2", "MobileNetV2ForImageClassification", image, depth_multiplier=0.35)
add("vision", "efficientnet", "EfficientNetForImageClassification", image, width_coefficient=0.25,
    depth_coefficient=0.25, hidden_dim=320, image_size=32)  # fmt: skip
add("vision", "mobilevit", "MobileViTForImageClassification", image, image_size=32,
    hidden_sizes=[16, 16, 16], neck_hidden_sizes=[8, 8, 8, 16, 16, 16, 16], num_attention_heads=2)  # fmt: skip
add("vision", "poolformer", "PoolFormerForImageClassification", image, "PoolFormerConfig",
    hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1])  # fmt: skip
add("vision", "pvt_v2", "PvtV2ForImageClassification", image,
    hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 2, 4])  # fmt: skip
add("vision", "cvt", "CvtForImageClassification", image,
    embed_dim=[8, 16, 32], num_heads=[1, 2, 4], depth=[1, 2, 3])  # fmt: skip
add("vision", "levit", "LevitForImageClassification", lambda: image(64), image_size=64, hidden_sizes=[16, 32, 48],
    num_attention_heads=[1, 2, 3], depths=[1, 1, 1], key_dim=[8, 8, 8])  # fmt: skip
add("vision", "focalnet", "FocalNetForImageClassification", image,
    image_size=32, embed_dim=8, depths=[1, 1], hidden_sizes=[8, 16])  # fmt: skip
add("vision", "hiera", "HieraForImageClassification", lambda: image(64), image_size=[64, 64], embed_dim=8,
    depths=[1, 1, 1], num_heads=[1, 2, 4], query_stride=[2, 2], num_query_pool=2,
    masked_unit_size=[4, 4], masked_unit_attention=[True, True, False])  # fmt: skip
add("vision", "bit", "BitForImageClassification", image,
    embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_groups=2)  # fmt: skip
add("vision", "swin2sr", "Swin2SRForImageSuperResolution", lambda: image(16), image_size=16, embed_dim=16,
    depths=[1, 1], num_heads=[2, 2], window_size=4, upscale=2)  # fmt: skip
add("vision", "vit_mae", "ViTMAEForPreTraining", lambda: {**image(), "noise": torch.rand(2, 16)}, **VISION,
    decoder_hidden_size=32, decoder_num_hidden_layers=1, decoder_num_attention_heads=4,
    decoder_intermediate_size=64)  # fmt: skip

# ---- video, detection, segmentation ------------------------------------------------------------------------------

add("video", "videomae", "VideoMAEForVideoClassification",
    lambda: {"pixel_values": torch.randn(2, 4, 3, 32, 32)}, **VISION, num_frames=4)  # fmt: skip
add("video", "timesformer", "TimesformerForVideoClassification",
    lambda: {"pixel_values": torch.randn(2, 4, 3, 32, 32)}, **VISION, num_frames=4)  # fmt: skip
add("video", "vivit", "VivitForVideoClassification", lambda: {"pixel_values": torch.randn(2, 4, 3, 32, 32)},
    **{k: v for k, v in VISION.items() if k != "patch_size"}, num_frames=4, tubelet_size=[2, 8, 8])  # fmt: skip
DETR: dict[str, Any] = {
    **{k: v for k, v in SEQ2SEQ.items() if k not in ("vocab_size", "max_position_embeddings")},
    **{"num_queries": 6, "num_labels": 5, "use_timm_backbone": False, "use_pretrained_backbone": False},
    **{"backbone": None, "backbone_config": BACKBONE},
}
add("detection", "detr", "DetrForObjectDetection", lambda: image(64), **DETR)
add("detection", "conditional_detr", "ConditionalDetrForObjectDetection", lambda: image(64), **DETR)
add("detection", "deformable_detr", "DeformableDetrForObjectDetection", lambda: image(64), **DETR)
add("detection", "yolos", "YolosForObjectDetection", image,
    **{**VISION, "image_size": [32, 32]}, num_detection_tokens=5)  # fmt: skip
add("detection", "rt_detr", "RTDetrForObjectDetection", lambda: image(64), d_model=32, encoder_hidden_dim=32,
    encoder_in_channels=[16, 24, 32], feat_strides=[8, 16, 32], encoder_layers=1, encoder_ffn_dim=64,
    encoder_attention_heads=2, decoder_in_channels=[32, 32, 32], decoder_ffn_dim=64, decoder_layers=2, num_queries=6,
    decoder_attention_heads=4, num_denoising=0, anchor_image_size=None,
    backbone_config=part("RTDetrResNetConfig", embedding_size=8, hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1],
        layer_type="basic", out_features=["stage2", "stage3", "stage4"]))  # fmt: skip
add("detection", "owlvit", "OwlViTForObjectDetection", lambda: {**tokens(99, 8), **image()},
    text_config=lambda: {**TEXT, "max_position_embeddings": 16, "projection_dim": 32, "pad_token_id": 0},
    vision_config=lambda: dict(VISION), projection_dim=32)  # fmt: skip
add("segmentation", "segformer", "SegformerForSemanticSegmentation", lambda: image(64), hidden_sizes=[8, 16, 16, 32],
    depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 2, 4], decoder_hidden_size=16, num_labels=5)  # fmt: skip
add("segmentation", "upernet", "UperNetForSemanticSegmentation", lambda: image(64), backbone_config=BACKBONE,
    hidden_size=16, pool_scales=[1, 2], num_labels=5, auxiliary_in_channels=24, auxiliary_channels=8,
    use_auxiliary_head=True)  # fmt: skip
add("segmentation", "dpt", "DPTForDepthEstimation", image, **{**VISION, "num_hidden_layers": 4},
    backbone_out_indices=[0, 1, 2, 3], neck_hidden_sizes=[8, 8, 16, 16], fusion_hidden_size=16,
    is_hybrid=False)  # fmt: skip
add("segmentation", "glpn", "GLPNForDepthEstimation", lambda: image(64), hidden_sizes=[8, 16, 16, 32],
    depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 2, 4], decoder_hidden_size=16)  # fmt: skip
add("segmentation", "clipseg", "CLIPSegForImageSegmentation", lambda: {**tokens(99, 8), **image()},
    text_config=lambda: {**TEXT, "max_position_embeddings": 16, "pad_token_id": 0, "eos_token_id": 98},
    vision_config=lambda: dict(VISION), projection_dim=32, reduce_dim=16, extract_layers=[0, 1],
    decoder_num_attention_heads=4, decoder_intermediate_size=32)  # fmt: skip
add("segmentation", "sam", "SamModel",
    lambda: {**image(64), "input_points": torch.rand(2, 1, 2, 2) * 64, "input_labels": torch.ones(2, 1, 2).long()},
    "SamConfig",
    vision_config=lambda: {**VISION, "image_size": 64, "output_channels": 32, "mlp_dim": 64, "window_size": 4,
        "global_attn_indexes": [1], "num_pos_feats": 16},
    prompt_encoder_config=lambda: {"hidden_size": 32, "image_size": 64, "patch_size": 8, "mask_input_channels": 4},
    mask_decoder_config=lambda: {"hidden_size": 32, "mlp_dim": 64, "num_attention_heads": 4,
        "iou_head_hidden_dim": 32})  # fmt: skip

# ---- audio -----------------------------------------------------------------------------------------------------

add("audio", "wav2vec2", "Wav2Vec2ForCTC", wave, **WAVE)
add("audio", "hubert", "HubertForSequenceClassification", wave, **WAVE)
add("audio", "wavlm", "WavLMForCTC", wave, **WAVE)
add("audio", "unispeech_sat", "UniSpeechSatForSequenceClassification", wave, **WAVE)
add("audio", "sew", "SEWForCTC", wave, **WAVE, squeeze_factor=2)
add("audio", "wav2vec2_conformer", "Wav2Vec2ConformerForCTC", wave, **WAVE, position_embeddings_type="relative")
add("audio", "whisper", "WhisperForConditionalGeneration",
    lambda: {"input_features": torch.randn(2, 80, 60), "decoder_input_ids": torch.randint(5, 99, (2, 8))},
    **{k: v for k, v in SEQ2SEQ.items() if k != "max_position_embeddings"},
    max_source_positions=30, max_target_positions=32)  # fmt: skip
add("audio", "speech_to_text", "Speech2TextForConditionalGeneration",
    lambda: {"input_features": torch.randn(2, 64, 80), "attention_mask": torch.ones(2, 64).long(),
        "decoder_input_ids": torch.randint(5, 99, (2, 8))},
    **{k: v for k, v in SEQ2SEQ.items() if k != "max_position_embeddings"},
    max_source_positions=64, max_target_positions=32, conv_channels=32)  # fmt: skip
add("audio", "audio_spectrogram_transformer", "ASTForAudioClassification",
    lambda: {"input_values": torch.randn(2, 64, 32)}, **WIDTH, patch_size=8, max_length=64, num_mel_bins=32,
    frequency_stride=8, time_stride=8)  # fmt: skip
add("audio", "encodec", "EncodecModel", lambda: {"input_values": torch.randn(2, 1, 640)}, "EncodecConfig",
    num_filters=4, hidden_size=16, codebook_size=16, codebook_dim=16, upsampling_ratios=[4, 4], num_lstm_layers=1,
    target_bandwidths=[12.0], sampling_rate=24000)  # fmt: skip
add("audio", "univnet", "UnivNetModel",
    lambda: {"input_features": torch.randn(1, 12, 20), "noise_sequence": torch.randn(1, 12, 64)}, "UnivNetConfig",
    model_hidden_channels=8, num_mel_bins=20)  # fmt: skip

# ---- several senses --------------------------------------------------------------------------------------------

CLIP: dict[str, Any] = {
    "text_config": lambda: {**TEXT, "max_position_embeddings": 16, "pad_token_id": 0, "eos_token_id": 98},
    "vision_config": lambda: dict(VISION),
    "projection_dim": 32,
}
add("multimodal", "clip", "CLIPModel", lambda: {**tokens(99, 8), **image()}, "CLIPConfig", **CLIP)
add("multimodal", "siglip", "SiglipModel", lambda: {**tokens(99, 8), **image()}, "SiglipConfig",
    **{k: v for k, v in CLIP.items() if k != "projection_dim"})  # fmt: skip
add("multimodal", "blip", "BlipForImageTextRetrieval", lambda: {**tokens(99, 8), **image()}, "BlipConfig",
    text_config=lambda: {**TEXT, "encoder_hidden_size": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    vision_config=lambda: dict(VISION), projection_dim=32, image_text_hidden_size=32)  # fmt: skip
add("multimodal", "altclip", "AltCLIPModel", lambda: {**tokens(99, 8), **image()}, "AltCLIPConfig",
    text_config=lambda: {**TEXT, "project_dim": 32, "pad_token_id": 1}, vision_config=lambda: dict(VISION),
    projection_dim=32)  # fmt: skip
add("multimodal", "vilt", "ViltForImageAndTextRetrieval",
    lambda: {**tokens(), **image(), "pixel_mask": torch.ones(2, 32, 32).long()}, "ViltConfig", **TEXT,
    image_size=32, patch_size=8)  # fmt: skip
add("multimodal", "flava", "FlavaModel", lambda: {**tokens(), **image()}, "FlavaConfig",
    text_config=lambda: dict(TEXT), image_config=lambda: dict(VISION), multimodal_config=lambda: dict(WIDTH),
    projection_dim=32, hidden_size=32)  # fmt: skip
add("multimodal", "layoutlm", "LayoutLMForTokenClassification", lambda: {**tokens(), **boxes()}, **TEXT)
add("multimodal", "layoutlmv3", "LayoutLMv3ForTokenClassification", lambda: {**tokens(), **boxes(), **image()},
    **TEXT, coordinate_size=4, shape_size=8, input_size=32, patch_size=8)  # fmt: skip
add("multimodal", "lilt", "LiltForTokenClassification", lambda: {**tokens(), **boxes()},
    **{**TEXT, "hidden_size": 48}, channel_shrink_ratio=4)  # fmt: skip
add("multimodal", "visual_bert", "VisualBertModel",
    lambda: {**tokens(), "visual_embeds": torch.randn(2, 4, 16)}, "VisualBertConfig", **TEXT,
    visual_embedding_dim=16)  # fmt: skip
add("multimodal", "lxmert", "LxmertModel",
    lambda: {**tokens(), "visual_feats": torch.randn(2, 6, 16), "visual_pos": torch.rand(2, 6, 4)}, "LxmertConfig",
    **{k: v for k, v in TEXT.items() if k != "num_hidden_layers"}, l_layers=1, x_layers=1, r_layers=1,
    visual_feat_dim=16)  # fmt: skip
add("multimodal", "git", "GitForCausalLM", lambda: {**tokens(), **image()}, "GitConfig",
    **TEXT, vision_config=lambda: dict(VISION))  # fmt: skip
add("multimodal", "llava", "LlavaForConditionalGeneration",
    lambda: {"input_ids": torch.cat([torch.full((2, 16), 98), torch.randint(5, 90, (2, 8))], 1), **image(),
        "attention_mask": torch.ones(2, 24).long()},
    "LlavaConfig", text_config=part("LlamaConfig", **LLAMA), image_token_index=98, image_token_id=98,
    vision_config=part("CLIPVisionConfig", **VISION), vision_feature_layer=-1)  # fmt: skip
add("multimodal", "perceiver", "PerceiverForMaskedLM", lambda: tokens(99, 16), num_latents=8, d_latents=16, d_model=32,
    num_self_attends_per_block=1, num_self_attention_heads=2, num_cross_attention_heads=2, vocab_size=99,
    max_position_embeddings=16)  # fmt: skip
add("multimodal", "pix2struct", "Pix2StructForConditionalGeneration",
    lambda: {"flattened_patches": torch.cat([torch.randint(1, 5, (2, 12, 2)).float(), torch.randn(2, 12, 48)], -1),
        "attention_mask": torch.ones(2, 12), "decoder_input_ids": torch.randint(5, 99, (2, 8))},
    "Pix2StructConfig",
    text_config=lambda: {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "d_kv": 8, "d_ff": 64, "vocab_size": 99},
    vision_config=lambda: {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "d_kv": 8, "d_ff": 64,
        "patch_embed_hidden_size": 48, "seq_len": 12})  # fmt: skip

# ---- time series, decisions ------------------------------------------------------------------------------------

SERIES: dict[str, Any] = {
    **{"prediction_length": 8, "context_length": 24, "num_time_features": 2, "d_model": 32, "lags_sequence": [1, 3, 7]},
    **{k: v for k, v in SEQ2SEQ.items() if k.startswith(("encoder", "decoder_l", "decoder_a", "decoder_f"))},
}
add("time series", "time_series_transformer", "TimeSeriesTransformerForPrediction", series, **SERIES)
add("time series", "informer", "InformerForPrediction", series, **SERIES)
add("time series", "autoformer", "AutoformerForPrediction", series, **SERIES, label_length=4)
add("time series", "patchtst", "PatchTSTForPrediction", lambda: {"past_values": torch.randn(2, 32, 3)},
    num_input_channels=3, context_length=32, prediction_length=8, patch_length=4, patch_stride=4, d_model=32,
    num_hidden_layers=2, num_attention_heads=4, ffn_dim=64, loss="mse")  # fmt: skip
add("time series", "patchtsmixer", "PatchTSMixerForPrediction", lambda: {"past_values": torch.randn(2, 32, 3)},
    num_input_channels=3, context_length=32, prediction_length=8, patch_length=4, patch_stride=4, d_model=16,
    num_layers=2, loss="mse")  # fmt: skip
add("decision", "decision_transformer", "DecisionTransformerModel",
    lambda: {"states": torch.randn(2, 4, 5), "actions": torch.randn(2, 4, 3), "rewards": torch.randn(2, 4, 1),
        "returns_to_go": torch.randn(2, 4, 1), "timesteps": torch.arange(4).repeat(2, 1),
        "attention_mask": torch.ones(2, 4)},
    "DecisionTransformerConfig", state_dim=5, act_dim=3, hidden_size=32, n_layer=2, n_head=4,
    max_ep_len=16)  # fmt: skip


# ---- a step with a cache -------------------------------------------------------------------------------------------


def filled(cache: Any, layers: int, heads: int, size: int) -> Any:
    """A cache with six tokens in it."""
    for layer in range(layers):
        cache.update(torch.randn(2, heads, 6, size), torch.randn(2, heads, 6, size), layer)
    return cache


def step(layers: int, heads: int, size: int, cache: Any = None) -> dict[str, Any]:
    """One more token after six that are in the cache."""
    cache = filled(cache or transformers.DynamicCache(), layers, heads, size)
    mask = torch.ones(2, 7, dtype=torch.long)
    return {"input_ids": torch.randint(5, 99, (2, 1)), "past_key_values": cache, "attention_mask": mask}


def step_without_mask(cache: Any) -> dict[str, Any]:
    given = step(2, 2, 8, cache)
    return {key: value for key, value in given.items() if key != "attention_mask"}


def decoder_step(size: int) -> dict[str, Any]:
    """One more token of a target: its cache, the cache of what was read of the source, and the source."""
    caches = (filled(transformers.DynamicCache(), 2, 4, size) for _ in range(2))
    return {
        "encoder_outputs": (torch.randn(2, 6, 32),),
        "decoder_input_ids": torch.randint(5, 99, (2, 1)),
        "past_key_values": transformers.EncoderDecoderCache(*caches),
    }


add("cache", "llama_step", "LlamaForCausalLM", lambda: step(2, 2, 8), **LLAMA)
add("cache", "gpt2_step", "GPT2LMHeadModel", lambda: step(2, 4, 8), "GPT2Config",
    n_embd=32, n_layer=2, n_head=4, n_positions=64, vocab_size=99)  # fmt: skip
add("cache", "qwen3_step", "Qwen3ForCausalLM", lambda: step(2, 2, 8), **LLAMA, head_dim=8)
add("cache", "llama_first", "LlamaForCausalLM",
    lambda: {**ids(length=6), "past_key_values": transformers.DynamicCache(), "use_cache": True}, **LLAMA)  # fmt: skip
add("cache", "llama_static", "LlamaForCausalLM",
    lambda: step_without_mask(transformers.StaticCache(config=_config("LlamaConfig", **LLAMA), max_cache_len=16)),
    **LLAMA)  # fmt: skip
add("cache", "mistral_window", "MistralForCausalLM",
    lambda: step_without_mask(
        transformers.DynamicCache(config=_config("MistralConfig", **LLAMA, sliding_window=4))),
    **LLAMA, sliding_window=4)  # fmt: skip
add("cache", "bart_step", "BartForConditionalGeneration", lambda: decoder_step(8), **SEQ2SEQ)
add("cache", "t5_step", "T5ForConditionalGeneration", lambda: decoder_step(8), **T5)
