"""`python -m zpccl`: the command `zpccl`, also where its script is not on the PATH."""

import sys

from zpccl.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
