"""What the page shows of a race, live and recorded."""
