"""Where the models of the page come from."""
