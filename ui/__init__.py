"""Contract: what a person sees and a script calls; knows bass_core's snapshots and errors, never a tensor."""
