"""Tiny vision-language models of transformers', with random weights."""

import torch

IMAGE = 63
"""The placeholder."""


def transformers_model(kind: str) -> torch.nn.Module:
    """Tiny models with random weights: CLIP and Llama, SigLIP and Qwen2, or CLIP and Mistral for ``kind`` mistral."""
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    text = {
        **{"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 32, "initializer_range": 0.2},
    }
    image = {**sizes, "image_size": 28, "patch_size": 14}
    if kind == "clip":
        vision, language = transformers.CLIPVisionConfig(**image), transformers.LlamaConfig(**text)
    elif kind == "mistral":
        vision = transformers.CLIPVisionConfig(**image)
        language = transformers.MistralConfig(**text, head_dim=6, sliding_window=None)
    else:
        vision = transformers.SiglipVisionConfig(**image, vision_use_head=False)
        language = transformers.Qwen2Config(**text, tie_word_embeddings=True)
    strategy = "full" if kind == "siglip" else "default"
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=language, image_token_index=IMAGE, vision_feature_select_strategy=strategy,
        tie_word_embeddings=kind == "siglip",
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlavaForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2)
    return model
