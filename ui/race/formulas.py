"""How each figure of the page is computed: one table, for the question marks beside the figures and for the docs.

Contract: a formula is plain text, with no markup, and one line long. `what` makes the button of a figure;
`template` makes the popovers that the buttons open, once a page; `python -m ui.race.formulas` prints the table
of docs/formulas.md. Lane time is that of the lane's own clock, see docs/usage.md.
Non-goals: computing a figure (bass_core/lanes/metrics.py, ui/race/verdict.py, bass_core/lanes/utilization.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape


@dataclass(frozen=True)
class Formula:
    """A figure's name, as the page labels it, and how it is computed."""

    name: str
    text: str


# Keys that are names of bass_core's Metrics are those figures.
FORMULAS = {
    "ms_per_token": Formula("ms per token of one sequence",
        "(lane time − prefills) / plain steps that the lane's texts are worth. A token is worth 1 / m plain "
        "steps, where m counts the rows whose text reaches that token or has not ended yet. "
        "Regular decoding writes one plain step in each step. A sequence's first token comes with its prefill, so "
        "neither counts."),
    "speedup": Formula("speed-up",
        "The time that regular decoding, the reference lane, would need for this lane's texts / the time that "
        "this lane took for them, both without prefills. For a token that is worth 1 / m plain steps regular "
        "decoding needs 1 / m of its own mean step with m unfinished rows. For equal texts this is the ratio of "
        "the lanes' times. While a lane runs, a round longer than four times the median counts as that long."),
    "round_cost": Formula("cost of a round",
        "The mean time of the lane's rounds / that of regular decoding's steps with as many unfinished rows."),
    "throughput_tps": Formula("tokens/s",
        "new tokens of all sequences / seconds of lane time until the last of them finished, prefills "
        "included."),
    "acceptance_rate": Formula("acceptance",
        "accepted / drafted tokens. Of a tree of drafts: tokens on the accepted path / all drafted nodes."),
    "new_tokens": Formula("new tokens",
        "The tokens that all sequences of the lane have so far, without the prompt."),
    "verdict": Formula("the verdict",
        "speed-up = (plain steps that a round writes) / (plain steps that a round costs). Lanes are level if "
        "their speeds differ by less than two standard errors, from the scatter of their rounds."),
    "timeline": Formula("timeline",
        "A block's width is its time on the lane's clock. A round = drafts + verification or plain step + the "
        "host's rest. The shares are of all rounds so far, without prefills. The numbers above are tokens "
        "written."),
    "cache_rows": Formula("the rows' lengths",
        "Left: the row's new tokens. Right: with one common stop it gains in each round 1 + the fewest drafts "
        "that any row accepted, and no more than it wrote."),
    "chart_latency": Formula("ms per token of one sequence, over time",
        "(lane time − prefills) / plain steps written, from the lane's start up to each point: a mean so far, "
        "not the pace at that moment."),
    "chart_race": Formula("the race", "New tokens of all sequences, against the lane's own clock."),
    "chart_acceptance": Formula("draft acceptance rate, over time",
        "accepted / drafted tokens from the lane's start up to each point. Of trees: path / nodes."),
    "chart_lengths": Formula("draft length",
        "The most tokens that any row drafted in the round. Of trees: their depth."),
    "flops_utilization": Formula("FLOPs utilisation",
        "(2 × target parameters × verified tokens + 2 × draft parameters × tokens that the draft drew + "
        "attention's FLOPs) / (lane time without prefills × the device's peak). The peak is the datasheet's, "
        "or on a CPU the measured speed of large products."),
    "chart_device": Formula("device",
        "GPU: the share of time in which a kernel ran (NVML). CPU: this process's time / (elapsed time × "
        "cores), of all lanes together."),
    "chart_memory": Formula("memory and power",
        "GPU: memory in use and power of the whole board (NVML). Without a GPU: this process's resident "
        "memory."),
    "chart_cache": Formula("keys and values",
        "Bytes that the lane's caches hold: a prefix that rows share, once, then room for the rows' own, then "
        "the draft's. The line: what they would take if each row kept a copy of its prefix."),
    "gpu_utilization": Formula("GPU utilization",
        "The share of the last sample's time in which a kernel ran (NVML)."),
    "gpu_memory_mb": Formula("GPU memory", "Memory in use on the whole board, in units of 2^20 bytes (NVML)."),
    "gpu_power_w": Formula("GPU power", "Power of the whole board in watts (NVML)."),
    "gpu_energy_mj": Formula("GPU energy",
        "Energy of the whole board since the race began, all lanes together (NVML's counter)."),
    "gpu_sm_percent": Formula("SMs busy", "The share of the last sample's time in which SMs had work (NVML GPM)."),
    "gpu_tensor_percent": Formula("tensor cores busy",
        "The share of the last sample's time in which tensor cores had work (NVML GPM)."),
    "gpu_dram_percent": Formula("GPU memory busy",
        "The share of the memory's bandwidth that was used in the last sample (NVML GPM)."),
    "cpu_percent": Formula("CPU share of this process",
        "The process's CPU time / elapsed time. 100 % is one core in full."),
    "rss_mb": Formula("memory of this process", "Its resident memory, in units of 2^20 bytes."),
    "name": Formula("device", "What the models run on, as the system names it."),
    "p": Formula(
        "p(x)", "The target's probability of the token, after penalties, temperature, top-k, top-p and min-p."
    ),
    "q": Formula("q(x)", "The draft's probability of the token, after the same."),
    "ratio": Formula("min(1, p/q)", "The chance that the draft is accepted by itself: min(1, p(x) / q(x))."),
    "chance": Formula("h",
        "The draft's chance in the block, which weighs the drafts after it too (Sun et al., arXiv 2403.10444): "
        "the last draft with u below h is accepted, and all before it."),
    "u": Formula("u", "A random number, uniform between 0 and 1, that this draft is tested with."),
    "token": Formula("draft", "The drafted token. The last column is the token that the target added."),
    "outcome": Formula("outcome",
        "Accepted: u is below the chance, or without u the draft is the target's own choice. Rejected: it is "
        "not. Not tested: a draft before it was rejected. Saved: accepted in the block, but not one by one."),
    "ptl": Formula("per-token latency",
        "(time of a sequence's last token − time of the lane's first) / (its new tokens − 1). First: of the "
        "sequence that finished first; Last: of the one that finished last; All: the mean."),
    "per_position_acceptance": Formula("acceptance by position",
        "Row-rounds that accepted their draft at this position / row-rounds that drafted one there."),
    "ttft_ms": Formula("time to first token", "Lane time of the lane's first token."),
    "drafts": Formula("drafts accepted", "Accepted of all drafted tokens. Of trees: of all drafted nodes."),
    "token_acceptance": Formula("token acceptance",
        "accepted / tested drafts. Those after a rejected draft are not tested."),
    "rejection_sampling": Formula("token acceptance by rejection sampling",
        "In this coupled run a draft was accepted where it was the target's own choice. This is the mean of "
        "min(1, p/q) over the drafts that were tested so: the share that the rejection rule would accept."),
    "mean_acceptance_length": Formula("mean acceptance length",
        "1 + accepted drafts / row-rounds that drafted: tokens of a row that drafted."),
    "rounds": Formula("rounds", "Verifications and plain steps, without prefills."),
    "target_forwards": Formula("target forwards", "Prefills + rounds."),
    "bandwidth_utilization": Formula("bandwidth utilisation",
        "Bytes of weights and of live keys and values that had to be read / (lane time without prefills × the "
        "device's memory bandwidth). Above 1 where a cache serves them."),
    "ended": Formula("ended by the model", "Sequences that ended with the model's end token, of all."),
    "clock_ms": Formula("lane time", "The time that the device spent on this lane, prefills included."),
}  # fmt: skip


# Words of the first screen, each explained where it stands.
WORDS = {
    "row": "One of the texts that are written at the same time: a batch of four has four rows.",
    "round": "One step of a decoder: it drafts, the model checks all drafts at once, and the accepted ones are "
    "written, with one token of the model's own.",
    "draft": "A guess of the next token, by something far cheaper than the model. A bad draft costs time, never "
    "quality.",
    "plain step": "One step of regular decoding: one token for every row, and nothing is drafted.",
    "sampled": "Written by the model itself: nothing was drafted here.",
    "accepted": "Drafted, and accepted by the model: a token that cost no step of its own.",
    "recovered": "The model's own token, in place of a draft that it rejected.",
    "bonus": "The model's own token behind drafts that were all accepted: it comes free with their check.",
}


def term(key: str, label: str, classes: str = "", again: bool = False) -> str:
    """A word or label that explains itself: under the pointer, and in a popover when it is pressed.

    again: the same label stands before it, and the Tab key passes over this one.
    """
    text = WORDS.get(key) or FORMULAS[key].text
    return (
        f'<button type="button" class="term {classes}" popovertarget="what-{key.replace(" ", "-")}" '
        f'{"tabindex=-1 " if again else ""}title="{escape(text)}">{label}</button>'
    )


def what(key: str) -> str:
    """The button beside a figure that opens its formula; a screen reader reads the formula with it.

    Its question mark comes from the style sheet, so that it is no part of a label's text.
    """
    return (
        f'<button type="button" class="what" popovertarget="what-{key}" '
        f'aria-label="Formula: {escape(FORMULAS[key].name)}" '
        f'aria-describedby="what-{key}"></button>'
    )


def titled(key: str, title: str, tag: str = "h3", mark: str = "") -> str:
    """A figure's title with its button; `mark`: attributes of the title."""
    return f'<div class="titled"><{tag} {mark}>{title}</{tag}>{what(key)}</div>'


def template() -> str:
    """A popover for each formula and word."""
    said = [(key, one.name, one.text) for key, one in FORMULAS.items()]
    said += [(word.replace(" ", "-"), word, text) for word, text in WORDS.items()]
    made = "".join(
        f'<div popover id="what-{key}" class="formula"><strong>{escape(name)}</strong> {escape(text)}</div>'
        for key, name, text in said
    )
    return f'<div class="formulas">{made}</div>'


def markdown() -> str:
    """The table for docs/formulas.md."""
    lines = [f"| {one.name} | {one.text} |" for one in FORMULAS.values()]
    return "\n".join(["| figure | how it is computed |", "| --- | --- |", *lines]) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
