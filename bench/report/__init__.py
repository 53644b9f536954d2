"""Tables and figures from result files."""
