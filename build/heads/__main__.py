"""`python -m build.heads`."""

from build.errors import run_command
from build.heads.cli import main

if __name__ == "__main__":
    run_command(main)
