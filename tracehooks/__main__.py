"""``python -m tracehooks``."""

from tracehooks.surface.cli import main

if __name__ == "__main__":
    main(prog_name="tracehooks")
