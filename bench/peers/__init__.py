"""Our lanes compared with other programs for the same task."""
