"""Commands on the fleet: thin clients of the workflow engine, the fleet's store and its nodes."""
