"""What it costs to run races on Ray, and what its queue does for those who wait (requirements-ray.txt)."""
