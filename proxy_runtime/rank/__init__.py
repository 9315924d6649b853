"""The rank side: what is injected into a rank, and how its parts are built."""
