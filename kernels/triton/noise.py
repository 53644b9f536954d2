"""The noise of bass_core/sample/noise.py, its torch reference, as Triton device functions.

A key is (seed, sequence id, position, stream). `words` hashes it with Philox4x32-10 (Salmon et al., SC 2011),
`to_uniform` turns a word into a float32 in (0, 1), `token_uniforms` makes such a number for each token id, and
`exponential` turns a uniform into an exponentially distributed number. Invariant: words and uniforms equal the
reference bit for bit.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Run ten rounds on uint32 counters and keys."""
    for _ in tl.static_range(10):
        low_0, high_0 = c0 * 0xD2511F53, tl.umulhi(c0, 0xD2511F53)
        low_1, high_1 = c2 * 0xCD9E8D57, tl.umulhi(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def words(seed_low, seed_high, sequence, position, stream):
    """Return the hash words of int64 sequence ids, positions and streams (scalars or blocks of one shape)."""
    c0 = position.to(tl.uint32)
    c1 = (position * 0 + stream).to(tl.uint32)
    c2 = (position * 0 + sequence).to(tl.uint32)
    c3 = (position * 0 + (sequence >> 32)).to(tl.uint32)
    return philox(c0, c1, c2, c3, seed_low, seed_high)


@triton.jit
def to_uniform(word):
    """Return a hash word as the float32 (word + 0.5) / 2**32, clamped to [2**-33, 1 - 2**-24]."""
    # Multiplying by a power of two is exact, so fusing it with the addition changes nothing.
    return tl.minimum(word.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10, 0.9999999403953552)


@triton.jit
def exponential(u):
    """Return -log(1 - u), also accurate for small u, by Kahan's formula: not every Triton version has log1p."""
    rest = 1.0 - u
    return tl.where(rest == 1.0, u, -tl.log(rest) * (u / tl.where(rest == 1.0, 1.0, 1.0 - rest)))


@triton.jit
def token_uniforms(first, second, token):
    """Return one uniform per token id int32 [V], from two words of the key, by Wellons' triple32 mixer."""
    hashed = token.to(tl.uint32) * 0x9E3779B9 + first
    hashed = hashed ^ (hashed >> 17)
    hashed = hashed * 0xED5AD4BB
    hashed = hashed ^ second
    hashed = hashed ^ (hashed >> 11)
    hashed = hashed * 0xAC4C1B51
    hashed = hashed ^ (hashed >> 15)
    hashed = hashed * 0x31848BAB
    hashed = hashed ^ (hashed >> 14)
    return to_uniform(hashed)
