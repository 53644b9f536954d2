"""Draft-length policies: Algorithm 1 of BASS, number by number."""

import pytest

from bass_core import RequestError
from bass_core.policies import Algorithm1, FixedLength, make_policy


def lengths(best):
    policy = Algorithm1()
    seen = [policy.length]
    for accepted in best:
        policy.update([0, accepted])
        seen.append(policy.length)
    return seen


def test_algorithm_1():
    assert lengths([7, 9, 3, 2, 0, 0, 0, 0, 0, 0]) == [7, 9, 11, 9, 7, 5, 3, 1, 1, 1, 1]
    assert lengths([0, 0, 0, 0, 0]) == [7, 6, 4, 2, 1, 1]
    assert max(lengths(range(7, 80, 2))) == 32


def test_make_policy():
    own = FixedLength(3)
    assert make_policy("bass").length == 7
    assert make_policy(5).length == 5
    assert make_policy(own) == own
    assert make_policy(own) is not own
    for bad in ("fast", -1, 2.5, None, True):
        with pytest.raises(RequestError, match="draft_length"):
            make_policy(bad)
