"""HumanEval problems solved within a time budget, and judged."""
