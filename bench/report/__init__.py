"""From result files to tables and figures."""
