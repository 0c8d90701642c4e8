"""`python -m stage01_cli` is `stages`."""

import sys

from stage01_cli.main import main

sys.exit(main())
