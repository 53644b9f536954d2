"""The settings and the words of a race whose clock is predicted for another machine."""
