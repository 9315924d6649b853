"""The `ergo` command. One file per command; may import everything."""
