"""The classes of a model with a classification head, from its config.json (vllm/model_executor/layers/pooler/activations.py
`get_act_fn`; transformers' PretrainedConfig for `id2label`). Imports no torch.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TypeGuard

from stage03_engine.hf_config import Config, read_architecture, readers
from stage03_engine.model_shape import ModelShape

CLASSIFIER = "ForSequenceClassification"
MAX_LABELS = 65_536
_PROBLEM_TYPES = ("single_label_classification", "multi_label_classification", "regression", None)
_ACTIVATIONS = {
    "torch.nn.modules.linear.Identity": "identity",
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
}
"""What sentence-transformers writes into the config.json of a cross-encoder -> what to do with its logits."""


def classifier_name(architecture: str) -> str:
    """The same model with a classification head instead of the output matrix: `LlamaForSequenceClassification`."""
    for ending in ("LMHeadModel", "ForCausalLM"):
        architecture = architecture.removesuffix(ending)
    return architecture if architecture.endswith(CLASSIFIER) else architecture + CLASSIFIER


def generator_name(architecture: str) -> str:
    """The other way round: the model with an output matrix."""
    body = architecture.removesuffix(CLASSIFIER)
    return architecture if body == architecture else body + ("LMHeadModel" if body == "GPT2" else "ForCausalLM")


def read_classifier(config: Config, architecture: str) -> ModelShape:
    """The generating model's shape, with the classes. Raises ConfigError."""
    return with_labels(read_architecture(config, generator_name(architecture)), config)


def classifier_shape(shape: ModelShape, folder: str | None, settings: object) -> ModelShape:
    """The shape of any model that can have a classification head as that of a classifier. Raises ConfigError."""
    if shape.labels or classifier_name(shape.architecture) not in readers():
        return shape
    return with_labels(shape, None if folder is None else Config(Path(folder) / "config.json", settings))


def with_labels(shape: ModelShape, config: Config | None) -> ModelShape:
    """`shape` as a classifier, with the classes that its config.json names; without a file those that transformers assumes.

    Raises ConfigError that names the file and the key.
    """
    labels = _labels(config) if config is not None else ("LABEL_0", "LABEL_1")
    activation = _activation(config, len(labels)) if config is not None else "softmax"
    architecture = classifier_name(shape.architecture)
    return replace(shape, architecture=architecture, labels=labels, label_activation=activation)  # type: ignore[call-arg]


def _labels(config: Config) -> tuple[str, ...]:
    """Names in the order of their numbers. `id2label` decides; transformers leaves it out where it is the default for two."""
    named = config.values.get("id2label")
    if named is None:
        count = config.size("num_labels", 2)
        if count > MAX_LABELS:
            config.refuse(f"num_labels must be at most {MAX_LABELS}, not {count}")
        return tuple(f"LABEL_{number}" for number in range(count))
    if not isinstance(named, dict) or not 1 <= len(named) <= MAX_LABELS:
        config.refuse(f"id2label must map the numbers of 1 to {MAX_LABELS} classes to their names")
    labels = []
    for number in range(len(named)):
        label = named.get(str(number))
        if not _is_text(label):
            config.refuse(f"id2label must name each class from 0 to {len(named) - 1} by a text; {number} has {label!r}")
        labels.append(label)
    return tuple(labels)


def _is_text(value: object) -> TypeGuard[str]:
    """A text without lone surrogates, which no answer could hold."""
    return isinstance(value, str) and not any("\ud800" <= c <= "\udfff" for c in value)


def _activation(config: Config, num_labels: int) -> str:
    """What turns logits into the numbers of the answer. A softmax over one class would always say 1."""
    problem = config.values.get("problem_type")
    if problem not in _PROBLEM_TYPES:
        config.refuse(f"problem_type {problem!r} is not one of {', '.join(str(kind) for kind in _PROBLEM_TYPES[:3])}")
    if problem == "regression":
        return "identity"
    if problem == "multi_label_classification":
        return "sigmoid"
    named = _named_activation(config) if problem is None else None
    return named or ("sigmoid" if num_labels == 1 else "softmax")


def _named_activation(config: Config) -> str | None:
    newer, name = config.values.get("sentence_transformers"), config.values.get("sbert_ce_default_activation_function")
    if isinstance(newer, dict):
        name = newer.get("activation_fn", name)
    if name is None:
        return None
    if name not in _ACTIVATIONS:
        config.refuse(f"the activation function {name!r} is not supported; {' and '.join(_ACTIVATIONS)} are")
    return _ACTIVATIONS[name]
