"""Which drafts are kept: the rules that leave the distribution of the text as it is."""
