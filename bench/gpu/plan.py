"""The sections of the GPU bench: their order, which of them share a process, and the seconds that each needs."""

from __future__ import annotations

# One tuple per process. The process that holds the large models runs several sections.
ORDER = (
    ("smoke",),
    ("checks",),
    ("graphs",),
    ("products",),
    ("roofline", "profile", "lanes", "races"),
    ("faults",),
    ("attention",),
    ("smollm2",),
    ("compiled",),
)
SECTIONS = tuple(name for group in ORDER for name in group)
# Without `compiled`: no claim needs it, and it takes a minute.
DEFAULT = SECTIONS[:-1]
MINUTES = 8.5
# Seconds of a whole run that earlier sections leave for each section.
NEEDS = {
    "smoke": 20.0,
    "checks": 90.0,
    "graphs": 40.0,
    "products": 40.0,
    "roofline": 60.0,
    "profile": 15.0,
    "lanes": 100.0,
    "races": 75.0,
    "faults": 25.0,
    "attention": 35.0,
    "smollm2": 10.0,
    "compiled": 70.0,
}
# Sections that never get more than their NEEDS, however much time is left.
CAPPED = ("smoke", "checks", "faults")
# Sections whose cases are split over several processes, because most of their time is compiling.
SHARED = ("checks",)


def reserved(after: str, sections: list[str], minutes: float) -> float:
    """Seconds to keep for the requested sections after this one, scaled down in a run shorter than MINUTES."""
    later = [name for name in SECTIONS[SECTIONS.index(after) + 1 :] if name in sections]
    return sum(NEEDS[name] for name in later) * min(1.0, minutes / MINUTES)


def seconds(names: list[str], sections: list[str], left: float, minutes: float) -> float:
    """Seconds, of those left, that a process for the named sections may use: at least ten."""
    share = left - reserved(names[-1], sections, minutes)
    if names[-1] in CAPPED:
        share = min(share, NEEDS[names[-1]])
    return max(10.0, share)
