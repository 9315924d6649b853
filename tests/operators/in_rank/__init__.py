"""The part of the operator tests that runs in a rank, where nothing of Ergosphere can be imported."""
