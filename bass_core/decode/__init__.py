"""Checking a request, admitting it to memory, and the loop that answers it."""
