"""The parts of `python -m bench simulate`: checks, a validation, sweeps, the paper turned around.

Contract: what a round costs elsewhere, and rounds played on paper, are those of bass_core/prediction.
"""
