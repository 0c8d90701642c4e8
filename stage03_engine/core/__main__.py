"""`python -m stage03_engine.core HANDSHAKE_ADDRESS ENGINE_INDEX`: the engine process. Started by the front end, not by hand."""

import sys

from stage03_engine.args.processes import wake_as_orphan

if __name__ == "__main__":
    wake_as_orphan()  # before what takes seconds to import
    from stage03_engine.core.engine_core_proc import run_engine_core

    sys.exit(run_engine_core(sys.argv[1], int(sys.argv[2])))
