"""The files for those who run the server: every command is one of ours, every probe a route, every metric of the dashboard is there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from server_under_test import InProcessServer, ServerProcess

from stage02_server.__main__ import main

ROOM = Path(__file__).parents[2] / "stage02_server" / "features" / "deploy"
DOCKERFILE = Path(__file__).parents[2] / ".devcontainer" / "Dockerfile"
DASHBOARD = json.loads((ROOM / "grafana.json").read_text(encoding="utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
COMPOSE = ("compose.yaml", "compose-nnodes.yaml")
SETS = ("leaderworkerset-dp.yaml", "leaderworkerset-nnodes.yaml")
LWS = {"LWS_LEADER_ADDRESS": "127.0.0.1", "LWS_WORKER_INDEX": "1", "LWS_GROUP_SIZE": "2"}
"""What LeaderWorkerSet gives each container of a group."""

# Commands


def parts(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((ROOM / name).read_text(encoding="utf-8")))


def containers(name: str) -> list[dict[str, Any]]:
    """The leader's, then the worker's."""
    template = parts(name)[0]["spec"]["leaderWorkerTemplate"]
    return [template[role]["spec"]["containers"][0] for role in ("leaderTemplate", "workerTemplate")]


def with_values(container: dict[str, Any]) -> list[str]:
    """Its arguments, as Kubernetes hands them over: `$(NAME)` stands for a variable of the container."""
    known = LWS | {each["name"]: each.get("value", "127.0.0.1") for each in container.get("env", ())}
    return [re.sub(r"\$\((\w+)\)", lambda found: known[found[1]], word) for word in container["args"]]


def commands() -> Iterator[tuple[str, list[str]]]:
    for name in COMPOSE:
        for service, given in parts(name)[0]["services"].items():
            if given["image"] == "vllm-in-stages":
                yield (
                    f"{name} {service}",
                    ["127.0.0.1" if word in ("head", "head-of-workers") else word for word in given["command"]],
                )
    for name in SETS:
        for container in containers(name):
            yield f"{name} {container['name']}", with_values(container)


@pytest.mark.parametrize("command", [pytest.param(words, id=name) for name, words in commands()])
def test_serve_accepts_the_command(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "secret").write_text("0" * 64)
    (tmp_path / "secret").chmod(0o600)
    words = [str(tmp_path / "secret") if word.endswith("/node-secret") else word for word in command]
    assert all(isinstance(word, str) for word in command), "YAML reads 2 as a number, and Kubernetes refuses it"
    assert main([*words, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"\bport\b.* 8000\b", shown), "the files say 8000"


@pytest.mark.parametrize("name", SETS)
def test_the_pods_of_a_group_agree(name: str) -> None:
    """Both halves of one deployment, and what stands around them."""
    lws, service = parts(name)
    leader, worker = containers(name)
    template = lws["spec"]["leaderWorkerTemplate"]
    assert "--headless" in worker["args"] and "--headless" not in leader["args"]
    for flag in ("--data-parallel-size", "--nnodes"):
        values = [each["args"][each["args"].index(flag) + 1] for each in (leader, worker) if flag in each["args"]]
        assert len(values) in (0, 2) and len(set(values)) <= 1
    if "--nnodes" in leader["args"]:
        assert leader["args"][leader["args"].index("--nnodes") + 1] == str(template["size"])
    secret = leader["args"][leader["args"].index("--node-secret-file") + 1]
    for role, container in (("leaderTemplate", leader), ("workerTemplate", worker)):
        [mount], [volume] = container["volumeMounts"], template[role]["spec"]["volumes"]
        assert mount["name"] == volume["name"] and secret == f"{mount['mountPath']}/node-secret"
        assert (
            f"secret generic {volume['secret']['secretName']} --from-literal=node-secret=" in (ROOM / name).read_text()
        )
        assert template[role]["metadata"]["labels"].items() >= ({"app": lws["metadata"]["name"]}).items()
    assert service["spec"]["selector"].items() <= template["leaderTemplate"]["metadata"]["labels"].items()
    assert not service["spec"]["selector"].items() <= template["workerTemplate"]["metadata"]["labels"].items()
    ports = {port["name"]: port["containerPort"] for port in leader["ports"]}
    assert ports["http"] == 8000 and service["spec"]["ports"][0]["targetPort"] == "http"
    assert set(ports.values()) - {8000} == ({29550} if "-dp" in name else {29501, 29502})


def test_every_probe_asks_a_route_that_answers() -> None:
    asked = {
        container[probe]["httpGet"]["path"]: container[probe]["httpGet"]["port"]
        for name in SETS
        for container in containers(name)
        for probe in ("startupProbe", "readinessProbe", "livenessProbe")
        if probe in container
    }
    for name in COMPOSE:
        text = (ROOM / name).read_text()
        asked |= dict.fromkeys(re.findall(r"127\.0\.0\.1:8000(/\w+)", text), "http")
        asked |= dict.fromkeys(re.findall(r"metrics_path: (/\w+)", text), "http")
    assert set(asked) == {"/health", "/version", "/metrics"} and set(asked.values()) == {"http"}
    server = InProcessServer()
    try:
        assert {server.request("GET", path).status_code for path in asked} == {200}
    finally:
        server.close()


# Shapes


def shape(required: dict[str, Any], optional: dict[str, Any] | None = None) -> dict[str, Any]:
    """An object with these properties and no others, so that a typing error is one that is seen."""
    properties = required | (optional or {})
    return {"type": "object", "properties": properties, "required": [*required], "additionalProperties": False}


TEXT, WHOLE, WORDS = (
    {"type": "string"},
    {"type": "integer", "minimum": 1},
    {"type": "array", "items": {"type": "string"}},
)
NAMED = {"type": "object", "additionalProperties": {"type": "string"}}


def row(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "minItems": 1, "items": items}


HTTP_GET = shape({"httpGet": shape({"path": TEXT, "port": TEXT})}, {"periodSeconds": WHOLE, "failureThreshold": WHOLE})
CONTAINER = shape(
    {"name": TEXT, "image": {"const": "vllm-in-stages"}, "args": WORDS, "resources": shape({"requests": NAMED}),
     "volumeMounts": row(shape({"name": TEXT, "mountPath": TEXT, "readOnly": {"const": True}}))},
    {"env": row(shape({"name": TEXT, "valueFrom": shape({"fieldRef": shape({"fieldPath": {"enum": ["status.podIP"]}})})})),
     "ports": row(shape({"name": {"type": "string", "maxLength": 15}, "containerPort": WHOLE})),
     "startupProbe": HTTP_GET, "readinessProbe": HTTP_GET, "livenessProbe": HTTP_GET},
)  # fmt: skip
POD = shape(
    {"metadata": shape({"labels": NAMED}),
     "spec": shape(
         {"securityContext": shape({"runAsNonRoot": {"const": True}, "runAsUser": WHOLE, "fsGroup": WHOLE}),
          "containers": row(CONTAINER),
          "volumes": row(shape({"name": TEXT, "secret": shape({"secretName": TEXT, "defaultMode": {"const": 0o440}})}))},
         {"terminationGracePeriodSeconds": WHOLE})}
)  # fmt: skip
LEADER_WORKER_SET = shape(
    {"apiVersion": {"const": "leaderworkerset.x-k8s.io/v1"}, "kind": {"const": "LeaderWorkerSet"},
     "metadata": shape({"name": TEXT}),
     "spec": shape({"replicas": WHOLE, "leaderWorkerTemplate": shape(
         {"size": WHOLE, "restartPolicy": {"enum": ["None", "RecreateGroupOnPodRestart"]},
          "leaderTemplate": POD, "workerTemplate": POD})})}
)  # fmt: skip
SERVICE = shape(
    {"apiVersion": {"const": "v1"}, "kind": {"const": "Service"}, "metadata": shape({"name": TEXT}),
     "spec": shape({"selector": NAMED, "ports": row(shape({"name": TEXT, "port": WHOLE, "targetPort": TEXT}))})}
)  # fmt: skip
CHECK = shape({"test": WORDS, "start_period": TEXT, "interval": TEXT, "timeout": TEXT, "retries": WHOLE})
NETWORKS = {"type": "object", "additionalProperties": shape({}, {"aliases": WORDS})}
IN_COMPOSE = shape(
    {"name": TEXT,
     "services": {"type": "object", "additionalProperties": shape({"image": TEXT}, {
         "build": shape({"context": TEXT, "dockerfile": TEXT}), "command": WORDS, "ports": row(TEXT), "volumes": row(TEXT),
         "environment": {"type": "object", "additionalProperties": {"type": ["string", "null"]}}, "init": {"const": True},
         "restart": {"const": "unless-stopped"}, "stop_grace_period": TEXT, "profiles": WORDS, "networks": {"oneOf": [WORDS, NETWORKS]}, "secrets": WORDS,
         "configs": row(shape({"source": TEXT, "target": TEXT})),
         "healthcheck": {"oneOf": [CHECK, shape({"disable": {"const": True}})]}})}},
    {"configs": {"type": "object", "additionalProperties": shape({"content": TEXT})},
     "networks": {"type": "object", "additionalProperties": {"oneOf": [{"type": "null"}, shape({"internal": {"const": True}})]}},
     "secrets": {"type": "object", "additionalProperties": shape({"file": TEXT})},
     "volumes": {"type": "object", "additionalProperties": {"type": "null"}}},
)  # fmt: skip


@pytest.mark.parametrize("name", [*COMPOSE, *SETS])
def test_nothing_is_misspelt(name: str) -> None:
    for part, wanted in zip(
        parts(name), [IN_COMPOSE] if name in COMPOSE else [LEADER_WORKER_SET, SERVICE], strict=True
    ):
        jsonschema.validate(part, wanted)


@pytest.mark.parametrize("name", COMPOSE)
def test_compose_names_what_it_defines(name: str) -> None:
    """Networks, secrets, configurations, volumes and files; ports are open to this machine alone."""
    [file] = parts(name)
    for service in file["services"].values():
        for kind in ("networks", "secrets"):
            assert set(service.get(kind, ())) <= set(file.get(kind, {}))
        assert {each["source"] for each in service.get("configs", ())} <= set(file.get("configs", {}))
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert (ROOM / source).exists() if source.startswith("./") else source in file["volumes"]
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
        if "build" in service:
            assert (ROOM / service["build"]["context"] / service["build"]["dockerfile"]).resolve() == DOCKERFILE
    for each in file.get("configs", {}).values():
        assert isinstance(yaml.safe_load(each["content"]), dict)
    stop = [
        words[words.index("--shutdown-timeout") + 1]
        for words in [file["services"].get("server", {}).get("command", [])]
        if words
    ]
    assert not stop or float(stop[0]) < float(file["services"]["server"]["stop_grace_period"].removesuffix("s"))


# The dashboard


FUNCTIONS = {"sum", "max", "rate", "histogram_quantile", "by"}
NAME = re.compile(r"[a-zA-Z_][\w:]*")


def asked_of_prometheus(query: str) -> tuple[set[str], set[str], set[str]]:
    """(metrics, labels that it filters by, labels that its result has) of an expression as the dashboard has them."""
    filters = {label for inside in re.findall(r"\{([^}]*)\}", query) for label in re.findall(r"(\w+)=", inside)}
    kept = {label for inside in re.findall(r"by \(([^)]*)\)", query) for label in NAME.findall(inside)}
    rest = re.sub(r"\{[^}]*\}|\[[^\]]*\]|by \([^)]*\)", " ", query)
    return {name for name in NAME.findall(rest) if name not in FUNCTIONS}, filters, kept


def samples(text: str) -> dict[str, set[str]]:
    """Sample -> its labels."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] = set(sample.labels)
    return found


@pytest.fixture(scope="module")
def shown() -> Iterator[list[dict[str, set[str]]]]:
    """/metrics of a server with one engine, and of one with two."""
    found = []
    for more in ((), ("--data-parallel-size", "2")):
        server = ServerProcess(
            "gpt2-tiny", "--host", "127.0.0.1", "--port", "0", "--kv-cache-memory-bytes", "50000000", *more
        )
        try:
            server.wait_until_ready()
            found.append(samples(httpx.get(server.url + "/metrics").text))
        finally:
            server.close()
    yield found


def test_every_query_of_the_dashboard_finds_its_metric(shown: list[dict[str, set[str]]]) -> None:
    one, two = shown
    beginning = next(each["gridPos"]["y"] for each in DASHBOARD["panels"] if each["title"] == "Several engines (-dp)")
    assert {panel["title"] for panel in PANELS if panel["gridPos"]["y"] > beginning}
    for panel in PANELS:
        for target in panel["targets"]:
            metrics, filters, kept = asked_of_prometheus(target["expr"])
            assert metrics, target
            for metric in metrics:
                for there in (two,) if panel["gridPos"]["y"] > beginning else (one, two):
                    assert metric in there, f"{panel['title']}: /metrics has no {metric}"
                    assert filters | kept <= there[metric], f"{panel['title']}: {metric} has the labels {there[metric]}"
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= kept, target
    for variable in DASHBOARD["templating"]["list"]:
        for metric, label in re.findall(r"label_values\(([\w:]+), (\w+)\)", variable["query"]):
            assert label in one[metric] and label in two[metric]


def test_the_panels_fit_together() -> None:
    """Ids are unique, nothing overlaps, and every variable is one of the dashboard's, or Grafana's own."""
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids)) and DASHBOARD["uid"]
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells
    known = {variable["name"] for variable in DASHBOARD["templating"]["list"]} | {"__rate_interval"}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD))) <= known
    assert all(panel["description"] and panel["fieldConfig"]["defaults"]["unit"] for panel in PANELS)
