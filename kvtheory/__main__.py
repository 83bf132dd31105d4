"""`python -m kvtheory` = `kvtheory`."""

from kvtheory.cli import main

if __name__ == "__main__":
    main()
