"""`--tensor-parallel-size` and similar flags (vllm/config/parallel.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from stage03_engine.args.fields import internal, option
from stage03_engine.errors import ConfigError
from stage03_engine.mixins import is_there, load
from stage03_engine.plugins import Feature, Part, wanted

if TYPE_CHECKING:
    from stage03_engine.config import VllmConfig


_ROOM = "stage03_engine.core.features.distributed."
EXECUTORS = {
    "mp": _ROOM + "multiproc_executor:MultiprocExecutor",
    "ray": _ROOM + "ray_executor:RayDistributedExecutor",
    "external_launcher": _ROOM + "external_launcher:ExecutorWithExternalLauncher",
    "several machines": _ROOM + "machines.head:MultiNodeExecutor",
}
"""--distributed-executor-backend -> class. `uni` is in the walk; the last one is for --nnodes."""
RAY_WITH_TOKENS = (2, 52)
BACKENDS = ("uni", "mp", "ray", "external_launcher")
EXTERNAL_REFUSAL = _ROOM + "launched_lane:refuse_engine_process"
OWN_EXECUTOR = "stage03_engine.core.features.own_classes.own_workers:make_executor"
_SECURE = "stage03_engine.nodes"
PIPELINE_SCHEDULER = _ROOM + "pipeline_scheduler:PipelineScheduler"


@dataclass(frozen=True)
class ParallelConfig:
    """How many workers run one model, and how they are started."""

    tensor_parallel_size: int = option(
        1, "workers that share every layer, each with a slice of its heads and columns", aliases=("-tp",), at_least=1
    )
    pipeline_parallel_size: int = option(
        1, "groups of layers, each with workers of its own", aliases=("-pp",), at_least=1
    )
    distributed_executor_backend: str | None = option(
        None,
        "how workers are started: uni = one, in the engine process; mp = a process each; ray = Ray actors; external_launcher = torchrun "
        "started this process as one of them; module:Class = an executor of your own; mp if not given and there are several",
    )
    nnodes: int = option(
        1, "machines that one engine's workers are spread over, the same number on each", aliases=("-n",), at_least=1
    )
    node_rank: int = option(
        0,
        "which of --nnodes machines this is: 0 has the engine, and the others run `serve MODEL --headless`",
        aliases=("-r",),
        at_least=0,
    )
    master_addr: str = option("127.0.0.1", "with --nnodes: address of machine 0, where the others find it")
    master_port: int = option(
        29501,
        "with --nnodes: port of machine 0 at which the workers meet; the machines themselves meet at the next one",
        at_least=1,
    )
    distributed_timeout_seconds: int | None = option(
        None,
        "seconds that workers wait for each other at start, and in an exchange, before they give up; torch decides if not given",
        at_least=1,
    )

    @property
    def world_size(self) -> int:
        """Workers of one engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def local_world_size(self) -> int:
        """Those of them on each machine."""
        return self.world_size // self.nnodes

    @property
    def executor(self) -> str:
        """The backend that is used."""
        return self.distributed_executor_backend or ("mp" if self.world_size > 1 or self.nnodes > 1 else "uni")


@dataclass(frozen=True)
class PipelineStages:
    """Part of SchedulerConfig."""

    pipeline_groups: bool = option(
        True,
        "with -pp: spread the running requests evenly over the steps in flight; if off, each step takes all that are ready, as in vLLM",
    )
    pipeline_stages: int = internal(1)  # pipeline_parallel_size: how many steps may be in flight


class PipelineFlags:
    """What ParallelFlags does for pipeline stages."""

    @staticmethod
    def detect(values: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
        """The scheduler that knows which requests are in flight."""
        several = values.get("pipeline_parallel_size", 1) > 1
        return {"scheduler_cls": (PIPELINE_SCHEDULER, "pipeline_parallel_size")} if several else {}

    @staticmethod
    def resolve(values: Mapping[str, Any], files: object) -> dict[str, Any]:
        """The scheduler's copy of the number of stages."""
        return {"pipeline_stages": values.get("pipeline_parallel_size", 1)}

    @staticmethod
    def check(config: VllmConfig) -> None:
        """Raises ConfigError for layers that cannot be split, and for what does not work over several stages."""
        if config.parallel_config.pipeline_parallel_size == 1:
            return
        from stage03_engine.core.features.distributed.stages import layer_partition

        layer_partition(config.shape.num_layers, config.parallel_config.pipeline_parallel_size)
        device = config.device_config
        for refused, why in (
            (
                "generate" not in config.supported_tasks,
                "is for models that generate text, because the last stage answers with tokens alone; leave it out for this one",
            ),
            (
                config.scheduler_config.scheduler_cls != PIPELINE_SCHEDULER,
                "brings its own scheduler, which knows what is in flight: leave out scheduler_cls, or pipeline_parallel_size",
            ),
            (
                device.attention_backend == "triton" and not getattr(device, "enforce_eager", True),
                "needs enforce_eager: a stage receives and sends within the forward pass that a CUDA graph would record",
            ),
        ):
            if refused:
                raise ConfigError(f"pipeline_parallel_size > 1 {why}")


@dataclass(frozen=True)
class ParallelFlags(PipelineFlags):
    """Part of VllmConfig."""

    parallel_config: ParallelConfig = ParallelConfig()

    @staticmethod
    def check(config: VllmConfig) -> None:
        """Raises ConfigError for combinations that cannot work."""
        parallel = config.parallel_config
        _check_backend(parallel.executor)
        _check_machines(config, parallel)
        if parallel.executor == "uni" and parallel.world_size > 1:
            raise ConfigError(
                f"distributed_executor_backend uni is one worker, and tensor_parallel_size x pipeline_parallel_size is {parallel.world_size}; use mp"
            )
        if parallel.executor != "uni":
            _check_workers(config, parallel)
        if parallel.world_size > 1:
            from stage03_engine.core.features.distributed.rank_config import check_divides

            check_divides(config.shape, parallel.tensor_parallel_size)

    @staticmethod
    def hooks(config: VllmConfig) -> dict[str, list[str]]:
        """The executor, and what each worker of several adds to the model."""
        parallel = config.parallel_config
        several = parallel.world_size > 1
        executor = "several machines" if parallel.nnodes > 1 else parallel.executor
        return {
            "executor": [EXECUTORS.get(executor, OWN_EXECUTOR)] if executor != "uni" else [],
            "runner": [_ROOM + "parallel_model:ParallelModelHook"] * several,
            "core": [_ROOM + "pipeline_core:PipelineEngineCore"] * (parallel.pipeline_parallel_size > 1),
            "core_proc": [EXTERNAL_REFUSAL] * (executor == "external_launcher"),
            # before the one that opens the trace
            "trace": [_ROOM + "launched_lane:name_lane"]
            * (several and executor == "external_launcher" and _is_traced(config)),
        }


def _is_traced(config: Any) -> bool:
    observed = config.observability_config
    return getattr(observed, "trace", None) is not None or getattr(observed, "trace_console", False)


def _check_backend(name: str) -> None:
    """Raises ConfigError for a word that is no backend, and for a class whose module is not there."""
    if name in BACKENDS:
        return
    if not {":", "."} & set(name):
        raise ConfigError(
            f"distributed_executor_backend: {name!r} is not one of {', '.join(BACKENDS)}, nor a class of your own, module:Class"
        )
    wanted("engine", "check_module", "an executor of your own")(name, "--distributed-executor-backend")


def _check_machines(config: Any, parallel: ParallelConfig) -> None:
    """--nnodes and what belongs to it."""
    nodes, size = parallel.nnodes, parallel.world_size
    if parallel.node_rank >= nodes:
        raise ConfigError(f"node_rank {parallel.node_rank} must be less than nnodes, which is {nodes}")
    if nodes == 1:
        return
    if not is_there(_SECURE):
        raise ConfigError(f"nnodes > 1 needs {_SECURE}, which is not installed")
    engines = getattr(getattr(config, "data_parallel_config", None), "data_parallel_size", 1)
    for refused, why in (
        (parallel.executor != "mp", f"works with distributed_executor_backend mp alone, not with {parallel.executor}"),
        (
            engines > 1,
            "is one engine on several machines, and data_parallel_size several engines; leave out one of the two",
        ),
        (
            parallel.node_rank == 0 and size % nodes != 0,
            f"must divide tensor_parallel_size x pipeline_parallel_size, which is {size}: each machine has as many workers",
        ),
        (
            parallel.master_addr in ("", "*", "0.0.0.0", "::"),
            "needs the address of machine 0 in master_addr, not that of every interface",
        ),
        (
            parallel.master_port >= 65535,
            f"needs two ports, master_port and the next one; {parallel.master_port} is too high",
        ),
    ):
        if refused:
            raise ConfigError(f"nnodes = {nodes} {why}")


def _check_workers(config: Any, parallel: ParallelConfig) -> None:
    """What needs the model in the engine process, or a core of its own."""
    if "transcription" in config.supported_tasks:
        raise ConfigError(
            "a Whisper model runs in the engine process: leave out distributed_executor_backend, tensor_parallel_size and pipeline_parallel_size"
        )
    if parallel.executor == "ray" and not is_there("ray"):
        raise ConfigError(
            "distributed_executor_backend ray needs Ray, which is not installed: pip install --editable '.[ray]' adds it; mp works without it"
        )
    if parallel.executor == "ray":
        _check_ray_version()
    if parallel.executor in ("mp", "ray") and getattr(config.observability_config, "profiler_dir", None) is not None:
        raise ConfigError(
            f"profiler_dir records the engine process, but with distributed_executor_backend {parallel.executor} the model runs in others; "
            "leave out one of the two"
        )


def check_serve(config: Any) -> None:
    """Called before a server starts anything. Raises ConfigError for an executor that no server can have."""
    if config.parallel_config.executor == "external_launcher":
        load(EXTERNAL_REFUSAL)()


def _check_ray_version() -> None:
    """Raises ConfigError for a Ray without tokens: whoever reaches its ports runs code in the workers."""
    try:  # of the package: Ray reads its variables when it is imported, and they are not set yet
        found = version("ray")
    except PackageNotFoundError:
        found = "of no known version"
    if tuple(int(part) for part in found.split(".")[:2] if part.isdecimal()) < RAY_WITH_TOKENS:
        least = ".".join(map(str, RAY_WITH_TOKENS))
        raise ConfigError(
            f"distributed_executor_backend ray needs Ray {least} or newer, the first that can ask for a token, and this is {found}: "
            "pip install --editable '.[ray]' --upgrade brings one"
        )


FEATURE = Feature(
    name="distributed",
    help="several workers for one model: tensor parallelism, pipeline stages, processes, Ray, torchrun, several machines",
    room=__package__,
    settings={"SchedulerConfig": PipelineStages, "VllmConfig": ParallelFlags},
    parts=(
        Part("replay", PIPELINE_SCHEDULER, key=PIPELINE_SCHEDULER),
        Part("serve", ".manifest:check_serve", key="check"),
    ),
    conflicts={
        (
            "pipeline_parallel_size",
            "async_scheduling",
        ): "the steps of several stages overlap already, so each is decided while others run",
        (
            "pipeline_parallel_size",
            "speculative_config",
        ): "each stage counts its computed tokens itself, and only the last stage would know which drafts were accepted",
        ("pipeline_parallel_size", "batch_invariant"): "each stage would choose its own number of rows",
    },
    variables=("VLLM_PP_LAYER_PARTITION",),
    events=(
        "executor.created",
        "executor.output_received",
        "executor.step_sent",
        "worker.collective",
        "worker.dead",
        "worker.failed",
        "worker.hello",
        "worker.init_sent",
        "worker.output_sent",
        "worker.ready",
        "worker.spawned",
        "worker.step_received",
        "worker.stopped",
    ),
)
