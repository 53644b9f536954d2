"""What a lane writes: texts and the record of its rounds, as they grow."""
