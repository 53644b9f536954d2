"""A lane answers a request under its own clock; a race runs several lanes; snapshots show them."""
