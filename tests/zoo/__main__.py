"""`python -m tests.zoo [ARCHITECTURE ...]` tries these (default: all) and writes docs/models.md's table."""

import sys

from .comparing import outcome
from .making import NotTried, kinds, make
from .table import UNTRIED, documented, reason, write


def main() -> None:
    outcomes = documented()
    for kind in sys.argv[1:] or kinds():
        try:
            outcomes[kind] = reason(outcome(make(kind)))
        except NotTried as error:
            print(error)
            outcomes[kind] = UNTRIED
        print(f"{kind}: {outcomes[kind]}", flush=True)
        write({name: outcomes[name] for name in kinds() if name in outcomes})


if __name__ == "__main__":
    main()
