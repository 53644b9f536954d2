"""Checks, validation and sweeps of `python -m bench simulate`; bass_core/predict makes the predictions."""
