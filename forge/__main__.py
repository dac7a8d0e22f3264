"""`python -m forge` is the `forge` command."""

from forge.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
