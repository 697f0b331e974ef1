"""`python -m p3kv`: the command line, or in a server's or scheduler's role that role."""

import sys

from p3kv.cli import main

if __name__ == "__main__":
    sys.exit(main())
