"""`python -m cp_engine COMMAND`."""

from cp_engine.cli.main import main

if __name__ == "__main__":
    main()
