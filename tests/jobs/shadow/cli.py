"""The user's own module `cli`."""

MINE = "cli"
