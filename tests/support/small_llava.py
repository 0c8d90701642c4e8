"""A tiny random LLaVA with a tokenizer of its own, and pictures for it: `python tests/support/small_llava.py FOLDER` writes it, to try pictures without a download."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw
from tokenizers import AddedToken, Tokenizer as Backend, decoders, models, pre_tokenizers
from tokenizers.trainers import BpeTrainer

SIDE, PATCH = 24, 6  # 16 squares, so 16 places
PLACES = (SIDE // PATCH) ** 2
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %} {% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def llava_folder(folder: Path, **changed: Any) -> Path:
    """Write the model into the folder. `changed` are settings of LlavaConfig."""
    # Whoever only needs a picture need not wait for this import.
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    folder.mkdir(exist_ok=True)
    backend = Backend(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.train_from_iterator(
        [], BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    )
    backend.add_special_tokens([AddedToken("</s>", special=True), AddedToken("<image>", special=True)])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "chat_template": TEMPLATE}))
    text = LlamaConfig(
        vocab_size=backend.get_vocab_size(), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.3, eos_token_id=backend.token_to_id("</s>"),
        bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    vision = CLIPVisionConfig(
        hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=2, image_size=SIDE, patch_size=PATCH,
        initializer_range=0.4, initializer_factor=8.0, projection_dim=24,
    )  # fmt: skip
    settings: dict[str, Any] = {"image_token_id": backend.token_to_id("<image>")} | changed
    torch.manual_seed(4)
    model = LlavaForConditionalGeneration(LlavaConfig(text_config=text, vision_config=vision, **settings))
    with torch.no_grad():  # a projector of the usual width would make pictures whisper
        model.model.multi_modal_projector.linear_2.weight *= 15
    model.save_pretrained(folder)
    preprocessor = {
        "image_processor_type": "CLIPImageProcessor", "do_resize": True, "size": {"shortest_edge": SIDE}, "resample": 3,
        "do_center_crop": True, "crop_size": {"height": SIDE, "width": SIDE}, "do_rescale": True, "do_normalize": True,
        "rescale_factor": 1 / 255, "do_convert_rgb": True, "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    return folder


def picture(number: int, size: tuple[int, int] = (40, 30), mode: str = "RGB") -> Image.Image:
    """A picture that differs from those with other numbers."""
    image = Image.new("RGB", size, (37 * number % 256, 91 * number % 256, 200))
    draw = ImageDraw.Draw(image)
    box = (number % 3, 1, size[0] // 2 + number % 5 + 2, max(2, size[1] - 4))
    draw.ellipse(box, fill=(255 - 20 * number % 256, 40, 7 * number))
    draw.line((0, size[1] - 1, size[0] - 1, number % 9), fill=(255, 255, 0), width=3)
    return image.convert(mode)


def encoded(image: Image.Image, form: str = "PNG") -> bytes:
    """The picture as a file."""
    file = io.BytesIO()
    image.save(file, form)
    return file.getvalue()


def reference_tokens(folder: Path, text: str, images: list[Image.Image], count: int) -> list[int]:
    """What transformers answers, with its own preparation of the pictures; one `<image>` in the text stands for each."""
    from transformers import AutoImageProcessor, LlavaForConditionalGeneration

    tokenizer = Backend.from_file(str(folder / "tokenizer.json"))
    prompt = tokenizer.encode(text.replace("<image>", "<image>" * PLACES), add_special_tokens=False).ids
    processor = AutoImageProcessor.from_pretrained(folder, use_fast=False)
    given = {"pixel_values": processor(images, return_tensors="pt").pixel_values} if images else {}
    model = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, eos_token_id=None, **given
        )
    tokens: list[int] = found[0, len(prompt) :].tolist()
    return tokens


if __name__ == "__main__":
    llava_folder(Path(sys.argv[1]))
