"""Races on Ray: each worker loads a pair, on this machine or on a cluster."""
