"""One answer under its own clock, several of them as a race, and what is shown of them."""
