"""Trees of drafts: how they are made, and how a draft model is fed them."""
