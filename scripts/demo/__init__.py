"""The demonstration that `make demo` plays."""
