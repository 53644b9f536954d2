"""Races on Ray: workers that hold a pair each, on this machine or on a cluster."""
