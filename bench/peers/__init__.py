"""Our lanes beside the programs that people would take instead."""
