"""What protects the connections between the machines of one service (vLLM has no such settings)."""

from __future__ import annotations

from dataclasses import dataclass

from stage03_engine.args.fields import option
from stage03_engine.plugins import Feature, Part


@dataclass(frozen=True)
class NodeConfig:
    """The connections between machines."""

    node_secret_file: str | None = option(
        None,
        "file with the secret that all machines of a service share, 16 bytes or more; the variable STAGES_NODE_SECRET can hold it instead",
    )
    node_secret_required: bool = option(
        True,
        "machines talk only to those that know the secret; without it anyone who reaches one of their addresses can use the engines",
    )


@dataclass(frozen=True)
class NodeFlags:
    """Part of VllmConfig."""

    node_config: NodeConfig = NodeConfig()


FEATURE = Feature(
    name="nodes",
    help="what engines and workers on other machines share: the secret, sealed sockets, `--headless`",
    room=__package__,
    settings={"VllmConfig": NodeFlags},
    parts=(Part("serve", ".headless:run_headless", key="run_headless"),),
    variables=("STAGES_NODE_SECRET",),
    events=("node.join_sent", "node.joined", "node.listening", "node.lost", "node.welcomed"),
)
