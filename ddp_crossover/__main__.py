"""Entry point of ``python -m ddp_crossover``."""

import sys

from ddp_crossover.cli import main

if __name__ == "__main__":
    sys.exit(main())
