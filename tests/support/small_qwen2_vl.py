"""A tiny random Qwen2-VL with a tokenizer of its own: `python tests/support/small_qwen2_vl.py FOLDER` writes it, to try pictures without a download."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer as Backend, decoders, models, pre_tokenizers
from tokenizers.trainers import BpeTrainer

UNIT = 8  # pixels of a side of what takes one place: 2 x 2 squares of 4
MIN_PIXELS, MAX_PIXELS = 4 * UNIT**2, 40 * UNIT**2
SEEN = "<|vision_start|><|image_pad|><|vision_end|>"
SPECIAL = ("<|endoftext|>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}" + SEEN + "{% else %}{{ part['text'] }}{% endif %}{% endfor %} {% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def qwen2_vl_folder(folder: Path, text: dict[str, Any] | None = None, vision: dict[str, Any] | None = None) -> Path:
    """Write the model into the folder. `text` and `vision` are settings of the two halves."""
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    folder.mkdir(exist_ok=True)
    backend = Backend(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator([], BpeTrainer(initial_alphabet=alphabet, show_progress=False))
    backend.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    backend.save(str(folder / "tokenizer.json"))
    eos = backend.token_to_id(SPECIAL[0])
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": SPECIAL[0], "chat_template": TEMPLATE}))
    settings: dict[str, Any] = {
        "vocab_size": backend.get_vocab_size(), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512, "initializer_range": 0.3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [2, 3, 3]},
        "eos_token_id": eos, "bos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    tower: dict[str, Any] = {
        "depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "patch_size": UNIT // 2, "mlp_ratio": 2, "initializer_range": 0.3,
    }  # fmt: skip
    torch.manual_seed(4)
    config = Qwen2VLConfig(
        text_config=settings | (text or {}), vision_config=tower | (vision or {}), eos_token_id=eos,
        **{f"{name}_token_id": backend.token_to_id(f"<|{name}{rest}|>") for name, rest in
           (("vision_start", ""), ("vision_end", ""), ("image", "_pad"), ("video", "_pad"))},
    )  # fmt: skip
    Qwen2VLForConditionalGeneration(config).save_pretrained(folder)
    preprocessor = {
        "image_processor_type": "Qwen2VLImageProcessor", "do_resize": True, "do_rescale": True, "do_normalize": True,
        "do_convert_rgb": True, "resample": 3, "rescale_factor": 1 / 255, "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711], "min_pixels": MIN_PIXELS, "max_pixels": MAX_PIXELS,
        "patch_size": UNIT // 2, "temporal_patch_size": 2, "merge_size": 2,
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    return folder


class Reference:
    """transformers on the same folder, with its own preparation of the pictures."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoImageProcessor, Qwen2VLForConditionalGeneration

        self.model = Qwen2VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        self.processor = AutoImageProcessor.from_pretrained(folder, use_fast=False)

    def given(self, token_ids: list[int], images: list[Image.Image]) -> dict[str, Any]:
        """What the model is called with."""
        ids = torch.tensor([token_ids])
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if images:
            given |= self.processor(images, return_tensors="pt")
            given["mm_token_type_ids"] = (ids == self.model.config.image_token_id).int()
        return given

    def tokens(self, token_ids: list[int], images: list[Image.Image], count: int) -> list[int]:
        """Its answer."""
        given = self.given(token_ids, images)
        self.model.model.rope_deltas = None  # or the last prompt's would count for one without pictures
        with torch.inference_mode():
            found = self.model.generate(
                **given, max_new_tokens=count, min_new_tokens=count, do_sample=False, eos_token_id=None
            )[0]
        answer: list[int] = found[len(token_ids) :].tolist()
        return answer

    def logprobs(self, token_ids: list[int], images: list[Image.Image]) -> torch.Tensor:
        """Of each token of the prompt but the first."""
        self.model.model.rope_deltas = None
        with torch.inference_mode():
            logits = self.model(**self.given(token_ids, images)).logits[0]
        return logits[:-1].log_softmax(-1).gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0]


if __name__ == "__main__":
    qwen2_vl_folder(Path(sys.argv[1]))
