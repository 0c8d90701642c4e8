"""How `make notebooks` runs JupyterLab: its checkpoints lie in `.venv`, not beside each file that is opened (the sources are read here too),
and each notebook is listed once."""

import os
from pathlib import Path

from jupyter_server.services.contents.filecheckpoints import AsyncFileCheckpoints

CHECKPOINTS = Path(__file__).resolve().parent.parent / ".venv" / "checkpoints"


class Aside(AsyncFileCheckpoints):
    """Jupyter's own checkpoints, in one folder."""

    def checkpoint_path(self, checkpoint_id: str, path: str) -> str:
        """One file for each path: the same name in two folders is two files."""
        CHECKPOINTS.mkdir(parents=True, exist_ok=True)
        return str(CHECKPOINTS / f"{path.strip('/').replace('/', '__')}-{checkpoint_id}")


# labconfig/ beside this file has settings of the pages: nobody is asked whether to fetch news of Jupyter's
os.environ["JUPYTER_CONFIG_PATH"] = os.pathsep.join(
    filter(None, [str(Path(__file__).resolve().parent), os.environ.get("JUPYTER_CONFIG_PATH")])
)
c = get_config()  # noqa: F821  # Jupyter defines it
c.ContentsManager.checkpoints_class = Aside
c.ContentsManager.hide_globs.extend(["[0-9][0-9]_*.py"])  # each notebook is listed once; a link still opens its source
