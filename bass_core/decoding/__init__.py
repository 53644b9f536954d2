"""What a request asks, whether it fits the memory, and the loop that answers it."""
