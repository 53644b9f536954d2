"""Trees of drafts: how they grow, and how a draft model is fed them."""
