"""`python -m moeoff.cli`."""

from .main import main

if __name__ == "__main__":
    main(prog_name="moeoff")
