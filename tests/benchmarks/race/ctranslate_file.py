"""The same random weights as a folder for CTranslate2: `python -m race.ctranslate_file FOLDER TARGET`, in its Python, which
needs neither torch nor transformers for it. Other types than float32 it makes of this when it loads it."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import ctranslate2
import numpy as np

from race.weights_file import read_weights


def write(folder: Path, target: Path) -> None:
    """Write `target`, under another name first. A token's word is its number."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    spec = ctranslate2.specs.TransformerDecoderModelSpec.from_config(
        config["n_layer"], config["n_head"], pre_norm=True, activation=ctranslate2.specs.Activation.GELUTanh
    )
    _set_weights(spec.decoder, read_weights(folder))
    spec.register_vocabulary([str(token) for token in range(config["vocab_size"])])
    spec.config.bos_token = spec.config.eos_token = spec.config.unk_token = str(config["eos_token_id"])
    spec.validate()
    spec.optimize()
    torn = target.with_suffix(".torn")
    shutil.rmtree(torn, ignore_errors=True)
    torn.mkdir()
    spec.save(str(torn))
    os.replace(torn, target)


def _set_weights(decoder: ctranslate2.specs.TransformerDecoderSpec, weights: dict[str, np.ndarray]) -> None:
    def norm(spec: ctranslate2.specs.LayerSpec, name: str) -> None:
        spec.gamma, spec.beta = weights[f"{name}.weight"], weights[f"{name}.bias"]

    def linear(spec: ctranslate2.specs.LayerSpec, name: str) -> None:
        spec.weight, spec.bias = np.ascontiguousarray(weights[f"{name}.weight"].T), weights[f"{name}.bias"]

    decoder.scale_embeddings = False
    decoder.embeddings.weight = decoder.projection.weight = weights["wte.weight"]
    decoder.position_encodings.encodings = weights["wpe.weight"]
    norm(decoder.layer_norm, "ln_f")
    for index, layer in enumerate(decoder.layer):
        norm(layer.self_attention.layer_norm, f"h.{index}.ln_1")
        linear(layer.self_attention.linear[0], f"h.{index}.attn.c_attn")
        linear(layer.self_attention.linear[1], f"h.{index}.attn.c_proj")
        norm(layer.ffn.layer_norm, f"h.{index}.ln_2")
        linear(layer.ffn.linear_0, f"h.{index}.mlp.c_fc")
        linear(layer.ffn.linear_1, f"h.{index}.mlp.c_proj")


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
