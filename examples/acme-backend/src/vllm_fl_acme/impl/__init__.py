"""The operators, a module for each family."""
