"""A lane's growing output: the texts, and the record of its rounds."""
