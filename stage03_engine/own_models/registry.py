"""Models of the user's own by architecture (vllm/model_executor/models/registry.py, ModelRegistry). Imports no torch, and no model."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from stage03_engine import plugins
from stage03_engine.errors import ConfigError, StagesError
from stage03_engine.hf_config import Config, read_gpt2, readers
from stage03_engine.mixins import load
from stage03_engine.model_shape import ModelShape
from stage03_engine.plugins import Feature, Part, wanted

ReadConfig: TypeAlias = Callable[[Config, str], ModelShape]
_HERE = "stage03_engine.own_models."


class Registered(NamedTuple):
    """What a package said about a model."""

    model: str  # module:Class
    read_config: str | ReadConfig  # module:function, or the function itself
    feature: Feature  # what stands for it in the index


_registered: dict[str, Registered] = {}


class ModelRegistry:
    """A package calls it from a function that an entry point names; a program of its own before it makes an LLM."""

    @staticmethod
    def register_model(
        model_arch: str, model_cls: str | type, read_config: str | ReadConfig = f"{_HERE}registry:read_config"
    ) -> None:
        """From now on `model_cls` serves models whose config.json names `model_arch`. Better name the class, as "module:Class": the API
        server asks too, and need not import it. `read_config(config, architecture)` makes the ModelShape from config.json; by default
        the keys have the names of GPT-2's or of Llama's. A second call for the same architecture replaces the first.
        Raises ConfigError for a name that is none, and for an architecture of this project's own."""
        path = f"{model_cls.__module__}:{model_cls.__qualname__}" if isinstance(model_cls, type) else model_cls
        if not isinstance(path, str) or path.count(":") != 1 or not all(path.split(":")):
            raise ConfigError(f"the model {model_arch}: a class, or its name as module:Class, not {model_cls!r}")
        if not model_arch.isidentifier():
            raise ConfigError(f"the model {model_arch!r}: an architecture is one word, as in config.json")
        if model_arch in readers() and model_arch not in _registered:
            raise ConfigError(
                f"the model {model_arch} is here already: give yours another name, also in its config.json"
            )
        feature = Feature(
            name=f"model {model_arch}",
            help="registered by a package, or by the program itself",
            room=path.partition(":")[0],
            parts=(
                Part("architecture", f"{_HERE}registry:read_shape", key=model_arch),
                Part("model", f"{_HERE}classes:{model_arch}", key=model_arch),
            ),
        )
        old = _registered.get(model_arch)
        others = tuple(each for each in plugins.INDEX if old is None or each is not old.feature)
        plugins.INDEX = (*others, feature)
        _registered[model_arch] = Registered(path, read_config, feature)

    @staticmethod
    def get_supported_archs() -> list[str]:
        """All architectures, those of this project too."""
        return list(readers())


def model_path(architecture: str) -> str:
    """module:Class of a registered model. Raises KeyError."""
    return _registered[architecture].model


def read_shape(config: Config, architecture: str) -> ModelShape:
    """The shape of a registered model. Raises ConfigError if its config.json does not fit, or its class cannot be there."""
    registered = _registered[architecture]
    wanted("engine", "check_module", "a model of your own")(registered.model, f"the model {architecture}:")
    try:
        read = registered.read_config
        shape = load(read)(config, architecture) if isinstance(read, str) else read(config, architecture)
    except StagesError:
        raise
    except Exception as error:  # somebody else's code
        config.refuse(f"what reads it for {architecture} failed ({type(error).__name__}: {error})")
    if not isinstance(shape, ModelShape):
        config.refuse(f"what reads it for {architecture} must return a ModelShape, not {type(shape).__name__}")
    return shape


def read_config(config: Config, architecture: str) -> ModelShape:
    """By the names that GPT-2's config.json has for the sizes, or else Llama's. Raises ConfigError."""
    if "n_embd" in config.values:
        return read_gpt2(config, architecture)
    shape: ModelShape = wanted("architecture", "LlamaForCausalLM", f"what reads the config.json of {architecture}")(
        config, architecture
    )
    return shape
