"""What a person sees and a script calls. Contract: imports bass_core's public names alone, and never a tensor."""
