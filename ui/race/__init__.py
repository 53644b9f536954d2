"""The parts of the page that show a race, live or recorded."""
