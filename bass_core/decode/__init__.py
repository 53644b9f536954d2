"""Check a request, admit it to memory, and answer it round by round."""
