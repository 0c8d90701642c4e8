"""How `make notebooks` runs JupyterLab: its checkpoints lie in `.venv`, not beside each file that is opened (the sources are read here too)."""

from pathlib import Path

from jupyter_server.services.contents.filecheckpoints import AsyncFileCheckpoints

CHECKPOINTS = Path(__file__).resolve().parent.parent / ".venv" / "checkpoints"


class Aside(AsyncFileCheckpoints):
    """Jupyter's own checkpoints, in one folder."""

    def checkpoint_path(self, checkpoint_id: str, path: str) -> str:
        """One file for each path: the same name in two folders is two files."""
        CHECKPOINTS.mkdir(parents=True, exist_ok=True)
        return str(CHECKPOINTS / f"{path.strip('/').replace('/', '__')}-{checkpoint_id}")


c = get_config()  # noqa: F821  # Jupyter defines it
c.ContentsManager.checkpoints_class = Aside
