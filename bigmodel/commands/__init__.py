"""Import paths that scripts use for what the command line does."""
