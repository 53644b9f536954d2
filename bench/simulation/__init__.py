"""What `python -m bench simulate` predicts with: hardware, model shapes, step times, rounds.

Contract: a step-time source says what a verification and a forward of the draft cost (`RoundCosts` of
bass_core/decoding/calibrate.py): a measured CostTable, or a Roofline of datasheet numbers. rounds.py plays rounds
on it.
"""
