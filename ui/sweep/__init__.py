"""The tab "Sweep": speed-up by batch size, measured here and predicted for other machines."""
