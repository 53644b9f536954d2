"""Checks, a validation and sweeps of `python -m bench simulate`; every prediction is bass_core/predict's."""
