"""What the page and the API say about their figures and parameters."""
