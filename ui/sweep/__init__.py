"""The tab "Sweep": speed-up over the batch, measured here and predicted for other machines."""
