"""`python -m stage02_server.features.api_servers INDEX`: an API server as a process of its own. Started by the launcher, not by hand."""

import sys

from stage03_engine.args.processes import wake_as_orphan

if __name__ == "__main__":
    wake_as_orphan()  # before what takes seconds to import
    from stage02_server.features.api_servers.serve import main

    sys.exit(main(int(sys.argv[1])))
