"""The user's own module `model`."""

MINE = "model"
