"""The process part: containers of ranks, and their checkpoint and restore with CRIU."""
