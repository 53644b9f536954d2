"""What drafts bring: their length, and block verification beside the rejection rule."""
