"""The parts of `python -m bench simulate`: checks, validation and sweeps; bass_core/predict makes the predictions."""
