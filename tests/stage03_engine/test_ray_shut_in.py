"""A Ray cluster of the engine's own is shut in: nobody else reaches it. Without Ray; test_ray_executor.py asks the real one."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.core.features.distributed import manifest as distributed_manifest, ray_executor
from stage03_engine.errors import ConfigError

FAKE_RAY = """
import os
SEEN = {name: value for name, value in os.environ.items() if name.startswith("RAY_")}
class exceptions:
    class RayError(Exception): pass
def is_initialized(): return False
def init(**given): SEEN["init"] = given
"""


@pytest.fixture
def fake_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Says what it was told. (The real one is tried in test_ray_executor.py.)"""
    (tmp_path / "ray.py").write_text(FAKE_RAY)
    for name in ("RAY_ADDRESS", *ray_executor.SHUT_IN, *ray_executor.TOKENS):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    yield
    sys.modules.pop("ray", None)
    for name in (*ray_executor.SHUT_IN, *ray_executor.TOKENS):
        os.environ.pop(name, None)


def test_a_ray_cluster_of_ones_own_is_shut_in(fake_ray: None) -> None:
    """Before Ray is imported: it reads its variables then."""
    ray = ray_executor.import_ray()
    token = ray.SEEN.pop("RAY_AUTH_TOKEN")
    assert ray.SEEN == {"RAY_AUTH_MODE": "token", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"} and len(token) == 64
    ray_executor._join_cluster(ray)
    assert ray.SEEN["init"]["address"] == "local" and ray.SEEN["init"]["include_dashboard"] is False
    assert ray_executor.import_ray() is ray and os.environ["RAY_AUTH_TOKEN"] == token, "one token for all that follows"


def test_a_token_of_ones_own_is_kept(fake_ray: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/a/file")
    assert "RAY_AUTH_TOKEN" not in ray_executor.import_ray().SEEN


@pytest.mark.parametrize("early", [False, True])
def test_a_ray_cluster_that_cannot_be_shut_in_is_not_started(
    early: bool, fake_ray: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Because the user says otherwise, or because Ray was imported already, and listens to nothing any more."""
    if early:
        importlib.import_module("ray")
    else:
        monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(
        ConfigError, match="RAY_AUTH_MODE is .*, and a Ray cluster that the engine starts needs 'token'"
    ):
        ray_executor.import_ray()


def test_a_ray_cluster_of_others_is_joined_as_it_is(
    fake_ray: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert set(ray_executor.import_ray().SEEN) == {"RAY_ADDRESS"}
    assert "whoever reaches a port of this Ray cluster can run code in it" in caplog.text


@pytest.mark.parametrize(
    ("found", "accepted"), [("2.51.9", False), ("2.52.0", True), ("3.0.0.dev0", True), (None, False)]
)
def test_a_ray_without_tokens_is_refused(
    found: str | None, accepted: bool, fake_ray: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if found is None:
            raise PackageNotFoundError
        return found

    monkeypatch.setattr(distributed_manifest, "version", version)
    said = nullcontext() if accepted else pytest.raises(ConfigError, match=r"needs Ray 2\.52 or newer")
    with said:
        EngineArgs.from_kwargs(model="gpt2-tiny", distributed_executor_backend="ray")
