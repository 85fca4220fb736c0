"""The laboratory: load tests, offline runs, simulations, and what is made of their numbers."""
