"""Distributions over tokens and the random numbers that choose from them."""
