"""The user's own module `events`."""

MINE = "events"
