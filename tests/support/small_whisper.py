"""A tiny random Whisper with a tokenizer of its own, and sound for it."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import soundfile
import torch
from tokenizers import AddedToken, Tokenizer as Backend, decoders, models, pre_tokenizers
from tokenizers.trainers import BpeTrainer

from stage02_server.features.audio.decode import Sound
from stage02_server.features.audio.manifest import AudioFlags

SPECIAL = ["endoftext", "startoftranscript", "en", "de", "translate", "transcribe", "startofprev", "nospeech",
           "notimestamps"]  # fmt: skip
NUM_TIMES = 400  # tokens for 0.00 to 7.98 seconds, which the tokenizer does not know
MAX_LEN = 60


def whisper_folder(folder: Path) -> Path:
    """Write the model into the folder."""
    # Whoever only needs a sound need not wait for this import.
    from transformers import GenerationConfig, WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

    backend = Backend(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.train_from_iterator(
        [], BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    )
    backend.add_special_tokens([AddedToken(f"<|{name}|>", special=True) for name in SPECIAL])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    end = backend.token_to_id("<|endoftext|>")
    config = WhisperConfig(
        vocab_size=backend.get_vocab_size() + NUM_TIMES, d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, num_mel_bins=16, max_target_positions=MAX_LEN,
        eos_token_id=end, bos_token_id=end, pad_token_id=end, decoder_start_token_id=end + 1, init_std=0.4,
        suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    torch.manual_seed(3)
    model = WhisperForConditionalGeneration(config)
    with torch.no_grad():  # each single time less likely than text, all of them together often more so
        model.model.decoder.embed_tokens.weight[-NUM_TIMES:] *= 0.3
        model.model.decoder.embed_tokens.weight[backend.token_to_id("Ġ")] *= 2
    ids = {name: backend.token_to_id(f"<|{name}|>") for name in SPECIAL}
    letters = {
        i for i, symbol in enumerate(map(backend.id_to_token, range(end))) if "a" <= symbol <= "z" or symbol == "Ġ"
    }
    model.generation_config = GenerationConfig(
        eos_token_id=end, pad_token_id=end, decoder_start_token_id=end + 1, begin_suppress_tokens=[end],
        suppress_tokens=[i for i in range(len(ids) + end) if i != end and i not in letters], is_multilingual=True,
        lang_to_id={f"<|{name}|>": ids[name] for name in ("en", "de")}, no_timestamps_token_id=ids["notimestamps"],
        task_to_id={name: ids[name] for name in ("translate", "transcribe")}, max_initial_timestamp_index=50,
        alignment_heads=[[0, 1], [1, 0]], max_length=MAX_LEN,
    )  # fmt: skip
    model.save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=16).save_pretrained(folder)
    return folder


def sound(seconds: float, rate: int = 16_000, channels: int = 1, form: str = "WAV", seed: int = 0) -> bytes:
    """A row of tones, and a little noise."""
    rng, time = np.random.default_rng(seed), np.arange(int(seconds * rate)) / rate
    tones = np.sin(2 * np.pi * time * (200 + 100 * np.floor(time * 3 % 7 + seed))) * 0.4
    samples = np.stack([tones + rng.normal(0, 0.01, len(time)) for _ in range(channels)], axis=1)
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=form)
    return file.getvalue()


class Reference:
    """Whisper's greedy text without a cache: all tokens through the decoder again for each new one."""

    def __init__(self, folder: Path) -> None:
        from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

        self.model = WhisperForConditionalGeneration.from_pretrained(folder).eval()
        self.features = WhisperFeatureExtractor.from_pretrained(folder)
        self.first_time = self.model.generation_config.no_timestamps_token_id + 1
        self.backend = Backend.from_file(str(folder / "tokenizer.json"))

    @torch.inference_mode()
    def text(self, samples: np.ndarray, names: list[str], before: str = "") -> str:
        inputs = self.features(samples, sampling_rate=16_000, return_tensors="pt").input_features
        encoded = self.model.get_encoder()(inputs)
        tokens = self.backend.encode(before).ids if before else []
        tokens = ([self._id("startofprev"), *tokens] if before else []) + [self._id(name) for name in names]
        start, end = len(tokens), self._id("endoftext")
        while len(tokens) < MAX_LEN and tokens[-1] != end:
            logits = self.model(encoder_outputs=encoded, decoder_input_ids=torch.tensor([tokens])).logits[0, -1]
            logits[self.model.generation_config.suppress_tokens] = -torch.inf
            if len(tokens) == start:
                logits[end] = -torch.inf
            tokens.append(int(logits.argmax()))
        return self.backend.decode(tokens[start:], skip_special_tokens=True)

    def timed(self, samples: np.ndarray, language: str = "en") -> tuple[list, list, list]:
        """What transformers writes with timestamps before it first stops: the tokens, when each of them ends, and the begin
        and end of each segment."""
        inputs = self.features(samples, sampling_rate=16_000, return_tensors="pt", return_attention_mask=True)
        made = self.model.generate(
            inputs.input_features, attention_mask=inputs.attention_mask, language=language, task="transcribe",
            return_timestamps=True, return_token_timestamps=True, return_segments=True, return_dict_in_generate=True,
        )  # fmt: skip
        first, start = made["segments"][0][0]["result"], 3  # the prompt: start of transcript, language, task
        spans = [(float(s["start"]), float(s["end"])) for s in made["segments"][0] if s["result"] is first]
        return first["sequences"][start:].tolist(), first["token_timestamps"][start:].tolist(), spans

    def language(self, samples: np.ndarray) -> str:
        """What transformers takes the sound for."""
        inputs = self.features(samples, sampling_rate=16_000, return_tensors="pt").input_features
        return self.backend.id_to_token(int(self.model.detect_language(inputs)))[2:-2]

    @torch.inference_mode()
    def logits(self, samples: np.ndarray, tokens: list[int]) -> torch.Tensor:
        """[num_tokens, vocab_size]."""
        inputs = self.features(samples, sampling_rate=16_000, return_tensors="pt").input_features
        return self.model(input_features=inputs, decoder_input_ids=torch.tensor([tokens])).logits[0]

    def _id(self, name: str) -> int:
        return self.backend.token_to_id(f"<|{name}|>")


def decode_audio(data: bytes, max_seconds: int = AudioFlags.max_audio_seconds) -> np.ndarray:
    """A sound file as the server hears it: float32 [num_samples], mono, 16,000 samples per second. Raises InvalidRequestError."""
    opened = Sound(data, max_seconds)
    opened.length()
    return np.concatenate(list(opened.blocks()))
