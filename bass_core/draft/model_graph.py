"""Drafts a draft model's chains or trees in one CUDA graph per round (`CapturedModelDrafter`)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..model.graphs import GraphRunner
from ..model.prefill import PrefillSteps
from ..sample.noise import NoiseKeys, RowKeys
from ..sample.params import SamplingParams
from ..sample.shaping import Shaper
from ..sequence import Sequence
from .base import Proposal
from .chain import Levels
from .chain_graph import MAX_UNREAD, ChainGraphs, ChainInput, GraphChains, GraphDrafter
from .model import ModelDrafter


class CapturedModelDrafter(GraphDrafter, ModelDrafter):
    """A ModelDrafter over a runner that captures. Rounds that one graph can't hold are drafted level by level."""

    runner: GraphRunner

    def start(self, rows: list[Sequence]) -> PrefillSteps | None:
        runner, params, self._in_graph = self.runner, self.params, False
        # Drafts of trees have no penalties.
        shapes = params.shapes and self.trees is None
        self._text = runner.device_text() if shapes and params.reads_text else None
        model = _Model(params, shapes, None if self._text is None else self._text.tokens, runner.device)
        options = runner.vocab, params, self.role, self.report_probs, self.trees, self.advances
        self._graphs = ChainGraphs(runner, model, *options)
        return super().start(rows)

    def prepare(self, rows: int) -> None:
        """Do nothing: `prepare_chains` captures the rounds."""

    @torch.inference_mode()
    def prepare_chains(self, rows: int, longest: int) -> None:
        """Capture these rounds' graphs."""
        if longest:
            self._graphs.prepare(rows, longest)

    def _draft(self, rows: list[Sequence], max_drafts: list[int], keys: NoiseKeys) -> Proposal:
        drafted = self._replay(rows, max_drafts, keys) if isinstance(keys, RowKeys) and any(max_drafts) else None
        self._in_graph = drafted is not None
        if drafted is None:
            return super()._draft(rows, max_drafts, keys)
        self.calls += max(max_drafts)
        self._newest = drafted.proposal(max_drafts)
        return self._newest

    def _replay(self, rows: list[Sequence], max_drafts: list[int], keys: RowKeys) -> GraphChains | None:
        """Draft as many levels in each row as in the deepest one; None if no graph can hold them."""
        levels, text = max(max_drafts), self._text
        unread, starts = self._unread(rows, max_drafts)
        if not self._graphs.fits(starts, list(map(len, unread)), levels):
            return None
        if text is not None:
            text.upload(rows, starts)
        drafted = self._graphs.replay(levels, starts, unread, [len(row.prompt) for row in rows], keys)
        if drafted is not None:
            for r, (start, tokens) in enumerate(zip(starts, unread, strict=True)):
                if tokens:
                    self.runner.commit(r, start + len(tokens))
                if text is not None:
                    # A row without drafts wrote padding after its start.
                    text.num_valid[r] = start + len(tokens)
        return drafted

    def repeats(self, rows: list[Sequence], proposal: Proposal) -> bool:
        longest = max(len(row.tokens) for row in rows) + 2 * proposal.width + 1
        if proposal is not self._newest or longest > self.runner.model.context:
            return False
        return self._graphs.repeats([len(row.tokens) for row in rows], proposal.width + 1)

    def on_repeated(self, rows: list[Sequence]) -> None:
        for r, row in enumerate(rows):
            self.runner.commit(r, len(row.tokens))

    def on_verified(self, rows: list[Sequence], proposal: Proposal, accepted: list[int]) -> None:
        super().on_verified(rows, proposal, accepted)
        if self._text is not None and self._in_graph:
            # The graph wrote the accepted drafts after the text.
            for r, count in enumerate(proposal.num_drafted):
                if count:
                    self._text.num_valid[r] = self.runner.lengths[r]

    def rewind(self, row: int, length: int) -> None:
        super().rewind(row, length)
        if self._text is not None:
            self._text.num_valid[row] = min(self._text.num_valid[row], length)

    def move_row(self, source: int, target: int) -> None:
        super().move_row(source, target)
        if self._text is not None:
            self._text.move_row(source, target)


class _Model:
    """A draft model in a captured chain or tree (ChainModel), with penalties that read `text` if `shapes`."""

    vocabulary, reads_states, key = None, False, ("model",)
    # A round that follows a drafted one has two unread tokens, one that follows copies or plain rounds has more.
    widths = (2, MAX_UNREAD)

    def __init__(self, params: SamplingParams, shapes: bool, text: Tensor | None, device: torch.device) -> None:
        self.text, self._constants = text, Shaper.constants(params, device)
        self._shaper = Shaper(params, self._constants) if shapes else None

    @property
    def tensors(self) -> list[Tensor]:
        return list(self._constants.values())

    def most_kept(self, levels: int) -> int:
        # The last draft is never fed.
        return levels - 1

    def logits(self, unread: ChainInput) -> Levels:
        text, ends, depth = None if self.text is None else self.text[: len(unread.starts)], unread.ends, 0
        if text is not None:
            unread.write(text)
        logits = unread.newest(unread.forward(unread.tokens, unread.starts).logits)[:, None]
        while True:
            if self._shaper is not None:
                no_drafts = ends.new_zeros(len(ends), 0)
                logits = self._shaper.apply(logits, text, ends + depth, unread.prompts, no_drafts)
            level = yield logits
            if text is not None:
                text.scatter_(1, (ends + depth)[:, None], level.tokens)
            logits, depth = unread.feed(level.tokens, level, depth).logits, depth + 1
