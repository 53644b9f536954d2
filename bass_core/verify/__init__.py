"""Which drafts stand: verifications that leave the text distributed as the target's own."""
