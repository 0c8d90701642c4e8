"""The same random weights as a file for llama.cpp: `python -m race.gguf_file FOLDER TYPE FILE`, with the `gguf` package."""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path

import gguf
import numpy as np

from race.weights_file import read_weights

TYPES = {
    "f32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "f16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "bf16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
    "q4_0": (gguf.GGMLQuantizationType.Q4_0, gguf.LlamaFileType.MOSTLY_Q4_0),
    "q4_k": (gguf.GGMLQuantizationType.Q4_K, gguf.LlamaFileType.MOSTLY_Q4_K_S),
}
NAMES = {
    "ln_1": "attn_norm", "ln_2": "ffn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down",
}  # fmt: skip
"""A layer's part -> its name in a GGUF file."""


def write(folder: Path, kind: str, target: Path) -> None:
    """Write `target`, under another name first. Matrices get the type; norms, biases and positions stay float32, as
    llama.cpp's own converter leaves them. The output matrix of q4_0 and q4_k is q8_0: ours is int8 beside int4."""
    if kind == "q4_k":
        _quantize(folder, kind, target)
        return
    torn = target.with_suffix(".torn")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(str(torn), "gpt2")
    _write_shape(writer, config, TYPES[kind][1])
    _write_vocabulary(writer, folder, config["eos_token_id"])
    for name, tensor in _tensors(folder, config["n_layer"]).items():
        small = tensor.ndim == 1 or name.startswith("position_embd") or kind == "f32"
        type_ = TYPES["q8_0" if kind == "q4_0" and name.startswith("token_embd") else kind][0]
        data = tensor if small else gguf.quants.quantize(tensor, type_)
        writer.add_tensor(name, data, raw_dtype=None if small else type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(torn, target)


def _quantize(folder: Path, kind: str, target: Path) -> None:
    """What `gguf` cannot quantize, llama.cpp does, from the float32 file."""
    import llama_cpp

    full, torn = target.with_name("f32.gguf"), target.with_suffix(".torn")
    if not full.exists():
        write(folder, "f32", full)
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = int(TYPES[kind][1])
    parameters.token_embedding_type = parameters.output_tensor_type = int(TYPES["q8_0"][0])
    code = llama_cpp.llama_model_quantize(os.fsencode(full), os.fsencode(torn), ctypes.byref(parameters))
    if code != 0:
        raise ValueError(f"llama_model_quantize returned {code}")
    os.replace(torn, target)


def _write_shape(writer: gguf.GGUFWriter, config: dict[str, int], kind: gguf.LlamaFileType) -> None:
    writer.add_block_count(config["n_layer"])
    writer.add_context_length(config["n_positions"])
    writer.add_embedding_length(config["n_embd"])
    writer.add_feed_forward_length(4 * config["n_embd"])
    writer.add_head_count(config["n_head"])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(kind)


def _write_vocabulary(writer: gguf.GGUFWriter, folder: Path, end: int) -> None:
    model = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    words = sorted(model["vocab"], key=model["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(words)
    kinds = [gguf.TokenType.CONTROL if index == end else gguf.TokenType.NORMAL for index in range(len(words))]
    writer.add_token_types(kinds)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(end)
    writer.add_eos_token_id(end)
    writer.add_add_bos_token(False)


def _tensors(folder: Path, layers: int) -> dict[str, np.ndarray]:
    """All float32, by the names of a GGUF file. GPT-2 stores its matrices as inputs x outputs, a GGUF file the other way."""
    weights = read_weights(folder)
    tensors = {"token_embd.weight": weights["wte.weight"], "position_embd.weight": weights["wpe.weight"]}
    tensors |= {f"output_norm.{part}": weights[f"ln_f.{part}"] for part in ("weight", "bias")}
    for layer in range(layers):
        for ours, theirs in NAMES.items():
            for part in ("weight", "bias"):
                tensor = weights[f"h.{layer}.{ours}.{part}"]
                tensors[f"blk.{layer}.{theirs}.{part}"] = np.ascontiguousarray(tensor.T)
    return tensors


if __name__ == "__main__":
    write(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
