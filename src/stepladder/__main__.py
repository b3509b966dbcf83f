"""The command `stepladder`, also as `python -m stepladder`."""

import sys
from typing import Any


def main() -> Any:
    """Run the command line. Ctrl-C is one line even while the command line is imported."""
    try:
        from stepladder.cli import main as run

        return run()
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
