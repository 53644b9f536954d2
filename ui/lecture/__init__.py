"""What a lecture needs around a race."""
