"""The command line: `python -m penstock`."""

import sys

from ._cli import main

if __name__ == "__main__":
    sys.exit(main())
