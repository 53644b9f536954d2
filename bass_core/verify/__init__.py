"""Which drafts are accepted: verifications that leave the text distributed as the target's own."""
