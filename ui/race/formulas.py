"""One table that explains how each figure of the page is computed. The figures are computed elsewhere.

A formula is one line of plain text without markup. `formula_button` makes the question mark next to a figure,
and `template` the popovers that these buttons open. `python -m ui.race.formulas` prints the table of
docs/formulas.md. Lane time is the time on the lane's own clock (docs/usage.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from bass_core import METHODS


@dataclass(frozen=True)
class Formula:
    """The label of a figure and the sentences that explain it."""

    name: str
    text: str


# A key that is a field of bass_core's Metrics explains that figure.
FORMULAS = {
    "ms_per_token": Formula("ms per token of one sequence",
        "(lane time without prefills) / (what the lane's texts are worth in plain steps). A token is worth 1 / m "
        "plain steps, where m is the number of rows whose text reaches that position or has not ended yet. "
        "Each step of regular decoding is worth one plain step. Prefills are left out, and so are the first "
        "tokens, which they write."),
    "speedup": Formula("speed-up",
        "The time that regular decoding, the reference lane, would need for this lane's texts / the time that "
        "this lane needed, both without prefills. For a token that is worth 1 / m plain steps, regular "
        "decoding needs 1 / m of its mean step with m unfinished rows. If the texts are equal, this is the ratio "
        "of the lanes' times. While a lane runs, a round longer than four times the median counts as "
        "four times the median."),
    "round_cost": Formula("cost of a round",
        "The mean time of the lane's rounds / the mean time of regular decoding's steps with the same number of "
        "unfinished rows."),
    "throughput_tps": Formula("tokens/s",
        "new tokens of all sequences / seconds of lane time until the last one finished, including prefills."),
    "acceptance_rate": Formula("acceptance",
        "accepted / drafted tokens. For trees of drafts: tokens on the accepted path / all drafted nodes."),
    "new_tokens": Formula("new tokens",
        "The tokens that all sequences of the lane have written so far, without the prompt."),
    "verdict": Formula("the verdict",
        "speed-up = (plain steps that a round writes) / (plain steps that a round costs). Two lanes are level if "
        "their speeds differ by at most two standard errors, estimated from the scatter of their rounds."),
    "axis": Formula("time axis",
        "A bar is one step of a lane: as wide as its time without prefills, as high as the tokens that it wrote "
        "in all rows. Its lighter edge is the time for drafts. Left, hatched: the time for prefills, which have "
        "no width. Below a lane's name: the means of its steps so far."),
    "cache_rows": Formula("the rows' lengths",
        "Left: the row's new tokens. Right: its length if every round stopped all rows at the first rejection of "
        "any row. Each round would then add 1 + the fewest drafts that any row accepted, but no more than it "
        "wrote."),
    "chart_latency": Formula("ms per token of one sequence, over time",
        "(lane time − prefills) / plain steps written, from the lane's start to each point: the mean so far, "
        "not the pace at that moment."),
    "chart_race": Formula("the race", "New tokens of all sequences over the lane's own clock."),
    "chart_acceptance": Formula("draft acceptance rate, over time",
        "accepted / drafted tokens from the lane's start to each point. For trees: path / nodes."),
    "chart_lengths": Formula("draft length",
        "The most tokens that any row drafted in the round. For trees: their depth."),
    "flops_utilization": Formula("FLOPs utilisation",
        "(2 × target parameters × verified tokens + 2 × draft parameters × tokens that the draft drew + "
        "attention's FLOPs) / (lane time without prefills × the device's peak). The peak comes from the "
        "datasheet; on a CPU it is the measured speed of large matrix products."),
    "chart_device": Formula("device",
        "GPU: the share of time in which a kernel ran (NVML). CPU: CPU time of this process / (elapsed time × "
        "cores). All lanes together."),
    "chart_memory": Formula("memory and power",
        "GPU: memory in use and power of the whole board (NVML). Without a GPU: this process's resident "
        "memory."),
    "chart_cache": Formula("keys and values",
        "Bytes of the lane's caches: the prefix that rows share, stored once; the rows' own parts; and the "
        "draft's cache. The line: their size if each row had its own copy of the prefix."),
    "gpu_utilization": Formula("GPU utilization",
        "The share of the last sample's time in which a kernel ran (NVML)."),
    "gpu_memory_mb": Formula("GPU memory", "Memory in use on the whole board, in units of 2^20 bytes (NVML)."),
    "gpu_power_w": Formula("GPU power", "Power of the whole board in watts (NVML)."),
    "gpu_energy_mj": Formula("GPU energy",
        "Energy of the whole board since the start of the race, all lanes together (NVML's counter)."),
    "gpu_sm_percent": Formula("SMs busy", "The share of the last sample's time in which SMs had work (NVML GPM)."),
    "gpu_tensor_percent": Formula("tensor cores busy",
        "The share of the last sample's time in which tensor cores had work (NVML GPM)."),
    "gpu_dram_percent": Formula("GPU memory busy",
        "The share of the memory bandwidth that was used in the last sample (NVML GPM)."),
    "cpu_percent": Formula("CPU share of this process",
        "The process's CPU time / elapsed time. 100 % is one full core."),
    "rss_mb": Formula("memory of this process", "Its resident memory, in units of 2^20 bytes."),
    "name": Formula("device", "The device that runs the models, as the system names it."),
    "p": Formula(
        "p(x)", "The target's probability of the token, after penalties, temperature, top-k, top-p and min-p."
    ),
    "q": Formula("q(x)",
        "The draft's probability of the token, after the same settings; 1 if the token was copied from the text."),
    "chance": Formula("h",
        "The draft token's chance in block verification, which also weighs the drafts after it (Sun et al., arXiv "
        "2403.10444). The last draft with u below h is accepted, and so are all drafts before it."),
    "u": Formula("u",
        "A random number, uniform between 0 and 1, that decides the test of this draft token; r in the code."),
    "outcome": Formula("outcome",
        "Accepted: u is below the chance or, in block verification, below that of a later draft; without u, the "
        "target chose the same token. Rejected: otherwise. Not tested: an earlier draft was rejected, and the "
        "rule tests one by one."),
    "ptl": Formula("per-token latency",
        "(time of a sequence's last token − time of the lane's first token) / (new tokens of the sequence − 1). "
        "First: for the sequence that finished first. Last: for the one that finished last. All: the mean."),
    "per_position_acceptance": Formula("acceptance by position",
        "How often the draft token at this position was accepted / how often one was drafted there. Each row "
        "counts once per round."),
    "ttft_ms": Formula("time to first token", "Lane time of the lane's first token."),
    "drafts": Formula("drafts accepted", "Accepted of all drafted tokens. For trees: of all drafted nodes."),
    "token_acceptance": Formula("token acceptance",
        "accepted / tested draft tokens. Under every rule, the accepted ones and the first one after those count "
        "as tested."),
    "rejection_sampling": Formula("token acceptance by rejection sampling",
        "In this coupled run a draft was accepted only if the target chose the same token. This figure is the "
        "mean of min(1, p/q) over the tested drafts: the share that the rejection rule would accept."),
    "mean_acceptance_length": Formula("mean acceptance length",
        "1 + accepted drafts / rounds of a row that drafted: the mean number of tokens that such a round writes "
        "for the row."),
    "rounds": Formula("rounds", "Verifications and plain steps, without prefills."),
    "target_forwards": Formula("target forwards", "Prefills + rounds."),
    "bandwidth_utilization": Formula("bandwidth utilisation",
        "Bytes of weights and of live keys and values that had to be read / (lane time without prefills × the "
        "device's memory bandwidth). Above 100 %, a processor cache served some of them, or the bandwidth was "
        "measured on a busy machine; it is then measured again before the next race."),
    "ended": Formula("ended by the model", "How many of all sequences ended with the model's end token."),
    "clock_ms": Formula("lane time", "The time that the device spent on this lane, including prefills."),
}  # fmt: skip


# Before a method's name: the key of its description.
LANE = "lane-"
# Words of the first screen that open an explanation.
WORDS = {
    "row": "One of the texts of a batch, which are written at the same time: a batch of four has four rows.",
    "round": "One step of a decoder: it drafts tokens, the model verifies all of them at once, and the accepted "
    "ones are written, plus one token of the model's own. Without drafts, a round is a plain step.",
    "draft": "A guess of the next token by something far cheaper than the model. A bad draft costs time, never "
    "quality.",
    "plain step": "One step of regular decoding: one token for every row, without drafts.",
    "sampled": "Written by the model itself: nothing was drafted here.",
    "accepted": "Drafted, then accepted by the model: a token that needed no step of its own.",
    "certain": "A draft that needs no guess: the race's JSON schema (or another grammar) allows only this token "
    "here. No model drafts it, and it is verified like every draft.",
    "rejected": "A draft that the model rejected. The drafts after it are lost too.",
    "recovered": "The model's own token, in place of a draft that it rejected.",
    "bonus": "The model's own token after drafts that were all accepted: the step that verified them yields it "
    "for free.",
}


def term(key: str, label: str, classes: str = "", again: bool = False) -> str:
    """Return a label that shows its explanation on hover, and in a popover when it is pressed.

    Args:
        key: a key of WORDS or FORMULAS, or "lane-" and a method's name.
        label: the visible text.
        classes: further CSS classes.
        again: whether the page already shows this label elsewhere. The Tab key then skips this one.
    """
    text = METHODS[key[len(LANE) :]].about if key.startswith(LANE) else WORDS.get(key) or FORMULAS[key].text
    return (
        f'<button type="button" class="term {classes}" popovertarget="what-{key.replace(" ", "-")}" '
        f'{"tabindex=-1 " if again else ""}title="{escape(text)}">{label}</button>'
    )


def formula_button(key: str) -> str:
    """Return the button that opens the formula of a figure. Screen readers read the formula with the button.

    The style sheet draws the question mark, so that it is not part of the label's text.
    """
    return (
        f'<button type="button" class="what" popovertarget="what-{key}" '
        f'aria-label="Formula: {escape(FORMULAS[key].name)}" '
        f'aria-describedby="what-{key}"></button>'
    )


def titled(key: str, title: str, tag: str = "h3", mark: str = "") -> str:
    """Return a figure's title with its formula button. `mark` is put among the title's attributes."""
    return f'<div class="titled"><{tag} {mark}>{title}</{tag}>{formula_button(key)}</div>'


def template() -> str:
    """Return a popover for each formula, word and method."""
    entries = [(key, formula.name, formula.text) for key, formula in FORMULAS.items()]
    entries += [(word.replace(" ", "-"), word, text) for word, text in WORDS.items()]
    entries += [(f"{LANE}{name}", method.label, method.about) for name, method in METHODS.items()]
    popovers = "".join(
        f'<div popover id="what-{key}" class="formula"><strong>{escape(name)}</strong> {escape(text)}</div>'
        for key, name, text in entries
    )
    return f'<div class="formulas">{popovers}</div>'


def markdown() -> str:
    """Return the table for docs/formulas.md."""
    lines = [f"| {formula.name} | {formula.text} |" for formula in FORMULAS.values()]
    return "\n".join(["| figure | how it is computed |", "| --- | --- |", *lines]) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
