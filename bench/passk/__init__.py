"""Answers finished within a time budget: HumanEval problems, solved and judged."""
