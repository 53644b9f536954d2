"""Finished answers within a time budget: HumanEval problems, solved and judged."""
