"""`python -m kestrel …` is the same program."""

from kestrel.main import main

if __name__ == "__main__":
    main()
