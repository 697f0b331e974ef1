"""`python -m p3kv`: the command line. Without a command, in a server's or scheduler's role
(DMLC_ROLE), that role."""

import sys

from p3kv.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
