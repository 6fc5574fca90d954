"""The command line: `python -m penstock`, and the script `penstock`."""

import sys

from ._cli import main

if __name__ == "__main__":
    sys.exit(main())
