"""The noise of bass_core/sample/noise.py, which is the reference, for compiled code.

`words`, `hashed` and `uniform` give the same bits as `words`, `token_uniforms` and `to_uniform` there.
"""

from __future__ import annotations

import numpy as np

from ..calls.jit import helper, kernel

_32 = np.uint64(32)
_MASK = np.uint64(0xFFFFFFFF)
_ROUNDS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_KEYS = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_SPREAD = np.uint32(0x9E3779B9)
_SHIFTS = np.uint32(17), np.uint32(11), np.uint32(15), np.uint32(14)
_FACTORS = np.uint32(0xED5AD4BB), np.uint32(0xAC4C1B51), np.uint32(0x31848BAB)
_BELOW_ONE = np.float32(1 - 2.0**-24)


@helper
def key_words(seed, sequence, position, stream):
    """Return the four words of a key's Philox4x32-10 hash, uint64; the arguments are int64."""
    k0, k1 = np.uint64(seed) & _MASK, np.uint64(seed) >> _32
    c0, c1 = np.uint64(position) & _MASK, np.uint64(stream) & _MASK
    c2, c3 = np.uint64(sequence) & _MASK, np.uint64(sequence) >> _32
    for _ in range(10):
        first, second = c0 * _ROUNDS[0], c2 * _ROUNDS[1]
        c0, c1, c2, c3 = (second >> _32) ^ c1 ^ k0, second & _MASK, (first >> _32) ^ c3 ^ k1, first & _MASK
        k0, k1 = (k0 + _KEYS[0]) & _MASK, (k1 + _KEYS[1]) & _MASK
    return c0, c1, c2, c3


@kernel
def words(seed, sequences, positions, streams, out):
    """Write the four words of each key to out int64 [4, keys]; keys and seed are int64."""
    for i in range(len(sequences)):
        out[0, i], out[1, i], out[2, i], out[3, i] = key_words(seed, sequences[i], positions[i], streams[i])


@helper
def hashed(token, first, second):
    """Return a token's 32-bit word, from two words of its key."""
    x = np.uint32(np.uint32(np.uint32(token) * _SPREAD) + first)
    x = np.uint32((x ^ (x >> _SHIFTS[0])) * _FACTORS[0])
    x = x ^ second
    x = np.uint32((x ^ (x >> _SHIFTS[1])) * _FACTORS[1])
    x = np.uint32((x ^ (x >> _SHIFTS[2])) * _FACTORS[2])
    return np.uint32(x ^ (x >> _SHIFTS[3]))


@helper
def uniform(word):
    """Return a 32-bit word as a uniform (word + 0.5) / 2**32 in (0, 1), rounded to float32 at each step."""
    u = np.float32(word) * np.float32(2.0**-32) + np.float32(2.0**-33)
    return min(u, _BELOW_ONE)
