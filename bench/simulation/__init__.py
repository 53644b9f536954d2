"""The parts of `python -m bench simulate`: hardware, model shapes, step times, rounds, trees.

Contract: a step-time source (`RoundCosts` of bass_core/budget/cost_table.py) gives the times of a verification
and of a draft forward. It is a measured CostTable, or a Roofline of datasheet numbers; rounds.py uses it.
"""
