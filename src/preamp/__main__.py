"""`python -m preamp` and the `preamp` command."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line and return its exit status."""
    try:
        from preamp.cli.app import run
    except KeyboardInterrupt:
        return 130
    except ImportError as error:
        if error.name not in ("cyclopts", "rich"):
            raise
        print("preamp: the command line needs an extra. Run: pip install 'preamp[cli]'", file=sys.stderr)
        return 2
    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
