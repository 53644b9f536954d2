"""The sections of the GPU bench, each a list of measurements."""
