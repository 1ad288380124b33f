"""Tiny models with a tower for texts and one for images, and what they read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from tests.support.tiny import FAMILIES
from tests.support.training import WORDS, tiny_tokenizer
from transformers import AutoConfig, AutoModel, CLIPProcessor, VisionTextDualEncoderModel, ViTImageProcessor

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

_PART = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


def two_towers(kind: str = "clip") -> PreTrainedModel:
    """A tower of 2 blocks for texts, one of 3 for images of 16 x 16: "clip", "siglip", or "dual" (BERT and ViT)."""
    torch.manual_seed(0)
    if kind == "dual":
        return VisionTextDualEncoderModel(
            vision_model=FAMILIES["vit"].build(), text_model=FAMILIES["bert"].build()
        ).eval()
    text: dict[str, Any] = _PART | {"vocab_size": len(WORDS), "max_position_embeddings": 40, "projection_size": 32}
    text |= {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}
    vision = _PART | {"image_size": 16, "patch_size": 8, "num_hidden_layers": 3}
    return AutoModel.from_config(AutoConfig.for_model(kind, text_config=text, vision_config=vision)).eval()


def joint_processor() -> CLIPProcessor:
    """Return a processor of words and images."""
    return CLIPProcessor(ViTImageProcessor(size={"height": 16, "width": 16}), tiny_tokenizer())


def texts_and_images(texts: int = 3, images: int = 2) -> dict[str, Tensor]:
    """What both towers read: texts of unequal lengths, and images."""
    rng = torch.Generator().manual_seed(0)
    ids, mask = torch.randint(4, len(WORDS), (texts, 7), generator=rng), torch.ones(texts, 7, dtype=torch.long)
    mask[1:, 5:] = 0
    return {"input_ids": ids, "attention_mask": mask, "pixel_values": torch.randn(images, 3, 16, 16, generator=rng)}
