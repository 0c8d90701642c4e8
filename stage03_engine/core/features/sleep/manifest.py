"""`--enable-sleep-mode`: an engine gives its memory back and keeps its process (vllm/config/model.py, enable_sleep_mode)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stage03_engine.args.fields import option
from stage03_engine.errors import ConfigError
from stage03_engine.mixins import load
from stage03_engine.plugins import Feature, Part

if TYPE_CHECKING:
    from stage03_engine.config import VllmConfig

_ROOM = "stage03_engine.core.features.sleep."
_FRONT = "stage03_engine.frontend.features.sleep."


@dataclass(frozen=True)
class SleepMode:
    """Part of ModelConfig."""

    enable_sleep_mode: bool = option(
        False,
        "let the engine give its memory back while nobody needs it: LLM.sleep and wake_up; over HTTP with --server-dev-mode",
    )


@dataclass(frozen=True)
class SleepFlags:
    """Part of VllmConfig."""

    @staticmethod
    def check(config: VllmConfig) -> None:
        """Raises ConfigError for a model or a device that cannot do it."""
        if not config.model_config.enable_sleep_mode:
            return
        if "transcription" in config.supported_tasks:
            raise ConfigError("enable_sleep_mode is not for models that hear: their memory is transformers' own")
        if config.device_config.device == "cuda" and not getattr(config.device_config, "enforce_eager", True):
            raise ConfigError(
                "enable_sleep_mode needs enforce_eager on a GPU: a recorded step would go on reading memory that was given back"
            )

    @staticmethod
    def hooks(config: VllmConfig) -> dict[str, list[str]]:
        """The scheduler refuses requests meanwhile; the runner gives back and takes again; engines that come later fall asleep too."""
        if not config.model_config.enable_sleep_mode:
            return {}
        return {
            "scheduler": [_ROOM + "scheduler_hook:SleepSchedulerHook"],
            "runner": [_ROOM + "runner_hook:SleepRunnerHook"],
            "async_llm": [_FRONT + "calls:follow"],
        }


def install(app: Any, services: Any) -> None:
    """The metric, and the routes, for those who may use them: they take the engine away from everybody."""
    if services.engine.vllm_config.model_config.enable_sleep_mode:
        load("stage02_server.features.sleep.metrics:install")(app, services)
        if getattr(services.args, "server_dev_mode", False):
            load("stage02_server.features.sleep.routes:install")(app, services)


FEATURE = Feature(
    name="sleep",
    help="an engine that sleeps: its memory is given back, its process stays",
    room=__package__,
    also=("stage03_engine.frontend.features.sleep", "stage02_server.features.sleep"),
    settings={"ModelConfig": SleepMode, "VllmConfig": SleepFlags},
    parts=(
        Part("call", ".scheduler_hook:sleep", key="sleep"),
        Part("call", ".scheduler_hook:wake_up", key="wake_up"),
        Part("call", ".scheduler_hook:is_awake", key="is_awake"),
        Part("call", ".scheduler_hook:sleep_level", key="sleep_level"),
        Part("llm", _FRONT + "calls:sleep", key="sleep"),
        Part("llm", _FRONT + "calls:wake_up", key="wake_up"),
        Part("llm", _FRONT + "calls:is_sleeping", key="is_sleeping"),
        Part("async_llm", _FRONT + "calls:sleep_async", key="sleep"),
        Part("async_llm", _FRONT + "calls:wake_up_async", key="wake_up"),
        Part("async_llm", _FRONT + "calls:is_sleeping_async", key="is_sleeping"),
        Part("routes", ".manifest:install"),
    ),
    needs=("prefix_cache_reset",),
    after=("lora",),
    events=("sleep.changed", "sleep.memory"),
)
