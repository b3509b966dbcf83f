"""`python -m stepladder` is the command `stepladder`."""

from stepladder.cli import main

if __name__ == "__main__":
    main()
