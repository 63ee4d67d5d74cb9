"""The user's module, of which each rank holds a part."""
