"""`python -m tests.zoo [ARCHITECTURE ...]`: try these (none: all), and write the table of docs/models.md."""

import sys

from .comparing import outcome
from .making import NotTried, kinds, make
from .table import UNTRIED, documented, reason, written


def main() -> None:
    known = documented()
    for kind in sys.argv[1:] or kinds():
        try:
            known[kind] = reason(outcome(make(kind)))
        except NotTried as error:
            print(error)
            known[kind] = UNTRIED
        print(f"{kind}: {known[kind]}", flush=True)
        written({name: known[name] for name in kinds() if name in known})


if __name__ == "__main__":
    main()
